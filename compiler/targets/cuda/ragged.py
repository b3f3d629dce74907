"""Pieces of several prompts as the tokens of one batch. Knows no kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.rows import Rows
from tilewright.compiler.targets.cuda.seats import send
from tilewright.compiler.targets.step import Chunk

SHORT_BLOCK, LONG_BLOCK = 64, 128
"""Tokens of one sequence that attention takes together."""

LONG_PIECE = 512
"""Tokens of a piece, on average, from which on larger blocks waste little and read keys less."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """T rows of one batch: each piece in whole blocks of ``block`` rows, padding behind it.

    ``pieces``: the rows that each has; ``last [R]`` (int64): those that want logits, in the order
    of the pieces that choose a token.
    """

    rows: Rows
    block: int
    pieces: tuple[slice, ...]
    last: Tensor


def can_join(chunk: Chunk) -> bool:
    """Whether a piece may be one of several: nothing is wanted of it but its last token's choice,
    and its state as it is behind it.
    """
    return not chunk.echoes and not chunk.also and all(end == chunk.end for end, _ in chunk.saves)


def split(chunks: Sequence[Chunk], most: int) -> tuple[list[list[Chunk]], list[Chunk]]:
    """Batches of up to ``most`` pieces, and those pieces that are run each for itself."""
    joined = [chunk for chunk in chunks if can_join(chunk)] if most > 1 < len(chunks) else []
    batches = [joined[first : first + most] for first in range(0, len(joined), most)]
    return batches, [chunk for chunk in chunks if chunk not in joined]


def join(chunks: Sequence[Chunk], device: torch.device) -> Ragged:
    """Lay pieces out one behind the other."""
    mean = sum(len(chunk.tokens) for chunk in chunks) / len(chunks)
    block = LONG_BLOCK if mean >= LONG_PIECE else SHORT_BLOCK
    pieces, first = [], 0
    for chunk in chunks:
        pieces.append(slice(first, first + len(chunk.tokens)))
        first += -(-len(chunk.tokens) // block) * block
    staged = np.zeros((3, first), dtype=np.int64)
    staged[1] = -1
    for chunk, piece in zip(chunks, pieces, strict=True):
        staged[0, piece] = chunk.tokens
        staged[1, piece] = np.arange(chunk.start, chunk.end)
        staged[2, piece.start : -(-piece.stop // block) * block] = chunk.seat
    last = [piece.stop - 1 for chunk, piece in zip(chunks, pieces, strict=True) if chunk.chooses]
    wanted = send(np.array(last, dtype=np.int64), device)
    return Ragged(Rows(*send(staged, device)), block, tuple(pieces), wanted)


def one(chunk: Chunk, device: torch.device) -> tuple[Rows, Tensor | None]:
    """The rows of a single piece, without padding, and those of them that want logits."""
    count = len(chunk.tokens)
    # whole pieces of memory: kernels are compiled for how their arguments are aligned
    staged = np.zeros((3, -(-count // 16) * 16), dtype=np.int64)
    staged[0, :count] = chunk.tokens
    staged[1, :count] = np.arange(chunk.start, chunk.end)
    staged[2] = chunk.seat
    placed = Rows(*send(staged, device)[:, :count])
    if chunk.echoes:
        return placed, torch.arange(count, device=device)
    return placed, send(np.array([count - 1]), device) if chunk.chooses else None
