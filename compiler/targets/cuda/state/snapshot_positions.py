"""Which snapshots of a prompt are taken while its kernels pass, and where it is cut for others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.compiler.targets.cuda.kernels.delta_rule.delta_solve import CHUNK
from tilewright.compiler.targets.interface.step import PrefillChunk, Slot

Marks = Mapping[tuple[Slot, int], Slot]
"""By the slot of a piece and a position inside of it: whose place its state there is kept in."""

NO_MARKS: Marks = MappingProxyType({})

MOST_MARKS = 2
"""Of a piece: each takes a sequence's state more, and a prompt of two turns has no others."""


def cut(chunk: PrefillChunk, most: int) -> list[PrefillChunk]:
    """Parts of a piece, as few as there can be, whose snapshots are of their ends or of up to
    ``most`` positions inside, a multiple of the kernels' chunk behind their starts each.
    """
    ends: list[int] = []
    start, num_inside = chunk.start, 0
    for at in sorted({at for at, _ in chunk.saves if at < chunk.end}):
        if num_inside < most and (at - start) % CHUNK == 0:
            num_inside += 1
        else:
            ends.append(at)
            start, num_inside = at, 0
    if not ends:
        return [chunk]
    starts = (chunk.start, *ends)
    return [_part(chunk, *both) for both in zip(starts, (*ends, chunk.end), strict=True)]


def _part(chunk: PrefillChunk, start: int, end: int) -> PrefillChunk:
    return replace(
        chunk.slice(start, end),
        chooses=chunk.chooses and end == chunk.end,
        saves=tuple((at, snapshot) for at, snapshot in chunk.saves if start < at <= end),
    )


def marks_of(chunks: Sequence[PrefillChunk], first: int) -> Marks:
    """The marks of pieces of one pass, whose places are those from ``first`` on."""
    inside = [(chunk.slot, at) for chunk in chunks for at, _ in chunk.saves if at < chunk.end]
    return {each: Slot(first + n) for n, each in enumerate(dict.fromkeys(inside))}
