"""The cpu executable: windows of slots, dummy rows, limits, and what it refuses."""

from __future__ import annotations

import gc
import tempfile
import weakref
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.tiny import (
    compiled,
    joined,
    leave_slot,
    precision_of,
    prefill,
    random_tokens,
    step,
    take_slot,
    tiny_model,
)
from tilewright.compiler.targets.cpu.onnxruntime.executable import CpuExecutable, plan_windows
from tilewright.compiler.targets.interface.base import Executable, Slot
from tilewright.compiler.targets.interface.step import PrefillChunk, Step
from tilewright.errors import CompileError


@given(st.sets(st.integers(0, 60), min_size=1), st.integers(0, 6))
def test_windows_cover_every_slot_once_with_bounded_gaps(slots: set[int], max_gap: int) -> None:
    ordered = sorted(slots)
    windows = plan_windows(ordered, max_gap)
    covered = [slot for first, last in windows for slot in range(first, last)]
    assert len(covered) == len(set(covered)), "windows overlap"
    assert slots <= set(covered)
    for first, last in windows:
        assert first in slots and last - 1 in slots, "a window starts and ends with work"
        inside = [slot for slot in ordered if first <= slot < last]
        gaps = [b - a - 1 for a, b in pairwise(inside)]
        assert max(gaps, default=0) <= max_gap
    for (_, last), (first, _) in pairwise(windows):
        assert first - last > max_gap, "two windows could have been one"


def make(**options: Any) -> Executable:
    return compiled(tiny_model(std=0.2), "cpu", **options)


def test_dummy_rows_do_not_disturb_idle_sequences() -> None:
    executable = make()
    prompts = [random_tokens(count, seed=count) for count in (4, 11, 7)]
    handles = [take_slot(executable, 40) for _ in prompts]
    for handle, prompt in zip(handles, prompts, strict=True):
        step(executable, [(handle, prompt, 0)])
    outer = random_tokens(6, seed=77)
    for at, token in enumerate(outer):  # the middle one is idle inside the window
        step(executable, [(handles[i], [token], len(prompts[i]) + at) for i in (0, 2)])
    continued = random_tokens(3, seed=78)
    got = step(executable, [(handles[1], continued, 11)])
    expected = prefill(executable, prompts[1] + continued)[-1:]
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)


def test_an_idle_sequence_may_be_full() -> None:
    """Its dummy row is at the position after the last one that the context allows."""
    executable = make(max_context=24)
    prompts = [random_tokens(count, seed=count) for count in (4, 24, 7)]
    handles = [take_slot(executable, 24) for _ in prompts]
    for handle, prompt in zip(handles, prompts, strict=True):
        step(executable, [(handle, prompt, 0)])
    logits = step(executable, [(handles[i], [5], len(prompts[i])) for i in (0, 2)])
    for row, i in enumerate((0, 2)):
        expected = prefill(executable, [*prompts[i], 5])[-1]
        torch.testing.assert_close(logits[row], expected, atol=1e-5, rtol=1e-5)


def test_slots_far_apart_are_stepped_together() -> None:
    executable = make(max_batch=12)
    handles = [take_slot(executable, 16) for _ in range(12)]
    prompt = random_tokens(5)
    for handle in (handles[0], handles[11], handles[4]):
        step(executable, [(handle, prompt, 0)])
    expected = prefill_after_free(executable, handles[1], [*prompt, 9])
    logits = step(executable, [(handles[i], [9], 5) for i in (11, 0, 4)])
    for row in logits:
        torch.testing.assert_close(row, expected[-1], atol=1e-5, rtol=1e-5)


def prefill_after_free(executable: Executable, handle: Slot, tokens: list[int]) -> torch.Tensor:
    leave_slot(executable, handle)
    return prefill(executable, tokens)


