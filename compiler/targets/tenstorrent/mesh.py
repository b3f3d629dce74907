"""Meshes of chips, and how an axis of a tensor is dealt over one side of a mesh.

A share is a list of runs of the whole axis; what a run of zeros stands for exists on the chip
alone, so that heads and columns that do not divide are padded or repeated exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.errors import CompileError
from tilewright.compiler.formats.block_float import TILE

ROWS, COLUMNS = "r", "c"


@dataclass(frozen=True, slots=True)
class Mesh:
    """``rows`` x ``columns`` chips: heads and hidden columns are dealt over the rows' axis ``r``
    (its ``rows`` chips), the residual stream over ``c``. A board of one axis is n x 1 here, which
    ttnn calls 1 x n.
    """

    rows: int = 1
    columns: int = 1

    def __post_init__(self) -> None:
        assert self.rows > 1 or self.columns == 1, "a mesh of one axis is n x 1"

    @property
    def num_chips(self) -> int:
        return self.rows * self.columns

    def size(self, axis: str) -> int:
        """The number of chips along an axis."""
        return self.rows if axis == ROWS else self.columns

    def __str__(self) -> str:
        return f"1x{self.rows}" if self.columns == 1 else f"{self.rows}x{self.columns}"


@dataclass(frozen=True, slots=True)
class Run:
    """``count`` positions of the whole axis from ``start``; None: zeros."""

    start: int | None
    count: int


@dataclass(frozen=True, slots=True)
class Split:
    """The runs of every chip along a mesh axis; all shares are of one size."""

    shares: tuple[tuple[Run, ...], ...]

    @property
    def size(self) -> int:
        """Positions on a chip, zeros included."""
        return sum(run.count for run in self.shares[0])

    def indices(self, rank: int) -> Tensor:
        """int64 ``[size]``: the position in the whole axis of each of a chip's; -1 for zeros."""
        parts = [
            torch.full((run.count,), -1)
            if run.start is None
            else torch.arange(run.start, run.start + run.count)
            for run in self.shares[rank]
        ]
        return torch.cat(parts)

    def take(self, whole: Tensor, axis: int, rank: int) -> Tensor:
        """A chip's share of a tensor along ``axis``, zeros where the split says so."""
        indices = self.indices(rank).to(whole.device)
        found = whole.index_select(axis, indices.clamp(min=0))
        shape = [1] * whole.ndim
        shape[axis] = -1
        return torch.where((indices < 0).view(shape), whole.new_zeros(()), found)


def deal(size: int, count: int, *, unit: int = TILE) -> Split:
    """``size`` positions over ``count`` chips in equal shares of whole units, zeros at the end."""
    share = -(-size // (count * unit)) * unit
    shares = []
    for rank in range(count):
        start = min(rank * share, size)
        real = min(share, size - start)
        runs = [Run(start, real)] if real else []
        if real < share:
            runs.append(Run(None, share - real))
        shares.append(tuple(runs))
    return Split(tuple(shares))


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """How query and key/value heads are dealt over ``count`` chips.

    ``num_heads`` and ``num_kv_heads`` are those of a chip, padding included. ``query_of[rank]``
    and ``kv_of[rank]`` name the model's heads on a chip, None for one of zeros.
    """

    num_heads: int
    num_kv_heads: int
    query_of: tuple[tuple[int | None, ...], ...]
    kv_of: tuple[tuple[int | None, ...], ...]

    def queries(self, head_dim: int, *, first: int = 0) -> Split:
        """The columns of the query heads, which begin at ``first`` of the whole axis."""
        return _columns(self.query_of, head_dim, first)

    def keys(self, head_dim: int, *, first: int = 0) -> Split:
        """The columns of the key (or value) heads."""
        return _columns(self.kv_of, head_dim, first)


def split_heads(num_heads: int, num_kv_heads: int, count: int) -> HeadSplit:
    """Every chip gets as many heads, and the queries of a chip read that chip's keys alone.

    Key/value heads are padded to the next number that ``count`` divides, or that divides
    ``count``; in the latter case each is repeated on ``count / heads`` chips, which share the
    queries of its group between them (padded to equal shares).

    Raises:
        CompileError: where there are fewer query heads than chips.
    """
    if num_heads < count:
        raise CompileError(
            f"{num_heads} query heads over {count} chips; allowed: meshes of at most {num_heads}"
        )
    group = num_heads // num_kv_heads
    padded = num_kv_heads
    while padded % count and count % padded:
        padded += 1
    copies = max(1, count // padded)
    per_chip = max(1, padded // count)
    queries_a_copy = -(-group // copies)
    query_of, kv_of = [], []
    for rank in range(count):
        heads = range(rank // copies * per_chip, (rank // copies + 1) * per_chip)
        kv_of.append(tuple(head if head < num_kv_heads else None for head in heads))
        queries: list[int | None] = []
        for head in heads:
            first = rank % copies * queries_a_copy
            for index in range(first, first + queries_a_copy):
                real = index < group and head < num_kv_heads
                queries.append(head * group + index if real else None)
        query_of.append(tuple(queries))
    return HeadSplit(len(query_of[0]), len(kv_of[0]), tuple(query_of), tuple(kv_of))


def _columns(heads: tuple[tuple[int | None, ...], ...], head_dim: int, first: int) -> Split:
    return Split(
        tuple(
            tuple(Run(None if h is None else first + h * head_dim, head_dim) for h in of_rank)
            for of_rank in heads
        )
    )


def join(*splits: Split) -> Split:
    """Shares side by side: a chip's Q columns, then its K, then its V columns."""
    count = len(splits[0].shares)
    return Split(
        tuple(tuple(run for split in splits for run in split.shares[r]) for r in range(count))
    )
