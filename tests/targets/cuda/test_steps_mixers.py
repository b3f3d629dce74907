"""Experts and linear attention on the cuda executable: batches, copies, captures, random calls."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_qwen3_5_moe import ON_CUDA
from tests.runtime.test_engine import CONTEXT, Operations
from tests.targets.cuda.test_conformance_cuda import EXACT, on_cuda
from tests.targets.test_conformance import assert_near
from tests.tiny import (
    compiled,
    copy_slot,
    joined,
    leave_slot,
    lowered,
    precision_of,
    prefill,
    random_tokens,
    step,
    take_slot,
    tiny_model,
)
from tilewright.compiler.targets.cuda.executable import CudaExecutable
from tilewright.compiler.targets.cuda.kernels.delta_rule import delta_step as native_delta
from tilewright.compiler.targets.cuda.kernels.delta_rule.causal_conv1d import causal_conv1d_step
from tilewright.compiler.targets.cuda.kernels.delta_rule.step_triton import (
    DeltaInputs,
    delta_rule_step,
)
from tilewright.compiler.targets.cuda.kernels.delta_rule.table import STEP
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.cuda.memory_budget import state_bytes, work_bytes
from tilewright.compiler.targets.cuda.state.tables import sequence_bytes
from tilewright.compiler.targets.cuda.state.token_batch import TokenBatch
from tilewright.compiler.targets.cuda.steps import routes as steps_routes
from tilewright.compiler.targets.cuda.steps.mixers import mixer_bytes
from tilewright.compiler.targets.interface.base import CompileOptions, Executable
from tilewright.compiler.targets.interface.step import (
    CopyState,
    LoadState,
    PrefillChunk,
    SaveState,
    Slot,
    StateSnapshot,
    Step,
)
from tilewright.runtime.engine import Engine

TINY: dict[str, Any] = {**ON_CUDA, "hidden_size": 16, "num_layers": 1, "linear_layers": (True,)}
BF16 = precision_of("bf16")


def model_of(**changes: Any) -> Any:
    return tiny_model(std=0.2, model_type="qwen3_5_moe", **{**TINY, **changes})


@pytest.fixture(scope="module")
def exact() -> Executable:
    return on_cuda(model_of(), BF16, "exact")


@pytest.fixture(scope="module")
def fast() -> Executable:
    precision = precision_of("bf16", experts_ff1_3="bfp8", experts_ff2="bfp4")
    return on_cuda(model_of(), precision, "fast")


def test_a_row_s_bits_do_not_depend_on_its_batch(fast: Executable) -> None:
    """For any row count and any row index."""
    lengths = (6, 2, 9)
    handles = [take_slot(fast, 20) for _ in lengths]
    for handle, length in zip(handles, lengths, strict=True):
        step(fast, [(handle, random_tokens(length, seed=length), 0)])
    (alone,) = handles[:1]
    again = copy_slot(fast, alone, lengths[0])
    single = step(fast, [(again, [7], lengths[0])])
    rows = [(handle, [7 + i], lengths[i]) for i, handle in enumerate(handles)]
    together = step(fast, rows[::-1])
    assert torch.equal(together[-1], single[0])
    for handle in (*handles, again):
        leave_slot(fast, handle)


def test_one_kernel_convolves_and_applies_the_rule_in_decode_steps(
    fast: CudaExecutable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts use two kernels. The kernel's inputs remain until it runs."""
    tokens, chunks = random_tokens(9), [5, 1, 1, 2]
    expected = prefill(fast, tokens, chunks)
    assert "linear attention in Triton (" in fast._steps.kernels()
    calls = []

    def together(out: Tensor, inputs: DeltaInputs, z: Tensor, norm: Any, **given: Any) -> None:
        weight, window, early = (given.pop(name) for name in ("weight", "window", "early"))
        calls.append((len(out), early))
        convolved = inputs.qkv.new_empty(inputs.qkv.shape)
        where = {name: given[name] for name in ("positions", "slots")}
        causal_conv1d_step(convolved, inputs.qkv, weight, window=window, **where)
        delta_rule_step(out, replace(inputs, qkv=convolved), z, norm, **given)

    mixers = fast._steps._mixers
    rules = {at: replace(each, step=STEP) for at, each in mixers._rules.items()}
    monkeypatch.setattr(mixers, "_rules", rules)
    monkeypatch.setattr(native_delta, "delta_step", together)
    assert torch.equal(prefill(fast, tokens, chunks), expected)
    assert calls == [(1, False)] * 2


