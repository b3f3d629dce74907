"""The protocol of all_reduce.cuh without flags and barriers, word by word.

The model has the kernels' actions only. Threads run in any order. Stores to a peer arrive in any
order and at any time. A kernel starts after the previous kernel.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

EMPTY = None
Value = tuple[int, int, int]  # sender, exchange, word


@dataclass
class Rank:
    """A rank: its memory by slot, sender and word, and the actions of its running kernel."""

    memory: list[list[list[Value | None]]]
    used: list[int]
    number: int = -1
    todo: list[Callable[[], bool]] = field(default_factory=list)


class World:
    """Ranks that exchange ``sizes[e]`` words in exchange e, with slots in turn."""

    def __init__(self, count: int, sizes: list[int], slots: int, *, arms: bool = True) -> None:
        most = max(sizes)
        self.sizes, self.slots, self.arms = sizes, slots, arms
        self.flight: list[tuple[int, int, int, Value]] = []  # reader, slot, word, value
        self.ranks = [
            Rank([[[EMPTY] * most for _ in range(count)] for _ in range(slots)], [0] * slots)
            for _ in range(count)
        ]

    def run(self, chance: random.Random, favoured: int) -> None:
        """Run all actions in random order. The favored rank runs as early as possible."""
        idle = 0
        while any(each.number < len(self.sizes) for each in self.ranks):
            assert idle < 10_000, "all ranks wait"
            if self.flight and chance.random() < 0.3:
                at = chance.randrange(len(self.flight))
                reader, slot, word, value = self.flight.pop(at)
                self.ranks[reader].memory[slot][value[0]][word] = value
                idle = 0
                continue
            at = favoured if chance.random() < 0.5 else chance.randrange(len(self.ranks))
            idle = 0 if self.act(at, chance) else idle + 1

    def act(self, at: int, chance: random.Random) -> bool:
        rank = self.ranks[at]
        if not rank.todo:
            if rank.number >= len(self.sizes):
                return False
            rank.number += 1
            if rank.number < len(self.sizes):
                rank.todo = list(self.kernel(at, rank.number))
            return True
        which = chance.randrange(len(rank.todo))
        if not rank.todo[which]():
            return False
        rank.todo.pop(which)
        return True

    def kernel(self, at: int, number: int) -> Iterator[Callable[[], bool]]:
        """Return the actions of an exchange's threads, a word per thread."""
        rank, slot = self.ranks[at], number % self.slots
        last = (slot - 1) % self.slots
        for other in range(len(self.ranks)):
            if other == at:
                continue
            for word in range(self.sizes[number]):
                yield lambda other=other, word=word: self.send(other, slot, (at, number, word))  # type: ignore[misc]
                yield lambda other=other, word=word: self.poll(rank, slot, (other, number, word))  # type: ignore[misc]
            for word in range(rank.used[last] if self.arms else 0):
                yield lambda other=other, word=word: self.arm(rank, last, other, word)  # type: ignore[misc]
        rank.used[slot] = self.sizes[number]

    def send(self, reader: int, slot: int, value: Value) -> bool:
        self.flight.append((reader, slot, value[2], value))
        return True

    def arm(self, rank: Rank, slot: int, sender: int, word: int) -> bool:
        rank.memory[slot][sender][word] = EMPTY
        return True

    def poll(self, rank: Rank, slot: int, wanted: Value) -> bool:
        found = rank.memory[slot][wanted[0]][wanted[2]]
        assert found in (EMPTY, wanted), f"{found} instead of {wanted}"
        return found == wanted


@given(
    count=st.integers(2, 4),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
)
def test_every_rank_reads_what_was_sent_in_this_exchange(
    count: int, sizes: list[int], seed: int
) -> None:
    World(count, sizes, 3).run(random.Random(seed), seed % count)


@pytest.mark.parametrize(("slots", "arms"), [(2, True), (3, False)], ids=["two slots", "not armed"])
def test_less_does_not_do(slots: int, arms: bool) -> None:
    def fails(seed: int) -> bool:
        try:
            World(2, [2, 1, 2, 2, 1, 2], slots, arms=arms).run(random.Random(seed), seed % 2)
        except AssertionError:
            return True
        return False

    assert any(fails(seed) for seed in range(50))
