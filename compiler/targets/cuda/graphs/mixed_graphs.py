"""Pieces of several prompts, and rows that decode, as one captured pass over the weights: for a few
numbers of tokens of both. Launched kernel by kernel, a pass takes the host longer than the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tilewright.compiler.targets.cuda.graphs.capture import Bucket, CapturedGraph
from tilewright.compiler.targets.cuda.outputs.sampling_batch import Drawing, make_choice
from tilewright.compiler.targets.cuda.state.ragged import SHORT_BLOCK, lay_out
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable, send_into
from tilewright.compiler.targets.cuda.state.snapshot_positions import NO_MARKS, Marks
from tilewright.compiler.targets.cuda.state.token_batch import TokenBatch
from tilewright.compiler.targets.cuda.steps.run import Steps
from tilewright.compiler.targets.interface.step import PrefillChunk, Slot

_TOTALS = (128, 256, 384, 512, 640, 896, 1024)
"""Rows of whole passes, of whole tiles of the library's: of a few more its products take as long as
of a tile more.
"""
_WIDTHS = (16, 64, 128, 192)
_LEAST = 64
_WIDTHS_OF_MIXERS, _TOTALS_OF_MIXERS = (16, 64), (64, 256, 512, 1024, 2048)
"""Of plans with mixers, whose passes are a thousand kernels each: tokens of prompts, beside any
rows; the experts are read either way, and a pass of a few rows more takes no longer.
"""
_MORE_OF_MIXERS = (4096, 8192)
"""Beside the most rows alone, since what rows that are not there take is little of them."""
USUAL_OF_MIXERS = _TOTALS_OF_MIXERS[-1]
"""The largest pass of plans with mixers where larger ones cannot be filled or have no memory."""


Passes = tuple[tuple[int, tuple[int, ...]], ...]
"""As `Capabilities` has them: by rows, the numbers of tokens beside them."""


def passes_for(rows: Sequence[int], most_tokens: int, *, has_mixers: bool = False) -> Passes:
    """The passes that are captured where decode steps are for ``rows`` and take up to so many
    tokens of prompts: by how many rows ride along or pieces end, the tokens of prompts, padding
    included.
    """
    if has_mixers:
        widths = (*(each for each in _WIDTHS_OF_MIXERS if each < rows[-1]), rows[-1])
        totals = tuple(each for each in _TOTALS_OF_MIXERS if each <= most_tokens)
        more = tuple(each for each in _MORE_OF_MIXERS if each <= most_tokens)
        return (*((width, totals) for width in widths[:-1]), (widths[-1], totals + more))
    widths = (*(each for each in _WIDTHS if each < rows[-1]), rows[-1])
    return tuple((width, _sizes(width)) for width in widths)


def _sizes(width: int) -> tuple[int, ...]:
    """What is left of whole passes; a few rows more than those cost little."""
    taken = -(-width // _LEAST) * _LEAST if width > _WIDTHS[0] else 0
    return tuple(sorted({_LEAST, *(each - taken for each in _TOTALS if each - taken > _LEAST)}))


class _MixedGraph:
    """One captured number of tokens: what it reads, in one piece of memory, and its graph.

    ``rows``: of the pieces, and behind them of those that ride along; ``wanted``: whose logits are
    chosen from; ``at`` and ``ends``: the table's row of each of these, and where its token will be;
    ``starts``: the first row of each of up to ``most`` pieces, the last of which has the padding
    behind it too, and those that there are not have no rows.
    """

    def __init__(self, num_tokens: int, width: int, most: int, device: torch.device) -> None:
        self.num_tokens, self.width = num_tokens, width
        self.captured: CapturedGraph | None = None
        self._sizes = 4 * (num_tokens + width), 3 * width, most + 1
        self._words = torch.zeros(sum(self._sizes), dtype=torch.int64, device=device)
        words, each, self.starts = self._words.split(self._sizes)
        words = words.view(4, -1)
        words[1], words[3] = -1, -1
        self.rows = TokenBatch(*words)
        self.wanted, self.at, self.ends = each.view(3, width)
        self.starts[1:] = num_tokens

    @property
    def riding(self) -> slice:
        """The rows of the sequences that ride along with a prompt."""
        return slice(self.num_tokens, self.num_tokens + self.width)

    def upload(
        self,
        chunks: Sequence[PrefillChunk],
        held: Mapping[Slot, int],
        ends: Mapping[Slot, int],
        none: int,
        marks: Marks,
    ) -> None:
        """Pieces with their marks, and slots that ride along with the positions that they hold;
        ``ends``: those that get a token, the riding ones first; ``none``: the table's row for
        nobody.
        """
        staged = np.zeros(len(self._words), dtype=np.int64)
        words, each, starts = np.split(staged, np.cumsum(self._sizes)[:-1])
        first, tokens = self.num_tokens, words.reshape(4, -1)
        tokens[1], tokens[3] = -1, -1
        pieces = lay_out(tokens, chunks, SHORT_BLOCK, marks)
        among = slice(first, first + len(held))
        tokens[1, among], tokens[2, among] = [*held.values()], [*held]
        starts[: len(pieces)], starts[len(pieces) :] = [piece.start for piece in pieces], first
        wanted, at, where = each.reshape(3, -1)
        both = zip(chunks, pieces, strict=True)
        last = [piece.stop - 1 for chunk, piece in both if chunk.chooses]
        wanted[: len(ends)] = [*range(first, among.stop), *last]
        at[: len(ends)], at[len(ends) :], where[: len(ends)] = [*ends], none, [*ends.values()]
        send_into(self._words, staged)


class BatchBucket(Bucket):
    """Up to ``width`` rows that ride along or pieces that end, beside any captured number of tokens
    of up to ``most`` pieces of prompts; the choice of all of their tokens.
    """

    def __init__(
        self,
        steps: Steps,
        table: SlotTable,
        width: int,
        sizes: Sequence[int],
        most: int,
        num_choosable: int,
        pool: Any,
    ) -> None:
        device = steps.device
        tokens = torch.zeros(width, dtype=torch.int64, device=device)
        choice = make_choice(width, num_choosable, table.num_ends, tokens, group=steps.group)
        super().__init__(choice, device, pool)
        self.width, self._sizes, self._most = width, tuple(sizes), most
        self._steps, self._table = steps, table
        self._passes: dict[int, _MixedGraph] = {}
        self._at = torch.empty(0)

    def size_for(self, num_tokens: int) -> int | None:
        """The smallest pass for so many tokens; None where there is none."""
        return next((size for size in self._sizes if size >= num_tokens), None)

    def prepare(self) -> None:
        """Capture all that passes may run: the largest first, in whose memory the others run."""
        for size in reversed(self._sizes):
            self.prepare_pass(size)
        self.prepare_choices()

    def prepare_pass(self, num_tokens: int) -> None:
        """Capture the pass of a captured number of tokens."""
        self._pass(num_tokens)

    def run(
        self,
        num_tokens: int,
        chunks: Sequence[PrefillChunk],
        held: Mapping[Slot, int],
        ends: Mapping[Slot, int],
        drawing: Drawing | None,
        marks: Marks = NO_MARKS,
    ) -> None:
        """Run a pass of a captured number of tokens, as :meth:`_MixedGraph.upload` says. Each slot
        of ``ends`` reads the token chosen for it next.
        """
        found = self._pass(num_tokens)
        found.upload(chunks, held, ends, self._table.padding, marks)
        assert found.captured is not None
        found.captured()
        if drawing is not None:
            self.draw(drawing)
        self._at = found.at
        self._table.give_back(self._at, self.choice.tokens)

    def choose_again(self, drawing: Drawing | None) -> None:
        super().choose_again(drawing)
        self._table.give_back(self._at, self.choice.tokens)

    def _pass(self, num_tokens: int) -> _MixedGraph:
        if num_tokens not in self._passes:
            made = _MixedGraph(num_tokens, self.width, self._most, self._device)
            made.at.fill_(self._table.padding)
            self._passes[num_tokens] = made
            made.captured = self.captured(lambda: self._run(made))
        return self._passes[num_tokens]

    def _run(self, made: _MixedGraph) -> None:
        """Padding that rides along may read any token: it stands nowhere."""
        held = self._table.tokens
        torch.index_select(held, 0, made.at, out=made.rows.tokens[made.riding])
        logits = self._steps.prefill(
            made.rows,
            logit_rows=made.wanted,
            starts=made.starts,
            block=SHORT_BLOCK,
            riding=made.riding,
        )
        assert logits is not None
        self.logits = logits  # the same place for every number of tokens
        self.choice.gather(self._table, made.at)
        self.choice.positions.copy_(made.ends)
        self.choice.take_likeliest(logits)
