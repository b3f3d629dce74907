"""The draft layer on the CUDA target: drafts as in plain torch, memory, and unchanged outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.draft_layers import plain_drafts, tiny_layer
from tests.models.test_qwen3_5 import ON_CUDA
from tests.targets.test_draft_layer import final_states, run_operations
from tests.tiny import (
    compiled,
    leave_slot,
    lowered,
    precision_of,
    random_tokens,
    take_slot,
    tiny_model,
)
from tilewright.compiler.driver import lower_draft_layer
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda import memory_budget
from tilewright.compiler.targets.cuda.graphs import draft_layer
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.cuda.memory_budget import weight_bytes, work_bytes
from tilewright.compiler.targets.cuda.state.final_states import FinalStates
from tilewright.compiler.targets.cuda.state.token_batch import TokenBatch
from tilewright.compiler.targets.interface.base import CompileOptions, Executable, LoweredLayer
from tilewright.compiler.targets.interface.step import (
    PrefillChunk,
    Step,
    SwapHandle,
    SwapIn,
    SwapOut,
)
from tilewright.errors import CompileError
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.speculative.config import MTP, SpeculativeConfig

MODEL = tiny_model(std=0.3, model_type="qwen3_5", **ON_CUDA)
LAYER = tiny_layer(MODEL)
for _tensors in (MODEL.checkpoint.tensors, LAYER.checkpoint.tensors):
    _tensors.update({name: each.bfloat16().float() for name, each in _tensors.items()})
OPTIONS = CompileOptions(max_batch=4, max_context=64, compute="exact", max_drafts=3)


def lowered_layer() -> LoweredLayer:
    return lower_draft_layer(MODEL, LAYER, precision_of("bf16"), target="cuda", options=OPTIONS)


@pytest.fixture(scope="module")
def executable() -> Iterator[Executable]:
    made = compiled(
        MODEL, "cuda", precision=precision_of("bf16"), max_drafts=3, draft_layer=lowered_layer()
    )
    yield made
    made.close()


def test_drafts_equal_plain_torch_after_chunks_and_steps(executable: Any) -> None:
    """Drafts follow a prompt, a step without drafts, and a step with a right and a wrong draft."""
    prompt, start = random_tokens(9, seed=5), 0
    other, slot = (take_slot(executable) for _ in range(2))
    tokens = list(prompt)
    for size in (1, 5, 3):
        chunk = PrefillChunk(slot, start, tuple(prompt[start : start + size]), start + size == 9)
        output, start = executable.step(Step(prompts=(chunk,))), start + size
    tokens += output.parts[0].read().tokens
    for turn in range(3):
        drafts = executable.step(Step(proposes={slot: 4})).parts[0].read().tokens
        expected, logits = plain_drafts(LAYER, tokens, final_states(tokens[:-1], MODEL), 4)
        assert drafts == expected, f"margin {logits.topk(2).values}"
        given = {} if turn == 0 else {slot: (drafts[0], drafts[1] ^ 1)}
        tokens += executable.step(Step(decode=(slot,), drafts=given)).parts[0].read().tokens
    for used in (slot, other):
        leave_slot(executable, used)


def test_steps_without_drafts_reach_the_layer_before_they_are_overwritten(
    executable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer has read all tokens but the last few, without logits. Slots without drafts are
    not read.
    """
    monkeypatch.setattr(draft_layer, "_MAX_UNREAD", 4)
    decode, reads = executable._layer._steps.decode, list[bool]()

    def counted(*args: Any, **how: Any) -> torch.Tensor:
        reads.append(how["has_logits"])
        return decode(*args, **how)

    monkeypatch.setattr(executable._layer._steps, "decode", counted)
    slot, other = (take_slot(executable) for _ in range(2))
    tokens: dict[Any, list[int]] = {}
    for used in (slot, other):
        chunk = PrefillChunk(used, 0, tuple(random_tokens(4, seed=2)), chooses=True)
        output = executable.step(Step(prompts=(chunk,)))
        tokens[used] = [*chunk.tokens, *output.parts[0].read().tokens]
    slots = slot, other
    for turn in range(10):
        if turn % 6 == 0:
            executable.step(Step(proposes={slot: 1}))
        for used, token in zip(
            slots, executable.step(Step(decode=slots)).parts[0].read().tokens, strict=True
        ):
            tokens[used].append(token)
    assert executable._layer._ends[slot] > 8 and executable._layer._ends[other] == 3
    assert reads.count(True) == 2 and reads.count(False) >= 2
    for used in slots:
        drafts = executable.step(Step(proposes={used: 2})).parts[0].read().tokens
        expected = plain_drafts(LAYER, tokens[used], final_states(tokens[used][:-1], MODEL), 2)[0]
        assert drafts == expected, "the last tokens are kept"
        leave_slot(executable, used)


