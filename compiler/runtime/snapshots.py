"""Snapshots of per-sequence state: which prefix each is of, and where in a prompt one is of use.

For sequences whose state cannot be cut back to a position. Knows keys and numbers alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Sequence

from tilewright.compiler.targets.step import Snapshot

GRAIN = 64
"""Positions between places for snapshots, where an executable has no pages."""
_EVERY = 4096
_FIRST_TURNS, _LAST_TURNS = 2, 4


class Snapshots:
    """A pool of snapshots, each named by the key of the prefix that it is the state behind."""

    def __init__(self, count: int) -> None:
        self._free = [Snapshot(at) for at in range(count - 1, -1, -1)]
        self._of_key: OrderedDict[bytes, Snapshot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of_key)

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

    def take(self, key: bytes) -> Snapshot | None:
        """A place for the state behind a prefix, the least recently used where none is free; None
        where there is one of it already, or no place at all.
        """
        if key in self._of_key:
            self._of_key.move_to_end(key)
            return None
        if self._free:
            place = self._free.pop()
        elif self._of_key:
            _, place = self._of_key.popitem(last=False)
        else:
            return None
        self._of_key[key] = place
        return place

    def forget(self) -> None:
        """Forget all snapshots: the state they hold is worth nothing any more."""
        self._free.extend(self._of_key.values())
        self._of_key.clear()


def places_worth(
    prompt: Sequence[int], grain: int, ends: Collection[int], *, known: int, junction: int
) -> set[int]:
    """Positions of a prompt, multiples of ``grain`` behind its first ``known`` ones, at which a
    later prompt is likely to leave it.

    They are the last one before its end, the last one before the end of a turn (one of the tokens
    ``ends``) for the first two and the last four turns, ``junction``, where it itself left another
    prompt, and one every 4,096 positions.
    """
    last = (len(prompt) - 1) // grain * grain
    found = {last, junction, *range(_EVERY - _EVERY % grain, last, _EVERY - _EVERY % grain)}
    turns = [at for at, token in enumerate(prompt) if token in ends] if ends else []
    if len(turns) > _FIRST_TURNS + _LAST_TURNS:
        turns = turns[:_FIRST_TURNS] + turns[-_LAST_TURNS:]
    found |= {at // grain * grain for at in turns}
    return {at for at in found if known < at <= last}
