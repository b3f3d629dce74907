"""The target that computes nothing: zeros, counted steps, and the rules of slots."""

from __future__ import annotations

import pytest

from tests.tiny import compiled, copy_slot, leave_slot, step, take_slot, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.step import OpenSlot, PrefillChunk, Slot, Step
from tilewright.compiler.targets.null import NullExecutable


@pytest.fixture
def null() -> NullExecutable:
    executable = compiled(tiny_model(num_layers=1), "null", max_batch=3)
    assert isinstance(executable, NullExecutable)
    return executable


def test_null_gives_zeros_and_counts_steps(null: NullExecutable) -> None:
    slot, before = take_slot(null), null.num_steps
    logits = step(null, [(slot, [1, 2, 3], 0)], rows=[0, 2])
    assert logits.shape == (2, 61)
    assert not logits.any()
    assert null.num_steps - before == 1
    assert null.memory().weights == 0


def test_null_reads_no_weights() -> None:
    model = tiny_model(num_layers=1)
    compiled(model, "null")
    assert model.checkpoint.reads == []


def test_a_gap_and_a_slot_that_nobody_has_are_bugs(null: NullExecutable) -> None:
    slot = take_slot(null)
    null.step(Step(prompts=(PrefillChunk(slot, 0, (1, 2, 3)),)))
    with pytest.raises(AssertionError, match="leaves a gap"):
        null.step(Step(prompts=(PrefillChunk(slot, 4, (1,)),)))
    with pytest.raises(KeyError):
        null.step(Step(decode=(Slot(2),)))
    with pytest.raises(AssertionError, match="holds no token"):
        null.step(Step(decode=(slot,), want_logits=True))
    with pytest.raises(AssertionError, match="is taken"):
        null.step(Step(edits=(OpenSlot(slot, SamplingParams()),)))
    with pytest.raises(AssertionError, match="there is no slot 3"):
        null.step(Step(edits=(OpenSlot(Slot(3), SamplingParams()),)))


def test_lengths_follow_copies_and_ends(null: NullExecutable) -> None:
    slot = take_slot(null)
    step(null, [(slot, [1, 2, 3, 4], 0)])
    fresh = copy_slot(null, slot, 2)
    assert (null.length(slot), null.length(fresh)) == (4, 2)
    step(null, [(fresh, [9], 2), (slot, [5], 4)])
    assert (null.length(slot), null.length(fresh)) == (5, 3)
    leave_slot(null, slot)
    assert take_slot(null) == slot and null.length(slot) == 0
    null.reset()
    with pytest.raises(KeyError):
        null.length(fresh)


def test_null_chooses_the_first_token_and_knows_its_end(null: NullExecutable) -> None:
    slot = take_slot(null, choosing=SamplingParams(stop_token_ids=(5, 0)))
    (part,) = null.step(Step(prompts=(PrefillChunk(slot, 0, (1,), chooses=True),))).parts
    chosen = part.read()
    assert (part.slots, list(chosen.tokens), list(chosen.why)) == ((slot,), [0], [1])
    assert part.logits is None and chosen.logprobs is None