def test_a_copy_is_a_snapshot(exact: Executable) -> None:
    """Changes to a copy do not reach the original."""
    tokens = random_tokens(9)
    expected = prefill(exact, tokens)
    handle = take_slot(exact, 20)
    step(exact, [(handle, tokens[:5], 0)])
    kept = copy_slot(exact, handle, 5)
    step(exact, [(handle, random_tokens(4, seed=5), 5)])
    assert_near(step(exact, [(kept, tokens[5:], 5)])[0], expected[-1], EXACT)
    leave_slot(exact, handle)
    leave_slot(exact, kept)


def three_steps(
    exact: Executable, *between: StateSnapshot
) -> tuple[tuple[Slot, ...], list[int], Tensor]:
    """Decode two slots in three steps after short prompts, without reading tokens.

    Return the slots, the second slot's tokens, and the last logits. ``between``: snapshots before
    the second step.
    """
    handles = tuple(take_slot(exact, 20) for _ in range(2))
    for handle in handles:
        step(exact, [(handle, random_tokens(3), 0)])
    forced = dict(zip(handles, (1, 2), strict=True))
    parts = [*exact.step(Step(decode=handles, forced=forced)).parts]
    kept = tuple(SaveState(handles[1], each) for each in between)
    parts += exact.step(Step(decode=handles, edits=kept)).parts
    output = exact.step(Step(decode=handles, want_logits=True))
    return handles, [2, *(part.read().tokens[1] for part in parts)], joined(output)


def test_lengths_of_steps_that_run_ahead(exact: Executable) -> None:
    handles, chosen, logits = three_steps(exact)
    copy = take_slot(exact, 20)
    exact.step(Step(edits=(CopyState(handles[1], copy, 6),)))
    again = prefill(exact, [*random_tokens(3), *chosen])
    assert_near(logits[1], again[-1], EXACT)
    after = prefill(exact, [*random_tokens(3), *chosen, 7])
    assert_near(step(exact, [(copy, [7], 6)])[0], after[-1], EXACT)
    for handle in (*handles, copy):
        leave_slot(exact, handle)


def test_state_kept_while_rows_decode_is_that_of_its_position(exact: Executable) -> None:
    """The snapshot precedes the step, and rows continue unchanged."""
    handles, chosen, logits = three_steps(exact, StateSnapshot(4))
    other = take_slot(exact, 20)
    edits = (CopyState(handles[1], other, 6), LoadState(other, StateSnapshot(4)))
    exact.step(Step(edits=edits))
    again = prefill(exact, [*random_tokens(3), *chosen])
    assert_near(logits[1], again[-1], EXACT)
    assert_near(step(exact, [(other, chosen[1:], 4)])[0], again[-1], EXACT)
    for handle in (*handles, other):
        leave_slot(exact, handle)


def test_snapshots_on_the_way_through_a_prompt_continue_as_the_whole(exact: Executable) -> None:
    """Also two at a position, a snapshot at the chunk's end, and an overwritten snapshot."""
    tokens = random_tokens(9)
    expected = prefill(exact, tokens)
    handle, other = take_slot(exact, 20), take_slot(exact, 20)
    before = exact.memory().state
    saves = (
        (9, StateSnapshot(3)),
        (5, StateSnapshot(0)),
        (7, StateSnapshot(1)),
        (5, StateSnapshot(2)),
    )
    chunk = PrefillChunk(handle, 0, tuple(tokens), chooses=True, saves=saves)
    (part,) = exact.step(Step(prompts=(chunk,), want_logits=True)).parts
    assert part.logits is not None
    assert_near(part.logits()[0], expected[-1], EXACT)
    assert exact.memory().state == before + 4 * sequence_bytes(states_of(exact))
    exact.step(Step(edits=(SaveState(handle, StateSnapshot(1)),)))
    exact.step(Step(edits=(CopyState(handle, other, 9),)))
    for snapshot, position in ((0, 5), (2, 5), (1, 9), (3, 9)):
        exact.step(Step(edits=(LoadState(other, StateSnapshot(snapshot)),)))
        rest = [*tokens, 11][position:]
        got = step(exact, [(other, rest, position)])[0]
        assert_near(got, prefill(exact, [*tokens, 11])[-1], EXACT)
    leave_slot(exact, handle)
    leave_slot(exact, other)
    exact.reset()
    assert exact.memory().state == 0