def test_more_windows_than_are_kept() -> None:
    executable = make()
    tokens = random_tokens(40)
    expected = prefill(executable, tokens)
    for length in [*range(2, 24), 2, 3]:
        got = prefill(executable, tokens[:length])
        torch.testing.assert_close(got, expected[:length], atol=1e-5, rtol=1e-5)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    """Also with int8 activations: rounding is row by row."""
    executable = make(precision=precision_of("bfp8", "lofi"), compute="fast", max_batch=8)
    handles = [take_slot(executable, 16) for _ in range(8)]
    for index, handle in enumerate(handles):
        step(executable, [(handle, random_tokens(5 + index % 3, seed=index), 0)])
    work = [(handle, [index], 5 + index % 3) for index, handle in enumerate(handles)]
    together = step(executable, work)
    for index, handle in enumerate(handles):  # back to where each stood
        step(executable, [(handle, random_tokens(5 + index % 3, seed=index), 0)])
    alone = torch.cat([step(executable, [entry]) for entry in work])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_int8_activations_are_near_and_not_equal() -> None:
    model, tokens = tiny_model(std=0.2), random_tokens(30)
    precision = precision_of("bfp8", "lofi")
    exact = prefill(compiled(model, "cpu", precision=precision), tokens)
    fast = prefill(compiled(model, "cpu", precision=precision, compute="fast"), tokens)
    error = float((fast - exact).abs().max())
    assert 1e-4 < error < 0.3 * float(exact.std())


def test_the_whole_context_can_be_filled() -> None:
    model, tokens = tiny_model(std=0.2), random_tokens(64)
    got = prefill(compiled(model, "cpu"), tokens, [60, 1, 1, 1])
    expected = prefill(compiled(model), tokens)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("head_dim", [2, 8, 12, 24, 40])
def test_head_sizes_that_onnx_runtime_refuses_are_named_before_it_does(head_dim: int) -> None:
    message = f"head_dim {head_dim}; allowed: multiples of 16"
    with pytest.raises(CompileError, match=message):
        compiled(tiny_model(num_layers=1, head_dim=head_dim), "cpu")


@pytest.mark.parametrize("head_dim", [16, 48, 80, 256])
def test_head_sizes_that_are_allowed_run(head_dim: int) -> None:
    model, tokens = tiny_model(num_layers=1, head_dim=head_dim, std=0.2), random_tokens(5)
    got = prefill(compiled(model, "cpu"), tokens)
    torch.testing.assert_close(got, prefill(compiled(model), tokens), atol=1e-4, rtol=0)


def test_memory_counts_weights_and_positions() -> None:
    executable = make(precision=precision_of("fp32"))
    weights = executable.memory().weights
    model = tiny_model()
    numbers = sum(tensor.numel() for tensor in model.checkpoint.tensors.values())
    tied = model.checkpoint.tensors["model.embed_tokens.weight"].numel()
    assert weights == 4 * (numbers + tied)
    assert executable.memory().state == 0
    handle = take_slot(executable, 20)
    step(executable, [(handle, random_tokens(10), 0)])
    assert executable.memory().state == 10 * 2 * (2 * 2 * 16 * 4)
    leave_slot(executable, handle)
    assert executable.memory().state == 0


def test_blocks_take_the_memory_of_their_format() -> None:
    sizes = {
        name: make(precision=precision_of(name, "lofi", embedding="bf16"), compute="fast")
        .memory()
        .weights
        for name in ("bfp4", "bfp8", "fp32")
    }
    assert sizes["bfp4"] < sizes["bfp8"] < sizes["fp32"] / 2


def test_closing_releases_session_and_cache() -> None:
    executable = make()
    assert isinstance(executable, CpuExecutable)
    prefill(executable, random_tokens(9))
    caches = weakref.ref(executable._caches)
    session = weakref.ref(executable._session)
    executable.close()
    gc.collect()
    assert caches() is None
    assert session() is None


def test_no_files_are_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    executable = make()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(CompileError):
        compiled(tiny_model(num_layers=1, head_dim=8), "cpu")
    assert list(tmp_path.iterdir()) == []
    assert prefill(executable, random_tokens(5)).shape == (5, 61)


@pytest.mark.parametrize("slots", [(0, 1), (1, 0), (0, 2), (1,)], ids=str)
def test_steps_of_the_same_slots_are_as_those_of_new_ones(slots: tuple[int, ...]) -> None:
    """The same tuple of slots, or an equal one: the same logits, and the same state after them."""
    logits = []
    for anew in (False, True):
        executable = compiled(tiny_model(std=0.2), "cpu")
        for length in (3, 5, 4):
            slot = take_slot(executable, 32)
            chunk = PrefillChunk(slot, 0, tuple(random_tokens(length, seed=length)), chooses=True)
            executable.step(Step(prompts=(chunk,)))
        kept, found = tuple(map(Slot, slots)), []
        for number in range(6):
            if number == 3:  # another sequence goes on in between
                executable.step(Step(decode=(Slot(1),)))
            given = (*kept,) if anew else kept
            found.append(joined(executable.step(Step(decode=given, want_logits=True))))
        logits.append(torch.stack(found))
        executable.close()
    assert torch.equal(*logits)
