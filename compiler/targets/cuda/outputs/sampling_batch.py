"""How the tokens of a bucket's rows are chosen on the device, and what their draws ask for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda.collectives.group import RankGroup
from tilewright.compiler.targets.cuda.kernels.sampling import cutoff as search
from tilewright.compiler.targets.cuda.kernels.sampling import sample
from tilewright.compiler.targets.cuda.kernels.sampling.argmax import choose, num_keys
from tilewright.compiler.targets.cuda.state.slot_table import Parameters, SlotTable


class Drawing(NamedTuple):
    """What some of the rows that draw ask for; each that nobody asks for is not launched."""

    has_top_k: bool
    has_top_p: bool


EVERY_DRAWING = tuple(Drawing(k, p) for k in (False, True) for p in (False, True))


def drawing_of(rows: Iterable[SamplingParams]) -> Drawing | None:
    """What rows ask for of their draws; None where all of them are greedy."""
    drawn = [each for each in rows if not each.is_greedy]
    if not drawn:
        return None
    return Drawing(any(each.top_k > 0 for each in drawn), any(each.top_p < 1.0 for each in drawn))


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """How the tokens of B rows are chosen, and where they go: tensors that a graph reads.

    All are ``[B]`` but ``parameters``, of B rows. ``tokens`` and ``why`` (see :class:`Chosen`) are
    the results; ``positions``: where the chosen tokens will stand; ``width``: how many of a row's
    first logits are chosen from. With a ``group`` the logits are this rank's columns of them.
    """

    tokens: Tensor
    why: Tensor
    parameters: Parameters
    positions: Tensor
    keys: Tensor
    scratch: search.SearchScratch
    width: int
    group: RankGroup | None = None

    def gather(self, table: SlotTable, at: Tensor) -> None:
        """The parameters of the slots in the rows ``at [B]`` of the table."""
        torch.index_select(table.parameters.words, 0, at, out=self.parameters.words)

    def take_likeliest(self, logits: Tensor, *, advancing: Tensor | None = None) -> None:
        """Choose from ``logits [B, V]``; positions ``advancing [B]`` go on by one, but padding."""
        ends = self.parameters.end_tokens
        to = self.tokens, self.why
        if self.group is not None:
            self.group.take_likeliest(
                *to, logits, width=self.width, end_tokens=ends, scratch=self.keys,
                positions=advancing,
            )  # fmt: skip
            return
        logits = logits[:, : self.width]
        choose(*to, logits, end_tokens=ends, scratch=self.keys, positions=advancing)

    def draw(self, logits: Tensor, drawing: Drawing) -> None:
        """Replace the likeliest tokens, chosen from these logits before, in rows that draw."""
        if self.group is None:
            self._draw(logits, drawing)
            return
        whole = self.group.whole(logits)
        if self.group.leads:
            self._draw(whole, drawing)
        self.group.share(self.tokens, self.why)

    def _draw(self, logits: Tensor, drawing: Drawing) -> None:
        sample.draw(
            self.tokens,
            self.why,
            logits[:, : self.width],
            self.parameters.words,
            self.positions,
            end_tokens=self.parameters.end_tokens,
            scratch=self.scratch,
            has_top_k=drawing.has_top_k,
            has_top_p=drawing.has_top_p,
        )

    def apply(self, logits: Tensor, drawing: Drawing | None) -> None:
        """Choose from ``logits [B, V]``, drawing where rows do."""
        self.take_likeliest(logits)
        if drawing is not None:
            self.draw(logits, drawing)


def make_choice(
    num_rows: int,
    width: int,
    num_ends: int,
    tokens: Tensor,
    *,
    positions: Tensor | None = None,
    group: RankGroup | None = None,
) -> SamplingBatch:
    """A choice of ``num_rows`` rows, greedy until told otherwise; it writes into ``tokens``, and
    reads ``positions`` when it is made (default: its own).
    """
    device = tokens.device
    return SamplingBatch(
        tokens=tokens,
        why=torch.zeros(num_rows, dtype=torch.uint8, device=device),
        parameters=Parameters(num_rows, num_ends, device),
        positions=torch.zeros_like(tokens) if positions is None else positions,
        keys=torch.empty(num_rows, num_keys(width), dtype=torch.int64, device=device),
        scratch=search.SearchScratch.empty(num_rows, width, device),
        width=width,
        group=group,
    )
