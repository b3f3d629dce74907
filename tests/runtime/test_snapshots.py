"""Whose snapshots go first, and how many chats need to find what they said before."""

from __future__ import annotations

import random

import pytest

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import Capabilities
from tilewright.runtime.memory.snapshots import SnapshotPool
from tilewright.runtime.scheduling.request_state import RequestState
from tilewright.runtime.scheduling.scheduler import Scheduler

CHATS, TURNS = 64, 8
SYSTEM, A_TURN = 1000, 1120


def percent_found(num_snapshots: int) -> float:
    """Of the tokens of prompts that an earlier one has, those before a snapshot that is there,
    where all chats have a turn before any has its next.
    """
    limits = Capabilities(
        max_num_seqs=1,
        max_context=1 << 14,
        page_size=64,
        num_pages=1 << 14,
        max_step_tokens=1 << 14,
        has_sequence_state=True,
        num_snapshots=num_snapshots,
    )
    scheduler, rng = Scheduler(limits), random.Random(0)
    found = shared = 0
    for turn in range(TURNS):
        for count, chat in enumerate(rng.sample(range(CHATS), CHATS)):
            prompt = (CHATS,) * SYSTEM + (chat,) * (50 + A_TURN * turn)
            request = RequestState(0, prompt, SamplingParams(max_tokens=1))
            scheduler.add(request)
            while (plan := scheduler.schedule()) is not None:
                for running in plan.rows.values():
                    scheduler.take(running, 0, is_end=False)
            before = len(prompt) - A_TURN if turn else SYSTEM * min(count, 1)
            found, shared = found + min(request.num_cached, before), shared + before
    return 100 * found / shared


@pytest.mark.parametrize(("count", "least", "most"), [(64, 0, 50), (66, 98, 100), (256, 98, 100)])
def test_chats_in_turn_need_a_snapshot_each_and_two(count: int, least: float, most: float) -> None:
    """With fewer, the least recently used is gone before its chat comes again."""
    assert least <= percent_found(count) <= most


def test_what_a_sequence_has_gone_beyond_goes_first_but_not_what_several_went_on_from() -> None:
    snapshots = SnapshotPool(3)
    for key in (b"old", b"shared", b"latest"):
        snapshots.take(key)
    snapshots.use(b"shared", 2)
    snapshots.use(b"latest")
    for key in (b"shared", b"latest", b"gone"):
        snapshots.supersede(key)
    taken = [snapshots.take(key) for key in (b"a", b"b")]
    assert taken == [2, 0]
    assert snapshots.find([b"shared"], 1) == (1, 1)
    assert snapshots.find([b"old"], 1) is None and snapshots.find([b"latest"], 1) is None


def test_a_place_that_a_step_fills_is_no_other_piece_s_in_it() -> None:
    """Its pieces may run in another order, and the one that was first would be kept last."""
    snapshots = SnapshotPool(2)
    kept = [snapshots.take(key) for key in (b"a", b"b")]
    snapshots.fill([b"a"])
    snapshots.supersede(b"a")
    assert kept == [0, 1] and snapshots.take(b"c") == 1
    snapshots.fill([b"c"])
    assert snapshots.take(b"d") is None and b"d" not in snapshots
    snapshots.end_step()
    assert snapshots.take(b"d") == 0


def test_half_of_the_places_are_lent_to_answers_and_come_back() -> None:
    snapshots = SnapshotPool(4)
    for key in (b"a", b"b", b"c", b"d"):
        snapshots.take(key)
    lent = [snapshots.borrow() for _ in range(3)]
    assert lent == [0, 1, None] and len(snapshots) == 2
    snapshots.give_back(lent[0], b"e")
    assert snapshots.find([b"e"], 1) == (1, 0)
    snapshots.give_back(lent[1], b"e")
    assert snapshots.take(b"f") == 1 and len(snapshots) == 4
    assert SnapshotPool(1).borrow() is None and SnapshotPool(0).borrow() is None
    snapshots.borrow()
    snapshots.forget()
    assert len(snapshots) == 0 and len({snapshots.take(bytes([n])) for n in range(9)}) == 3
