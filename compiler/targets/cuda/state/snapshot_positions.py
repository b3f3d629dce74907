"""Positions of a prompt's snapshots: inside a chunk, or at cuts of the chunk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from tilewright.compiler.targets.cuda.kernels.delta_rule.delta_solve import CHUNK
from tilewright.compiler.targets.interface.step import PrefillChunk, Slot

Marks = Mapping[tuple[Slot, int], Slot]
"""The slot with a snapshot's state, by the chunk's slot and the position inside the chunk."""

NO_MARKS: Marks = MappingProxyType({})

MOST_MARKS = 2
"""Maximum snapshots inside a chunk. Each takes the state of a sequence. A prompt with two turns has
no more.
"""


def cut(chunk: PrefillChunk, most: int) -> list[PrefillChunk]:
    """Divide a chunk into the fewest parts with snapshots at their ends or inside.

    Each has up to ``most`` snapshots inside, at multiples of the kernels' chunk from its start.
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
    """Return the marks for the chunks of a pass. Their slots start at ``first``."""
    inside = [(chunk.slot, at) for chunk in chunks for at, _ in chunk.saves if at < chunk.end]
    return {each: Slot(first + n) for n, each in enumerate(dict.fromkeys(inside))}
