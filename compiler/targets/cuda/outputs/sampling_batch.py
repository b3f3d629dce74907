"""Token selection for a bucket's rows on the device, with its sampling parameters."""

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


class SamplingFilters(NamedTuple):
    """Sampling filters in use. Unused filters are not launched."""

    has_top_k: bool
    has_top_p: bool


_WHY_ROWS = 128
"""Finish states are padded to a multiple of these rows, so that tokens are aligned."""

EVERY_DRAWING = tuple(SamplingFilters(k, p) for k in (False, True) for p in (False, True))


def drawing_of(rows: Iterable[SamplingParams]) -> SamplingFilters | None:
    """Return the filters for the sampled rows. None: all rows are greedy."""
    drawn = [each for each in rows if not each.is_greedy]
    if not drawn:
        return None
    return SamplingFilters(
        any(each.top_k > 0 for each in drawn), any(each.top_p < 1.0 for each in drawn)
    )


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Token selection for B rows: tensors that a CUDA graph reads and writes.

    Attributes:
        results: ``why`` and ``tokens`` in a shared buffer, which a single copy sends, int64.
        address, num_bytes: Device address and size of ``results``.
        tokens, why: Results ``[B]``; see :class:`SampledTokens`.
        parameters: Sampling parameters for B rows.
        positions: Positions ``[B]`` of the selected tokens.
        width: Selectable logit count, from the first.
        first: Words before ``tokens`` in ``results``.
        group: With a group, the logits are this rank's columns.
    """

    results: Tensor
    tokens: Tensor
    why: Tensor
    parameters: Parameters
    positions: Tensor
    keys: Tensor
    scratch: search.SearchScratch
    width: int
    first: int
    address: int
    num_bytes: int
    group: RankGroup | None = None

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self.tokens.shape[0]

    def gather(self, table: SlotTable, at: Tensor) -> None:
        """Copy the sampling parameters from the table entries ``at [B]``."""
        torch.index_select(table.parameters.words, 0, at, out=self.parameters.words)

    def take_likeliest(self, logits: Tensor, *, advancing: Tensor | None = None) -> None:
        """Select the likeliest tokens from ``logits [B, V]``.

        Args:
            advancing: Positions ``[B]`` to increment. Padding remains unchanged.
        """
        ends = self.parameters.end_tokens
        to = self.tokens, self.why
        if self.group is not None:
            self.group.take_likeliest(
                *to,
                logits,
                width=self.width,
                end_tokens=ends,
                scratch=self.keys,
                positions=advancing,
            )
            return
        logits = logits[:, : self.width]
        choose(*to, logits, end_tokens=ends, scratch=self.keys, positions=advancing)

    def draw(self, logits: Tensor, drawing: SamplingFilters) -> None:
        """Sample from the same logits after :meth:`take_likeliest`. Greedy rows keep their
        tokens.
        """
        if self.group is None:
            self._draw(logits, drawing)
            return
        whole = self.group.whole(logits)
        if self.group.leads:
            self._draw(whole, drawing)
        self.group.share(self.tokens, self.why)

    def _draw(self, logits: Tensor, drawing: SamplingFilters) -> None:
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

    def apply(self, logits: Tensor, drawing: SamplingFilters | None) -> None:
        """Select from ``logits [B, V]``. Sample if ``drawing`` is not None."""
        self.take_likeliest(logits)
        if drawing is not None:
            self.draw(logits, drawing)


def num_why_words(num_rows: int) -> int:
    """Return the int64 words before the tokens in `SamplingBatch.results`."""
    return -(-num_rows // _WHY_ROWS) * _WHY_ROWS // 8


def make_choice(
    num_rows: int,
    width: int,
    num_ends: int,
    device: torch.device,
    *,
    results: Tensor | None = None,
    positions: Tensor | None = None,
    group: RankGroup | None = None,
) -> SamplingBatch:
    """Return a greedy selection for ``num_rows`` rows.

    Args:
        width: Selectable logit count.
        num_ends: Maximum end token count.
        results: Zeros ``[num_why_words(num_rows) + num_rows]``. None: a new tensor.
        positions: Tensor for the positions. None: a new tensor.
    """
    first = num_why_words(num_rows)
    if results is None:
        results = torch.zeros(first + num_rows, dtype=torch.int64, device=device)
    tokens = results[first:]
    return SamplingBatch(
        results=results,
        tokens=tokens,
        why=results[:first].view(torch.uint8)[:num_rows],
        parameters=Parameters(num_rows, num_ends, device),
        positions=torch.zeros_like(tokens) if positions is None else positions,
        keys=torch.empty(num_rows, num_keys(width), dtype=torch.int64, device=device),
        scratch=search.SearchScratch.empty(num_rows, width, device),
        width=width,
        first=first,
        address=results.data_ptr(),
        num_bytes=results.nbytes,
        group=group,
    )
