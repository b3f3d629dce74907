"""Sampled tokens in pinned buffers, and the torch calls of an unchanged decode step."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.targets.cuda.test_executable import BF16, first_step, started
from tests.tiny import compiled, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda.graphs.capture import CapturedGraph
from tilewright.compiler.targets.cuda.kernels.common import driver
from tilewright.compiler.targets.cuda.outputs import pinned_ring
from tilewright.compiler.targets.cuda.outputs.pinned_ring import PinnedRing
from tilewright.compiler.targets.cuda.outputs.sampling_batch import make_choice
from tilewright.compiler.targets.interface.step import (
    END_TOKEN,
    GOES_ON,
    AssignPages,
    Step,
)

CPU = torch.device("cpu")


class Calls(TorchDispatchMode):
    """Records the torch calls of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def ring(monkeypatch: pytest.MonkeyPatch) -> PinnedRing:
    """A ring for a GPU, with buffers in plain memory."""
    event: Any = SimpleNamespace(synchronize=lambda: None)

    def empty(num_words: int) -> pinned_ring._PinnedBuffer:
        words = torch.zeros(num_words, dtype=torch.int64)
        return pinned_ring._PinnedBuffer(words.numpy(), event, words.data_ptr(), handle=7)

    def copy(target: int, source: int, num_bytes: int, *, event: int, device: int) -> None:
        assert (event, device) == (7, 0)
        ctypes.memmove(target, source, num_bytes)

    monkeypatch.setattr(pinned_ring._PinnedBuffer, "empty", empty)
    monkeypatch.setattr(driver, "copy_to_host", copy)
    return PinnedRing(200, torch.device("cuda"))


@pytest.mark.parametrize("num_rows", [1, 8, 200])
def test_late_readers_return_the_tokens_of_their_step(ring: PinnedRing, num_rows: int) -> None:
    choice = make_choice(num_rows, 50, 2, CPU)
    count, readers = max(1, num_rows - 3), []
    for step in range(40):
        choice.tokens.copy_(1000 * step + torch.arange(num_rows))
        choice.why.copy_(torch.arange(num_rows) % 3)
        ends = {0: {1000 * step}} if step % 2 else {}
        readers.append(ring.send(choice, count, ends))
    for step, read in enumerate(readers):
        chosen = read()
        assert chosen.tokens == [1000 * step + index for index in range(count)]
        first = END_TOKEN if step % 2 else GOES_ON
        assert chosen.why == [first, *(index % 3 for index in range(1, count))]


def test_results_larger_than_a_buffer_are_refused(ring: PinnedRing) -> None:
    with pytest.raises(AssertionError):
        ring.send(make_choice(300, 50, 2, CPU), 3, {})


def test_unchanged_step_makes_no_call_of_torch(
    ring: PinnedRing, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model(std=0.2, num_layers=1, hidden_size=16, num_heads=1, num_kv_heads=1)
    found = compiled(model, "cuda", precision=BF16, compute="fast")
    slots = started(found, [SamplingParams()] * 3)
    found.step(first_step(slots))
    step = Step(decode=slots)
    found.step(step)
    inner: Any = found
    inner._answers._ring = ring
    monkeypatch.setattr(CapturedGraph, "__call__", lambda self: None)
    ring.send(inner._captured_slots.bucket.choice, 3, {})  # allocates the buffers

    def refuse(step: Step) -> Any:
        raise AssertionError("an unchanged step has a direct path")

    monkeypatch.setattr(inner, "_step", refuse)
    with Calls() as calls:
        found.step(step)
    assert not calls.names
    pages = AssignPages(slots[0], 0, tuple(inner._state._pages_of_slot[slots[0]]))
    with Calls() as calls:
        found.step(replace(step, edits=(pages,)))
    assert calls.names.count("aten.copy_.default") == 1
