"""Slots that are kept: a later prompt of the same beginning computes only what is new."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.queued import QueuedExecutable
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.step import CloseSlot, OpenSlot, Slot
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.memory.contiguous_cache import common_length
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig


def loop(*, reuses: bool = True, **limits: Any) -> tuple[EngineLoop, QueuedExecutable]:
    executable = QueuedExecutable(**{"runs_ahead": False, **limits})
    return EngineLoop(executable, policy=SchedulerConfig(reuses=reuses)), executable


def ask(llm: EngineLoop, *prompt: int, wanted: int = 3, **facts: Any) -> RequestState:
    request = RequestState(0, prompt, SamplingParams(max_tokens=wanted), **facts)
    llm.generate([request])
    return request


def alone(*prompt: int, wanted: int = 3) -> list[int]:
    return ask(loop(reuses=False)[0], *prompt, wanted=wanted).output


@pytest.mark.parametrize("has_sequence_state", [False, True])
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_chat_computes_its_last_reply_and_the_new_message(
    has_sequence_state: bool, runs_ahead: bool
) -> None:
    llm, executable = loop(has_sequence_state=has_sequence_state, runs_ahead=runs_ahead)
    said: tuple[int, ...] = (1, 2, 3, 4)
    for turn in range(4):
        request = ask(llm, *said)
        assert request.output == alone(*said)
        # the last token of an answer is chosen, and never read by the device
        assert request.num_cached == (len(said) - 3 if turn else 0)
        said = (*said, *request.output, 5, 6)
    assert executable.num_open == 1
    assert sum(isinstance(e, OpenSlot) for step in executable.given for e in step.edits) == 4
    assert not any(isinstance(e, CloseSlot) for step in executable.given for e in step.edits)


def test_where_prompts_part_the_common_part_stays_unless_the_state_cannot_be_cut() -> None:
    for has_sequence_state, found in ((False, 4), (True, 0)):
        llm, _ = loop(max_num_seqs=1, has_sequence_state=has_sequence_state)
        ask(llm, 1, 2, 3, 4, 5)
        other = ask(llm, 1, 2, 3, 4, 9, 9)
        assert (other.num_cached, other.output) == (found, alone(1, 2, 3, 4, 9, 9))


def test_the_same_prompt_again_computes_its_last_token_alone() -> None:
    llm, _ = loop()
    assert ask(llm, 1, 2, 3).output == ask(llm, 1, 2, 3).output
    assert ask(llm, 1, 2, 3).num_cached == 2


def test_the_least_recently_used_slot_makes_room() -> None:
    llm, executable = loop(max_num_seqs=2)
    for first in (1, 2, 1, 3):
        ask(llm, first, 7, 7)
    assert executable.num_open == 2, "never more than the slots there are"
    assert ask(llm, 1, 7, 7, 8).num_cached >= 3
    assert ask(llm, 2, 7, 7, 8).num_cached == 0


def test_a_long_history_is_left_to_its_own_turn_while_slots_are_free() -> None:
    llm, _ = loop(max_num_seqs=2)
    first = ask(llm, 1, 2, 3, 4, 5, 6, 7, 8)
    assert ask(llm, 1, 2, 19, 20, 21, 22).num_cached == 0
    assert ask(llm, 1, 2, 3, 4, 5, 6, 7, 8, *first.output, 9).num_cached == 10


@pytest.mark.parametrize("facts", [{"is_private": True}, {}])
def test_nothing_is_kept_of_private_requests_nor_where_figures_are_taken(facts: Any) -> None:
    llm, executable = loop(reuses=bool(facts))
    ask(llm, 1, 2, 3, **facts)
    assert executable.num_open == llm.scheduler.num_kept == 0
    assert ask(llm, 1, 2, 3, 4).num_cached == 0


def test_a_device_that_fails_holds_nothing_afterwards() -> None:
    llm, _ = loop(max_num_seqs=2)
    ask(llm, 1, 2, 3)
    llm.scheduler.evacuate()
    llm.executable.reset()
    again = ask(llm, 1, 2, 3, 4)
    assert (again.num_cached, again.output) == (0, alone(1, 2, 3, 4))


def test_of_equal_beginnings_the_most_recent_is_found() -> None:
    llm, _ = loop(max_num_seqs=3)
    for last in (3, 4):
        ask(llm, 1, 2, last, wanted=1)
    (cache_manager,) = [llm.scheduler.cache_manager]
    assert cache_manager.find(RequestState(0, (1, 2, 5, 6))).length == 2
    assert cache_manager.find(RequestState(0, (1, 2, 5, 6))).slot == Slot(1)
    assert cache_manager.find(RequestState(0, (1, 2, 3, 6))).slot == Slot(0)
    assert not cache_manager.find(RequestState(0, (1,))).length
    assert not cache_manager.find(RequestState(0, (9, 9))).length


@given(st.lists(st.integers(0, 1), max_size=80), st.lists(st.integers(0, 1), max_size=80))
def test_common_lengths_are_those_of_a_walk(one: list[int], other: list[int]) -> None:
    length = next(
        (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b),
        min(len(one), len(other)),
    )
    assert common_length(tuple(one), tuple(other)) == length
    assert common_length((*one, 2, *other), (*one, 3)) == len(one)


def test_what_windows_gave_back_is_not_shared() -> None:
    """A sequence of more than 8 positions can be cut back 3 behind the most that it has had."""
    said, answers = tuple(range(1, 13)), {}
    for kept in (4, 10, 12):
        llm, _ = loop(max_num_seqs=1, retained_positions=8, reach_back=3)
        ask(llm, *said, wanted=2)
        other = ask(llm, *said[:kept], 20, 20, wanted=1)
        assert other.output == alone(*said[:kept], 20, 20, wanted=1)
        answers[kept] = other.num_cached
    assert answers == {4: 0, 10: 10, 12: 12}
    llm, _ = loop(max_num_seqs=1, retained_positions=8, reach_back=3)
    ask(llm, *said, wanted=2)  # has had 13 positions
    assert ask(llm, *said[:10], 20, wanted=1).num_cached == 10
    assert ask(llm, *said[:9], 21, wanted=1).num_cached == 0, "9 is 4 before 13, and 2 before 11"
    llm, _ = loop(max_num_seqs=1, retained_positions=8, reach_back=3)
    ask(llm, *said[:6], wanted=2)
    assert ask(llm, *said[:2], 20, wanted=1).num_cached == 2, "so short a one is held whole"
