"""How many snapshots chats need to find what they said before."""

from __future__ import annotations

import random

import pytest

from tilewright.compiler.runtime.snapshots import GRAIN, Snapshots, places_worth

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
    for turn in range(TURNS):
        for count, chat in enumerate(rng.sample(range(CHATS), CHATS)):
            prompt = range(SYSTEM + 50 + A_TURN * turn)
            keys = prefix_keys(chat, len(prompt))
            before = len(prompt) - A_TURN if turn else SYSTEM * min(count, 1)
            hit = snapshots.find(keys, (len(prompt) - 1) // GRAIN)
            known = hit[0] * GRAIN if hit else 0
            junction = before // GRAIN * GRAIN
            for at in sorted(places_worth(prompt, GRAIN, (), known=known, junction=junction)):
                snapshots.take(keys[at // GRAIN - 1])
            found, shared = found + min(known, before), shared + before
    return 100 * found / shared


@pytest.mark.parametrize(
    ("each", "least", "most"), [(1, 0, 40), (2, 0, 40), (3, 85, 95), (4, 98, 100)]
)
def test_chats_in_turn_need_some_snapshots_each(each: int, least: float, most: float) -> None:
    """With fewer, the least recently used is gone before its chat comes again."""
    assert least <= percent_found(each * CHATS) <= most