def test_a_swapped_or_closed_slot_leaves_its_draft_keys_in_its_pages(
    executable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer reads accepted tokens before the slot loses its pages. Drafts continue."""
    slot, fresh = take_slot(executable), take_slot(executable)
    chunk = PrefillChunk(slot, 0, tuple(random_tokens(4, seed=2)), chooses=True)
    tokens = [*chunk.tokens, *executable.step(Step(prompts=(chunk,))).parts[0].read().tokens]
    read, entries = executable._layer._read, list[Any]()

    def recorded(found: Any) -> None:
        entries.extend(found)
        read(found)

    def decode(used: Any) -> None:
        for _ in range(3):
            tokens.extend(executable.step(Step(decode=(used,))).parts[0].read().tokens)

    executable.step(Step(proposes={slot: 1}))
    decode(slot)
    monkeypatch.setattr(executable._layer, "_read", recorded)
    home = SwapHandle(0)
    executable.step(Step(edits=(SwapOut(slot, home), SwapIn(fresh, home))))
    assert [position for _, position in entries] == [3, 4, 5]
    drafts = executable.step(Step(proposes={fresh: 2})).parts[0].read().tokens
    assert drafts == plain_drafts(LAYER, tokens, final_states(tokens[:-1], MODEL), 2)[0]
    decode(fresh)
    entries.clear()
    for used in (fresh, slot):
        leave_slot(executable, used)
    assert [position for used, position in entries if used == fresh] == [6, 7, 8]


def test_prefill_states_need_no_large_norm_and_are_never_stale(executable: Any) -> None:
    """A norm is of 512 rows at most. A reset discards a long prefill."""
    width, device = 8, torch.device("cpu")
    kept = FinalStates(1, 600, width, torch.bfloat16, device)
    for count in (600, 1300):
        states, sizes = torch.randn(count, width), list[int]()

        def normed(x: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(len(x))
            return 2 * x

        kept.keep_prompts(states, normed, TokenBatch.padding(count, device), slice(0, 0))
        assert max(sizes) <= 512
        assert torch.equal(kept.take_prompts()[1 : 1 + count], (2 * states).bfloat16())
    final = executable._layer._final
    final._large = torch.ones(1)
    executable.reset()
    assert final._large is None


def test_a_long_prefill_that_failed_leaves_no_states(
    executable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next prompt has its own drafts, without a reset."""
    executable.reset()
    final, tokens = executable._layer._final, random_tokens(9, seed=5)
    failed, slot = (take_slot(executable) for _ in range(2))
    with monkeypatch.context() as patch:
        patch.setattr(final, "_prompts", final._prompts[:4])
        patch.setattr(final, "take_prompts", lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            executable.step(Step(prompts=(PrefillChunk(failed, 0, tuple(tokens[::-1])),)))
    assert final._large is not None
    chunk = PrefillChunk(slot, 0, tuple(tokens), chooses=True)
    tokens += executable.step(Step(prompts=(chunk,))).parts[0].read().tokens
    drafts = executable.step(Step(proposes={slot: 2})).parts[0].read().tokens
    assert drafts == plain_drafts(LAYER, tokens, final_states(tokens[:-1], MODEL), 2)[0]
    for used in (failed, slot):
        leave_slot(executable, used)


def test_drafts_end_with_the_pages_of_a_slot(executable: Any) -> None:
    """A slot has pages for 64 positions."""
    slot = take_slot(executable)
    chunk = PrefillChunk(slot, 0, tuple(random_tokens(63, seed=3)), chooses=True)
    executable.step(Step(prompts=(chunk,)))
    assert executable.step(Step(proposes={slot: 3})).parts[0].read().counts == [2]
    leave_slot(executable, slot)


def test_a_request_that_is_swapped_in_keeps_the_drafts(
    executable: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slot is opened by the step for which drafts are proposed."""
    executable.reset()
    speculative = SpeculativeConfig(method=MTP, max_drafts=2, schedule=((1, 9, 2),))
    policy = SchedulerConfig(speculative=speculative, host_bytes=1 << 30)
    loop = EngineLoop(executable, policy=policy)
    scheduler = loop.scheduler
    decode_rows, preempted = scheduler._decode_rows, list[RequestState]()

    def preempt_once() -> list[RequestState]:
        rows = decode_rows()
        if len(rows) == 2 and not preempted:
            preempted.append(rows[1])
            scheduler._preempt(rows[1])
            return rows[:1]
        return rows

    monkeypatch.setattr(scheduler, "_decode_rows", preempt_once)
    for index in range(2):
        params = SamplingParams(max_tokens=6)
        loop.add(RequestState(index, (3, 1, 4 + index), params))
    while loop.has_work():
        loop.step()
    assert preempted and scheduler.speculator.max_drafts


@pytest.mark.slow
def test_a_wrong_layer_changes_no_output(executable: Any) -> None:
    executable.reset()
    run_operations(executable, 8, seed=3)


@pytest.mark.gpu
def test_captured_layer_changes_no_output() -> None:
    """Requests come and go, with graphs for all steps. Float32 arithmetic gives equal tokens."""
    how: Any = {"precision": precision_of("bf16"), "draft_layer": lowered_layer()}
    made = compiled(MODEL, "cuda", max_drafts=5, **how)
    made.prepare()
    assert run_operations(made, 2_000, seed=7)
    made.close()


def test_memory_budget_counts_the_layer() -> None:
    """Embedding and head are the model's own, with equal formats."""
    plan = lower_to_program(compiled_graph())
    layer = lower_to_program(lowered_layer().graph_module)
    whole = replace(plan, draft_layer=layer)
    assert weight_bytes(whole) > weight_bytes(plan)
    assert weight_bytes(whole) - weight_bytes(plan) < weight_bytes(layer)
    assert len(whole.states) == len(plan.states) + 1
    hidden, rows = plan.hidden_size, memory_budget.prompt_sizes(plan, OPTIONS)
    assert work_bytes(whole, OPTIONS) - work_bytes(plan, OPTIONS) > 4 * hidden * sum(rows)


def compiled_graph() -> Any:
    return lowered(MODEL, target="cuda", precision=precision_of("bf16"))[0]


def test_too_little_memory_is_refused_before_the_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan = lower_to_program(compiled_graph())
    with_layer = replace(plan, draft_layer=lower_to_program(lowered_layer().graph_module))
    needed = [
        weight_bytes(each) + work_bytes(each, OPTIONS) + memory_budget.state_bytes(each, OPTIONS)
        for each in (plan, with_layer)
    ]
    monkeypatch.setattr(memory_budget, "free_bytes", lambda *_: sum(needed) // 2)

    def read(name: str) -> torch.Tensor:
        raise AssertionError(f"{name} was read")

    layer = LoweredLayer(lowered_layer().graph_module, read)
    with pytest.raises(CompileError, match="GB are needed"):
        compiled(MODEL, "cuda", precision=precision_of("bf16"), max_drafts=3, draft_layer=layer)


def test_sampled_requests_have_drafts_and_the_same_output(executable: Any) -> None:
    executable.reset()
    config = SpeculativeConfig(method=MTP, max_drafts=3, schedule=((1, 9, 3),))
    outputs = []
    for speculative in (None, config):
        loop = EngineLoop(executable, policy=SchedulerConfig(speculative=speculative))
        params = SamplingParams(temperature=0.8, seed=3, max_tokens=6)
        request = RequestState(0, (3, 1, 4, 1, 5), params)
        loop.generate([request])
        outputs.append(request.output)
    assert outputs[0] == outputs[1] and request.num_draft_tokens
