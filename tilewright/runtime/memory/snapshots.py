"""Per-sequence state snapshots: their prefixes, and the positions worth a snapshot in a prompt.

They serve state without truncation. Only hashes and numbers are stored here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence

from tilewright.compiler.targets.interface.step import StateSnapshot

GRAIN = 64
"""Distance between snapshot positions for executables without pages."""
_EVERY = 4096
_FIRST_TURNS, _LAST_TURNS = 2, 4


class SnapshotPool:
    """A pool of snapshots, identified by their prefix hash.

    Snapshots of running outputs are borrowed. They get their hash when the output is finished.

    Attributes:
        size: Number of snapshots in the pool.
    """

    def __init__(self, count: int) -> None:
        self.size = count
        self._free = [StateSnapshot(at) for at in range(count - 1, -1, -1)]
        self._of_key: OrderedDict[bytes, StateSnapshot] = OrderedDict()
        self._uses: Counter[bytes] = Counter()
        self._most_borrowed, self._num_borrowed = count // 2, 0
        self._filling: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._of_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._of_key

    def find(self, keys: Sequence[bytes], most: int) -> tuple[int, StateSnapshot] | None:
        """Return the longest prefix with a snapshot: number of hashes and snapshot. Mark it as
        recently used.

        Only the first ``most`` hashes are considered.
        """
        for count in range(min(most, len(keys)), 0, -1):
            snapshot = self._of_key.get(keys[count - 1])
            if snapshot is not None:
                self._of_key.move_to_end(keys[count - 1])
                return count, snapshot
        return None

    def use(self, key: bytes, count: int = 1) -> None:
        """Record that sequences continue from a prefix."""
        self._uses[key] += count

    def take(self, key: bytes) -> StateSnapshot | None:
        """Allocate a snapshot for a prefix. Evict the least recently used if none is free.

        Return None if the prefix already has a snapshot, or if no snapshot is available.
        """
        if key in self._of_key:
            self._of_key.move_to_end(key)
            return None
        place = self._place()
        if place is not None:
            self._of_key[key] = place
        return place

    def fill(self, keys: Iterable[bytes]) -> None:
        """Protect the snapshots written by the current step from eviction until :meth:`end_step`.

        The chunks of a step run in any order.
        """
        self._filling.update(keys)

    def end_step(self) -> None:
        """End the protection: later steps write after this step."""
        self._filling.clear()

    def supersede(self, key: bytes) -> None:
        """Record that a sequence from this prefix has a later snapshot.

        The prefix's snapshot is evicted first, unless several sequences continue from it.
        """
        if key in self._of_key and self._uses[key] <= 1:
            self._of_key.move_to_end(key, last=False)

    def borrow(self) -> StateSnapshot | None:
        """Allocate a snapshot without a hash. Return None if half of the pool is borrowed.

        The limit leaves snapshots for prompts.
        """
        if self._num_borrowed >= self._most_borrowed or (place := self._place()) is None:
            return None
        self._num_borrowed += 1
        return place

    def give_back(self, place: StateSnapshot, key: bytes | None) -> None:
        """Return a borrowed snapshot with its prefix hash. None discards its contents."""
        self._num_borrowed -= 1
        if key is None or key in self._of_key:
            self._free.append(place)
        else:
            self._of_key[key] = place

    def forget(self) -> None:
        """Discard all snapshots except borrowed snapshots."""
        self._free.extend(self._of_key.values())
        self._of_key.clear()
        self._uses.clear()

    def _place(self) -> StateSnapshot | None:
        if self._free:
            return self._free.pop()
        key = next((each for each in self._of_key if each not in self._filling), None)
        if key is None:
            return None
        del self._uses[key]
        return self._of_key.pop(key)


def spacing(grain: int) -> int:
    """Return the regular distance between snapshots: about 4,096, a multiple of ``grain``."""
    return _EVERY - _EVERY % grain


def places_worth(
    prompt: Sequence[int], grain: int, ends: Collection[int], *, known: int, branch_point: int
) -> set[int]:
    """Return positions where later prompts probably diverge, as multiples of ``grain`` after
    ``known``:

    - the last position before the prompt's end,
    - the ends of the first two and the last four turns (a token in ``ends``),
    - the ``branch_point`` with an earlier prompt,
    - a position every `spacing` tokens.
    """
    last = (len(prompt) - 1) // grain * grain
    positions = {last, branch_point, *range(spacing(grain), last, spacing(grain))}
    turns = [at for at, token in enumerate(prompt) if token in ends] if ends else []
    if len(turns) > _FIRST_TURNS + _LAST_TURNS:
        turns = turns[:_FIRST_TURNS] + turns[-_LAST_TURNS:]
    positions |= {at // grain * grain for at in turns}
    return {at for at in positions if known < at <= last}
