"""Snapshots of per-sequence state: which prefix each is of, and where in a prompt one is of use.

For sequences whose state cannot be cut back to a position. Knows keys and numbers alone.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Collection, Iterable, Sequence

from tilewright.compiler.targets.interface.step import Snapshot

GRAIN = 64
"""Positions between places for snapshots, where an executable has no pages."""
_EVERY = 4096
_FIRST_TURNS, _LAST_TURNS = 2, 4


class Snapshots:
    """A pool of snapshots, each named by the key of the prefix that it is the state behind; those
    of answers that go on are borrowed, and get their names when these end.
    """

    def __init__(self, count: int) -> None:
        self._free = [Snapshot(at) for at in range(count - 1, -1, -1)]
        self._of_key: OrderedDict[bytes, Snapshot] = OrderedDict()
        self._uses: Counter[bytes] = Counter()
        self._most_borrowed, self._num_borrowed = count // 2, 0
        self._filling: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._of_key)

    def __contains__(self, key: bytes) -> bool:
        return key in self._of_key

    @property
    def is_empty(self) -> bool:
        """Whether there is no place for any."""
        return not self._free and not self._of_key

    def find(self, keys: Sequence[bytes], most: int) -> tuple[int, Snapshot] | None:
        """Find the longest beginning of a chain, of up to ``most`` keys, that has a snapshot: how
        many keys it has, and the snapshot, which is the most recently used then.
        """
        for count in range(min(most, len(keys)), 0, -1):
            found = self._of_key.get(keys[count - 1])
            if found is not None:
                self._of_key.move_to_end(keys[count - 1])
                return count, found
        return None

    def use(self, key: bytes, count: int = 1) -> None:
        """Note that sequences go on from a prefix of which there is a snapshot."""
        self._uses[key] += count

    def take(self, key: bytes) -> Snapshot | None:
        """A place for the state behind a prefix, the least recently used where none is free; None
        where there is one of it already, or no place at all.
        """
        if key in self._of_key:
            self._of_key.move_to_end(key)
            return None
        place = self._place()
        if place is not None:
            self._of_key[key] = place
        return place

    def fill(self, keys: Iterable[bytes]) -> None:
        """Note that a piece of a prompt in the step being planned fills these, in whatever order
        the pieces of a step run: their places are no other piece's before :meth:`end_step`.
        """
        self._filling.update(keys)

    def end_step(self) -> None:
        """Note that a step is planned; what the next one fills is filled behind it."""
        self._filling.clear()

    def supersede(self, key: bytes) -> None:
        """Note that a sequence that goes on from a prefix has a snapshot further on: the one of
        the prefix is the first to go, unless others have gone on from it, too.
        """
        if key in self._of_key and self._uses[key] <= 1:
            self._of_key.move_to_end(key, last=False)

    def borrow(self) -> Snapshot | None:
        """A place for state behind what nobody knows the name of yet; None where half of all are
        lent, so that answers that go on leave some to prompts.
        """
        if self._num_borrowed >= self._most_borrowed or (place := self._place()) is None:
            return None
        self._num_borrowed += 1
        return place

    def give_back(self, place: Snapshot, key: bytes | None) -> None:
        """A borrowed place is of the state behind a prefix now; None: of nothing of use."""
        self._num_borrowed -= 1
        if key is None or key in self._of_key:
            self._free.append(place)
        else:
            self._of_key[key] = place

    def forget(self) -> None:
        """Forget all snapshots but those that are lent: what they hold is worth nothing now."""
        self._free.extend(self._of_key.values())
        self._of_key.clear()
        self._uses.clear()

    def _place(self) -> Snapshot | None:
        if self._free:
            return self._free.pop()
        key = next((each for each in self._of_key if each not in self._filling), None)
        if key is None:
            return None
        del self._uses[key]
        return self._of_key.pop(key)


def spacing(grain: int) -> int:
    """Positions between places where a prompt may be left for no reason that it shows: about 4,096,
    a multiple of ``grain``.
    """
    return _EVERY - _EVERY % grain


def places_worth(
    prompt: Sequence[int], grain: int, ends: Collection[int], *, known: int, junction: int
) -> set[int]:
    """Positions of a prompt, multiples of ``grain`` behind its first ``known`` ones, at which a
    later prompt is likely to leave it.

    They are the last one before its end, the last one before the end of a turn (one of the tokens
    ``ends``) for the first two and the last four turns, ``junction``, where it itself left another
    prompt, and one every `spacing` positions.
    """
    last = (len(prompt) - 1) // grain * grain
    found = {last, junction, *range(spacing(grain), last, spacing(grain))}
    turns = [at for at, token in enumerate(prompt) if token in ends] if ends else []
    if len(turns) > _FIRST_TURNS + _LAST_TURNS:
        turns = turns[:_FIRST_TURNS] + turns[-_LAST_TURNS:]
    found |= {at // grain * grain for at in turns}
    return {at for at in found if known < at <= last}
