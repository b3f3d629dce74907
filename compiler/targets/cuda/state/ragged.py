"""Pieces of several prompts as the tokens of one batch. Knows no kernels."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.state.slot_table import send
from tilewright.compiler.targets.cuda.state.snapshot_positions import NO_MARKS, Marks, cut
from tilewright.compiler.targets.cuda.state.token_batch import TokenBatch
from tilewright.compiler.targets.interface.step import PrefillChunk, Slot

SHORT_BLOCK, LONG_BLOCK = 64, 128
"""Tokens of one sequence that attention takes together."""

LONG_PIECE = 512
"""Tokens of a piece, on average, from which on larger blocks waste little and read keys less."""

_ALIGNED = 16
"""Rows of a whole piece of memory: kernels are compiled for how their arguments are aligned."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """T rows of one batch: each piece in whole blocks of ``block`` rows, padding behind it.

    ``starts [P + 1]`` (int64): the first row of each, and that behind them all. ``last [R]``
    (int64): those that want logits: rows that ride along, then of the pieces that choose a token,
    in their order. ``riding``: behind all pieces, rows of sequences that decode, one each, whose
    tokens are not there yet.
    """

    rows: TokenBatch
    block: int
    starts: Tensor
    last: Tensor
    riding: slice

    def take_tokens(self, held: Tensor) -> None:
        """Rows that ride along read what their slots hold, of ``held [S]`` on the device."""
        among = self.riding
        torch.index_select(held, 0, self.rows.slots[among], out=self.rows.tokens[among])


def num_tokens_of(chunks: Sequence[PrefillChunk]) -> int:
    """Rows that pieces take in a captured pass: whole short blocks each."""
    return sum(-(-len(chunk.tokens) // SHORT_BLOCK) * SHORT_BLOCK for chunk in chunks)


def can_join(chunk: PrefillChunk, marks: int = 0, most_rows: int = sys.maxsize) -> bool:
    """Whether a piece may be one of several: nothing is wanted of it but its last token's choice,
    and its state behind it and at up to so many marks; and it has up to so many rows.
    """
    is_plain = not (chunk.echoes or chunk.pools) and not chunk.also and len(cut(chunk, marks)) == 1
    return is_plain and num_tokens_of((chunk,)) <= most_rows


def split(
    chunks: Sequence[PrefillChunk],
    most: int,
    *,
    marks: int = 0,
    most_rows: int = sys.maxsize,
    beside: bool = False,
) -> tuple[list[list[PrefillChunk]], list[PrefillChunk]]:
    """Batches of up to ``most`` pieces with up to so many ``marks`` each, and so many rows of all,
    and those pieces that are run each for itself: all where there is one, but ``beside`` rows that
    ride along.
    """
    batches: list[list[PrefillChunk]] = []
    if not (beside or (most > 1 and len(chunks) > 1)):
        return batches, [*chunks]
    alone: list[PrefillChunk] = []
    for chunk in chunks:
        if not can_join(chunk, marks, most_rows):
            alone.append(chunk)
            continue
        last = batches[-1] if batches else []
        if not last or len(last) == most or num_tokens_of((*last, chunk)) > most_rows:
            batches.append(last := [])
        last.append(chunk)
    return batches, alone


def join(
    chunks: Sequence[PrefillChunk],
    device: torch.device,
    *,
    slots: Sequence[Slot] = (),
    positions: Sequence[int] = (),
    marks: Marks = NO_MARKS,
) -> Ragged:
    """Lay pieces out one behind the other, and behind them rows of ``slots`` at ``positions``."""
    mean = sum(len(chunk.tokens) for chunk in chunks) / len(chunks)
    block = LONG_BLOCK if mean >= LONG_PIECE else SHORT_BLOCK
    first = sum(-(-len(chunk.tokens) // block) * block for chunk in chunks)
    riding = slice(first, first + len(slots))
    staged = np.zeros((4, -(-riding.stop // _ALIGNED) * _ALIGNED), dtype=np.int64)
    staged[1], staged[3] = -1, -1
    staged[1, riding], staged[2, riding] = positions, slots
    pieces = lay_out(staged, chunks, block, marks)
    last = [piece.stop - 1 for chunk, piece in zip(chunks, pieces, strict=True) if chunk.chooses]
    starts = [*(piece.start for piece in pieces), first]
    where = np.array([*starts, *range(riding.start, riding.stop), *last], dtype=np.int64)
    sent = send(where, device)
    count = len(starts)
    return Ragged(TokenBatch(*send(staged, device)), block, sent[:count], sent[count:], riding)


def lay_out(
    staged: np.ndarray, chunks: Sequence[PrefillChunk], block: int, marks: Marks = NO_MARKS
) -> tuple[slice, ...]:
    """Write the tokens, positions, slots and marks of pieces into the first rows of ``staged
    [4, N]``, each piece into whole blocks of its own, of rows that are padding; the rows of each.
    """
    pieces, first = [], 0
    for chunk in chunks:
        piece = slice(first, first + len(chunk.tokens))
        first += -(-len(chunk.tokens) // block) * block
        staged[0, piece] = chunk.tokens
        staged[1, piece] = np.arange(chunk.start, chunk.end)
        staged[2, piece.start : first] = chunk.slot
        for (slot, at), place in marks.items():
            if slot == chunk.slot:
                staged[3, piece.start + at - chunk.start] = place
        pieces.append(piece)
    return tuple(pieces)


def one(
    chunk: PrefillChunk, device: torch.device, marks: Marks = NO_MARKS
) -> tuple[TokenBatch, Tensor | None]:
    """The rows of a single piece, without padding, and those of them that want logits."""
    count = len(chunk.tokens)
    staged = np.zeros((4, -(-count // _ALIGNED) * _ALIGNED), dtype=np.int64)
    staged[3] = -1
    lay_out(staged, (chunk,), _ALIGNED, marks)
    placed = TokenBatch(*send(staged, device)[:, :count])
    if chunk.echoes:
        return placed, torch.arange(count, device=device)
    return placed, send(np.array([count - 1]), device) if chunk.chooses else None
