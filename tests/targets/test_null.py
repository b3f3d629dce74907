"""The target that computes nothing: zeros, counted steps, and the rules of seats."""

from __future__ import annotations

import pytest

from tests.tiny import compiled, copy_seat, leave_seat, step, take_seat, tiny_model
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.step import Chunk, Open, Seat, Step
from tilewright.compiler.targets.null import NullExecutable


@pytest.fixture
def null() -> NullExecutable:
    executable = compiled(tiny_model(num_layers=1), "null", max_batch=3)
    assert isinstance(executable, NullExecutable)
    return executable


def test_null_gives_zeros_and_counts_steps(null: NullExecutable) -> None:
    seat, before = take_seat(null), null.num_steps
    logits = step(null, [(seat, [1, 2, 3], 0)], rows=[0, 2])
    assert logits.shape == (2, 61)
    assert not logits.any()
    assert null.num_steps - before == 1
    assert null.memory().weights == 0


def test_null_reads_no_weights() -> None:
    model = tiny_model(num_layers=1)
    compiled(model, "null")
    assert model.checkpoint.reads == []


def test_a_gap_and_a_seat_that_nobody_has_are_bugs(null: NullExecutable) -> None:
    seat = take_seat(null)
    null.step(Step(prompts=(Chunk(seat, 0, (1, 2, 3)),)))
    with pytest.raises(AssertionError, match="leaves a gap"):
        null.step(Step(prompts=(Chunk(seat, 4, (1,)),)))
    with pytest.raises(KeyError):
        null.step(Step(decode=(Seat(2),)))
    with pytest.raises(AssertionError, match="holds no token"):
        null.step(Step(decode=(seat,), want_logits=True))
    with pytest.raises(AssertionError, match="is taken"):
        null.step(Step(edits=(Open(seat, SamplingParams()),)))
    with pytest.raises(AssertionError, match="there is no seat 3"):
        null.step(Step(edits=(Open(Seat(3), SamplingParams()),)))


def test_lengths_follow_copies_and_ends(null: NullExecutable) -> None:
    seat = take_seat(null)
    step(null, [(seat, [1, 2, 3, 4], 0)])
    fresh = copy_seat(null, seat, 2)
    assert (null.length(seat), null.length(fresh)) == (4, 2)
    step(null, [(fresh, [9], 2), (seat, [5], 4)])
    assert (null.length(seat), null.length(fresh)) == (5, 3)
    leave_seat(null, seat)
    assert take_seat(null) == seat and null.length(seat) == 0
    null.reset()
    with pytest.raises(KeyError):
        null.length(fresh)


def test_null_chooses_the_first_token_and_knows_its_end(null: NullExecutable) -> None:
    seat = take_seat(null, choosing=SamplingParams(stop_token_ids=(5, 0)))
    (part,) = null.step(Step(prompts=(Chunk(seat, 0, (1,), chooses=True),))).parts
    chosen = part.read()
    assert (part.seats, list(chosen.tokens), list(chosen.why)) == ((seat,), [0], [1])
    assert part.logits is None and chosen.logprobs is None
