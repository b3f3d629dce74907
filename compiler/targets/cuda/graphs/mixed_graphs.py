"""CUDA graphs for mixed batches: prefill chunks from several prompts and decode rows in one
forward.

A few sizes have a graph. Without a graph, launches take longer than the forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tilewright.compiler.targets.cuda.graphs.capture import Bucket, CapturedGraph
from tilewright.compiler.targets.cuda.outputs.sampling_batch import SamplingFilters, make_choice
from tilewright.compiler.targets.cuda.state.ragged import lay_out
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable, send_into
from tilewright.compiler.targets.cuda.state.snapshot_positions import NO_MARKS, Marks
from tilewright.compiler.targets.cuda.state.token_batch import ChunkLayout, TokenBatch
from tilewright.compiler.targets.cuda.steps.runner import StepRunner
from tilewright.compiler.targets.interface.step import PrefillChunk, Slot

_TOTALS = (128, 192, 256, 320, 384, 512, 640, 896, 1024)
"""Total rows in a forward: whole cuBLAS tiles. A few more rows take as long as another tile."""
_WIDTHS = (16, 64, 128, 192)
_LEAST = 64
_WIDTHS_OF_MIXERS, _TOTALS_OF_MIXERS = (16, 64), (64, 256, 512, 1024, 2048)
"""Decode rows and prefill tokens for plans with mixers, whose forwards have a thousand kernels.
Prefill tokens exclude decode rows: all experts are read in any case, so a few rows are free.
"""
_MORE_OF_MIXERS = (4096, 8192)
"""Additional prefill sizes, for the largest number of decode rows only. Unused rows cost little
here.
"""
USUAL_OF_MIXERS = _TOTALS_OF_MIXERS[-1]
"""Maximum prefill tokens for plans with mixers, if larger sizes have no memory or cannot be
filled.
"""


Passes = tuple[tuple[int, tuple[int, ...]], ...]
"""Captured sizes as in `Capabilities`: maximum rows, and prefill tokens."""


def passes_for(rows: Sequence[int], most_tokens: int, *, has_mixers: bool = False) -> Passes:
    """Return the mixed batch sizes to capture, padding included.

    Args:
        rows: Decode step sizes.
        most_tokens: Maximum prefill tokens in a step.
    """
    if has_mixers:
        widths = (*(each for each in _WIDTHS_OF_MIXERS if each < rows[-1]), rows[-1])
        totals = tuple(each for each in _TOTALS_OF_MIXERS if each <= most_tokens)
        more = tuple(each for each in _MORE_OF_MIXERS if each <= most_tokens)
        return (*((width, totals) for width in widths[:-1]), (widths[-1], totals + more))
    widths = (*(each for each in _WIDTHS if each < rows[-1]), rows[-1])
    return tuple((width, _sizes(width)) for width in widths)


def _sizes(width: int) -> tuple[int, ...]:
    """Return prefill sizes that fill whole tiles with ``width`` decode rows."""
    taken = -(-width // _LEAST) * _LEAST if width > _WIDTHS[0] else 0
    return tuple(sorted({_LEAST, *(each - taken for each in _TOTALS if each - taken > _LEAST)}))


class _MixedGraph:
    """A graph for one token count, with its inputs in one buffer.

    Attributes:
        rows: Prefill tokens, then decode rows.
        wanted: Rows with logits.
        at, ends: For each row with logits: its table row and the new token's position.
        layout: Up to ``most`` short chunks, then the decode rows. The last chunk includes the
            padding. Absent chunks have no rows.
    """

    def __init__(
        self, num_tokens: int, *, width: int, most: int, alignment: int, device: torch.device
    ) -> None:
        self.num_tokens, self.width, self._alignment = num_tokens, width, alignment
        self.captured: CapturedGraph | None = None
        self._sizes = 4 * (num_tokens + width), 3 * width, most + 1
        self._words = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        words, each, starts = self._words.split(self._sizes)
        words = words.view(4, -1)
        words[1], words[3] = -1, -1
        self.rows = TokenBatch(*words)
        self.wanted, self.at, self.ends = each.view(3, width)
        starts[1:] = num_tokens
        self.layout = ChunkLayout(starts, True, slice(num_tokens, num_tokens + width))

    def upload(
        self,
        chunks: Sequence[PrefillChunk],
        positions: Mapping[Slot, int],
        ends: Mapping[Slot, int],
        none: int,
        marks: Marks,
    ) -> None:
        """Write a step's inputs.

        Args:
            chunks: Prefill chunks.
            positions: Decode slots and their position count.
            ends: Slots that get a token, with its position. Decode slots come first.
            none: Table row for padding.
            marks: Snapshot positions of the chunks.
        """
        staged = np.zeros(len(self._words), dtype=np.int64)
        words, each, starts = np.split(staged, np.cumsum(self._sizes)[:-1])
        first, tokens = self.num_tokens, words.reshape(4, -1)
        tokens[1], tokens[3] = -1, -1
        pieces = lay_out(tokens, chunks, self._alignment, marks)
        among = slice(first, first + len(positions))
        tokens[1, among], tokens[2, among] = [*positions.values()], [*positions]
        starts[: len(pieces)], starts[len(pieces) :] = [piece.start for piece in pieces], first
        wanted, at, where = each.reshape(3, -1)
        both = zip(chunks, pieces, strict=True)
        last = [piece.stop - 1 for chunk, piece in both if chunk.chooses]
        wanted[: len(ends)] = [*range(first, among.stop), *last]
        at[: len(ends)], at[len(ends) :], where[: len(ends)] = [*ends], none, [*ends.values()]
        send_into(self._words, staged)


class BatchBucket(Bucket):
    """CUDA graphs for mixed batches, by token count.

    A batch has at most ``most`` prefill chunks and ``width`` sampled rows. Chunks begin at
    multiples of ``alignment``.
    """

    def __init__(
        self,
        steps: StepRunner,
        table: SlotTable,
        *,
        width: int,
        sizes: Sequence[int],
        most: int,
        alignment: int,
        num_choosable: int,
        pool: Any,
    ) -> None:
        device = steps.device
        choice = make_choice(width, num_choosable, table.num_ends, device, group=steps.group)
        super().__init__(choice, device, pool)
        self.width, self._sizes, self._most, self._alignment = width, tuple(sizes), most, alignment
        self._steps, self._table = steps, table
        self._passes: dict[int, _MixedGraph] = {}
        self._at = torch.empty(0)

    def prepare(self) -> None:
        """Capture all sizes. The largest comes first; smaller sizes run in its memory."""
        for size in reversed(self._sizes):
            self._pass(size)
        self.prepare_choices()

    def run(
        self,
        num_tokens: int,
        chunks: Sequence[PrefillChunk],
        positions: Mapping[Slot, int],
        ends: Mapping[Slot, int],
        drawing: SamplingFilters | None,
        marks: Marks = NO_MARKS,
    ) -> None:
        """Run a mixed batch with a captured token count; see :meth:`_MixedGraph.upload`.

        Each slot's next step in ``ends`` reads its selected token.
        """
        found = self._pass(num_tokens)
        found.upload(chunks, positions, ends, self._table.padding, marks)
        assert found.captured is not None
        found.captured()
        if drawing is not None:
            self.draw(drawing)
        self._at = found.at
        self._table.give_back(self._at, self.choice.tokens)

    def choose_again(self, drawing: SamplingFilters | None) -> None:
        super().choose_again(drawing)
        self._table.give_back(self._at, self.choice.tokens)

    def _pass(self, num_tokens: int) -> _MixedGraph:
        if num_tokens not in self._passes:
            made = _MixedGraph(
                num_tokens,
                width=self.width,
                most=self._most,
                alignment=self._alignment,
                device=self._device,
            )
            made.at.fill_(self._table.padding)
            self._passes[num_tokens] = made
            made.captured = self.captured(lambda: self._run(made))
        return self._passes[num_tokens]

    def _run(self, made: _MixedGraph) -> None:
        """Run the forward. Padding rows may read any token, because they have no position."""
        tokens = made.rows.tokens[made.layout.decoding]
        torch.index_select(self._table.tokens, 0, made.at, out=tokens)
        logits = self._steps.prefill(made.rows, logit_rows=made.wanted, layout=made.layout)
        assert logits is not None
        self.logits = logits  # the same memory for all sizes
        self.choice.gather(self._table, made.at)
        self.choice.positions.copy_(made.ends)
        self.choice.take_likeliest(logits)
