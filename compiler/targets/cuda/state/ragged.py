"""Layout for several prefill chunks in a batch. Excludes kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.state.slot_table import send
from tilewright.compiler.targets.cuda.state.snapshot_positions import NO_MARKS, Marks, cut
from tilewright.compiler.targets.cuda.state.token_batch import ChunkLayout, TokenBatch
from tilewright.compiler.targets.interface.capabilities import Capabilities
from tilewright.compiler.targets.interface.step import PrefillChunk, Slot

_LONG = 512
"""Mean length of long chunks: attention reads keys less often with more rows per program."""

_ALIGNED = 16
"""Row count alignment. Kernels are compiled for the alignment of their arguments."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """T rows of a batch. Chunks begin at multiples of an alignment, with padding between them.

    Attributes:
        rows: Tokens, positions and slots of the rows.
        layout: Chunks, and decode rows with tokens on the device.
        last: Rows with logits, int64 ``[R]``: decode rows, then the last rows of finished prompts.
    """

    rows: TokenBatch
    layout: ChunkLayout
    last: Tensor

    def take_tokens(self, tokens: Tensor) -> None:
        """Copy the decode rows' tokens from ``tokens [S]``, the device table."""
        among = self.layout.decoding
        torch.index_select(tokens, 0, self.rows.slots[among], out=self.rows.tokens[among])


def num_rows_of(chunks: Sequence[PrefillChunk], alignment: int) -> int:
    """Return the rows for chunks in a mixed batch."""
    return sum(-(-len(chunk.tokens) // alignment) * alignment for chunk in chunks)


def can_join(chunk: PrefillChunk, limits: Capabilities) -> bool:
    """Return whether a chunk may join a mixed batch.

    Its output must be at most its last token and its snapshots, at up to ``limits.marks``
    positions. It must have at most ``limits.most_shared`` rows.
    """
    is_plain = not (chunk.echoes or chunk.pools or chunk.also)
    is_whole = len(cut(chunk, limits.marks)) == 1
    return is_plain and is_whole and num_rows_of((chunk,), limits.alignment) <= limits.most_shared


def split(
    chunks: Sequence[PrefillChunk],
    most: int,
    *,
    limits: Capabilities,
    beside: bool = False,
) -> tuple[list[list[PrefillChunk]], list[PrefillChunk]]:
    """Split chunks into batches, and chunks to run separately.

    Args:
        most: Maximum chunks in a batch.
        limits: Limits for a batch, as in `can_join`.
        beside: Decode rows join, so that a single chunk makes a batch.
    """
    batches: list[list[PrefillChunk]] = []
    if not (beside or (most > 1 and len(chunks) > 1)):
        return batches, [*chunks]
    alone: list[PrefillChunk] = []
    for chunk in chunks:
        if not can_join(chunk, limits):
            alone.append(chunk)
            continue
        last = batches[-1] if batches else []
        num_rows = num_rows_of((*last, chunk), limits.alignment)
        if not last or len(last) == most or num_rows > limits.most_shared:
            batches.append(last := [])
        last.append(chunk)
    return batches, alone


def join(
    chunks: Sequence[PrefillChunk],
    device: torch.device,
    *,
    alignment: int,
    slots: Sequence[Slot] = (),
    positions: Sequence[int] = (),
    marks: Marks = NO_MARKS,
) -> Ragged:
    """Lay out chunks at multiples of ``alignment``, followed by decode rows of ``slots`` at
    ``positions``.
    """
    mean = sum(len(chunk.tokens) for chunk in chunks) / len(chunks)
    first = -(-num_rows_of(chunks, alignment) // _ALIGNED) * _ALIGNED
    decoding = slice(first, first + len(slots))
    staged = np.zeros((4, -(-decoding.stop // _ALIGNED) * _ALIGNED), dtype=np.int64)
    staged[1], staged[3] = -1, -1
    staged[1, decoding], staged[2, decoding] = positions, slots
    pieces = lay_out(staged, chunks, alignment, marks)
    last = [piece.stop - 1 for chunk, piece in zip(chunks, pieces, strict=True) if chunk.chooses]
    starts = [*(piece.start for piece in pieces), first]
    where = np.array([*starts, *range(decoding.start, decoding.stop), *last], dtype=np.int64)
    sent = send(where, device)
    count = len(starts)
    batch = TokenBatch(*send(staged, device))
    layout = ChunkLayout(sent[:count], is_short=mean < _LONG, decoding=decoding)
    return Ragged(batch, layout, last=sent[count:])


def lay_out(
    staged: np.ndarray, chunks: Sequence[PrefillChunk], alignment: int, marks: Marks = NO_MARKS
) -> tuple[slice, ...]:
    """Write tokens, positions, slots and snapshot positions of chunks to ``staged [4, N]``.

    Every chunk starts at a multiple of ``alignment``. Return the rows by chunk.
    """
    pieces, first = [], 0
    for chunk in chunks:
        piece = slice(first, first + len(chunk.tokens))
        first += num_rows_of((chunk,), alignment)
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
    """Return a single chunk's rows without padding, and the rows with logits."""
    count = len(chunk.tokens)
    staged = np.zeros((4, -(-count // _ALIGNED) * _ALIGNED), dtype=np.int64)
    staged[3] = -1
    lay_out(staged, (chunk,), _ALIGNED, marks)
    placed = TokenBatch(*send(staged, device)[:, :count])
    if chunk.echoes:
        return placed, torch.arange(count, device=device)
    return placed, send(np.array([count - 1]), device) if chunk.chooses else None
