"""Whose snapshots go first, and how many chats need to find what they said before."""

from __future__ import annotations

import random

import pytest

from tilewright.compiler.runtime.snapshots import GRAIN, Snapshots, places_worth, spacing

CHATS, TURNS = 64, 8
SYSTEM, A_TURN = 1000, 1120


def prefix_keys(chat: int, num_tokens: int) -> list[bytes]:
    """Keys of a prompt's blocks: those of the system prompt are all chats'."""
    return [
        f"{chat if (block + 1) * GRAIN > SYSTEM else 'all'} {block}".encode()
        for block in range(num_tokens // GRAIN)
    ]


def percent_found(num_snapshots: int) -> float:
    """Of the tokens of prompts that an earlier one has, those before a snapshot that is there,
    where all chats have a turn before any has its next.
    """
    snapshots, rng = Snapshots(num_snapshots), random.Random(0)
    found = shared = 0
    latest: dict[int, bytes] = {}
    for turn in range(TURNS):
        for count, chat in enumerate(rng.sample(range(CHATS), CHATS)):
            prompt = range(SYSTEM + 50 + A_TURN * turn)
            keys = prefix_keys(chat, len(prompt))
            before = len(prompt) - A_TURN if turn else SYSTEM * min(count, 1)
            hit = snapshots.find(keys, (len(prompt) - 1) // GRAIN)
            known = hit[0] * GRAIN if hit else 0
            if hit:
                latest[chat] = keys[hit[0] - 1]
                snapshots.use(latest[chat])
            junction = before // GRAIN * GRAIN
            for at in sorted(places_worth(prompt, GRAIN, (), known=known, junction=junction)):
                snapshots.take(keys[at // GRAIN - 1])
                if at == junction:
                    snapshots.use(keys[at // GRAIN - 1], 2)
                elif at % spacing(GRAIN) == 0:
                    snapshots.supersede(keys[at // GRAIN - 1])
            if chat in latest:
                snapshots.supersede(latest[chat])
            latest[chat] = keys[-1]
            found, shared = found + min(known, before), shared + before
    return 100 * found / shared


@pytest.mark.parametrize(("count", "least", "most"), [(64, 0, 50), (66, 98, 100), (256, 98, 100)])
def test_chats_in_turn_need_a_snapshot_each_and_two(count: int, least: float, most: float) -> None:
    """With fewer, the least recently used is gone before its chat comes again."""
    assert least <= percent_found(count) <= most


def test_what_a_sequence_has_gone_beyond_goes_first_but_not_what_several_went_on_from() -> None:
    snapshots = Snapshots(3)
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


def test_half_of_the_places_are_lent_to_answers_and_come_back() -> None:
    snapshots = Snapshots(4)
    for key in (b"a", b"b", b"c", b"d"):
        snapshots.take(key)
    lent = [snapshots.borrow() for _ in range(3)]
    assert lent == [0, 1, None] and len(snapshots) == 2
    snapshots.give_back(lent[0], b"e")
    assert snapshots.find([b"e"], 1) == (1, 0)
    snapshots.give_back(lent[1], b"e")
    assert snapshots.take(b"f") == 1 and len(snapshots) == 4
    assert Snapshots(1).borrow() is None and Snapshots(0).borrow() is None
    snapshots.borrow()
    snapshots.forget()
    assert len(snapshots) == 0 and len({snapshots.take(bytes([n])) for n in range(9)}) == 3