def states_of(executable: Any) -> Any:
    return executable._steps._plan.sequence_states


def test_steps_of_padding_leave_every_state_as_it_is() -> None:
    """Graph capture runs these steps."""
    executable = compiled(model_of(), "cuda", precision=BF16, compute="exact")
    assert isinstance(executable, CudaExecutable)
    states = executable._state.sequences
    for each in states.values():
        each.normal_()
    before = {name: each.clone() for name, each in states.items()}
    rows = TokenBatch.padding(4, executable.device)
    with torch.no_grad():
        executable._steps.decode(rows)
        last = torch.zeros(1, dtype=torch.int64, device=executable.device)
        executable._steps.prefill(rows, logit_rows=last)
    assert all(torch.equal(each, before[name]) for name, each in states.items())


def test_a_slot_s_last_sequence_is_forgotten(exact: Executable) -> None:
    tokens = random_tokens(6)
    expected = prefill(exact, tokens)
    assert_near(prefill(exact, tokens, [1, 5]), expected, EXACT)
    assert_near(prefill(exact, tokens, [4, 1]), expected, EXACT)


def test_experts_of_a_long_prompt_run_part_by_part(
    exact: Executable, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = random_tokens(11)
    expected = prefill(exact, tokens)
    monkeypatch.setattr(steps_routes, "PART_TOKENS", 4)
    assert_near(prefill(exact, tokens), expected, EXACT)


class OnPages(Operations):
    """Memory is allocated in whole pages on demand."""

    def check_state(self) -> None:
        executable = self.engine.executable
        assert set(self.engine.request_ids) == set(self.histories)
        assert executable.memory().state == len(self.histories) * executable.state_bytes(CONTEXT)


def test_random_operations_are_the_reference_s() -> None:
    model = model_of(num_experts=3, shared_size=0)
    executable = compiled(model, "cuda", precision=BF16, max_batch=2, max_context=32)
    oracle = compiled(model, "reference", precision=BF16, max_batch=32, max_context=32)
    operations = OnPages(Engine(executable, step_tokens=13), oracle, seed=1)
    operations.run(8)
    counts = operations.counts
    assert counts["prefill"] and counts["decode"] > 1 and counts["remove"], counts


def test_bytes_are_counted_before_anything_is_loaded() -> None:
    model = model_of(num_layers=2, linear_layers=(True, False))
    plan = lower_to_program(lowered(model, target="cuda", precision=BF16)[0])
    options = CompileOptions(max_batch=4, max_context=64, compute="exact")
    executable = compiled(model, "cuda", precision=BF16)
    assert state_bytes(plan, options) == 4 * executable.state_bytes(64)
    handle = take_slot(executable, 64)
    assert executable.memory().state == executable.state_bytes(64)
    leave_slot(executable, handle)
    keys, values = 16, 32  # 8 and 24 channels, as blocks
    handed_on = 2 * (values * keys + 64 * keys + 64 * values + 64) + 64 * keys + 2 * 64
    assert mixer_bytes(plan, 64) == max(4 * 64 * 2 * 16, 4 * handed_on)
    assert mixer_bytes(plan, 2048) == 4 * 32 * handed_on
    assert work_bytes(plan, options) > mixer_bytes(plan, 64)


def test_the_experts_of_a_step_are_counted_and_the_step_is_run(exact: CudaExecutable) -> None:
    tokens = random_tokens(7)
    expected = prefill(exact, tokens)
    handles = [take_slot(exact, 20) for _ in range(3)]
    for handle in handles:
        step(exact, [(handle, tokens[:5], 0)])
    alone = exact.chosen_experts(handles[:1], tokens[5:6])
    assert alone == [TINY["experts_per_token"]]
    assert_near(step(exact, [(handles[0], tokens[6:], 6)])[0], expected[-1], EXACT)
    (together,) = exact.chosen_experts(handles[1:], (3, 50))
    assert TINY["experts_per_token"] <= together <= TINY["num_experts"]
    for handle in handles:
        leave_slot(exact, handle)
