"""Meshes with chips or ranks, and splits for a tensor axis over a mesh axis.

A share is a list of index ranges. A range with zeros exists on a chip only, so
that indivisible heads and columns are padded or repeated exactly.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.formats.block_float import TILE
from tilewright.errors import CompileError

ROWS, COLUMNS = "r", "c"


@dataclass(frozen=True, slots=True)
class Mesh:
    """``rows`` x ``columns`` chips.

    Heads and hidden columns are split over the axis ``r`` (``rows`` chips), and the residual
    stream over ``c``. A board with a single axis is n x 1, and 1 x n in ttnn.
    """

    rows: int = 1
    columns: int = 1

    def __post_init__(self) -> None:
        assert self.rows > 1 or self.columns == 1, "a mesh of one axis is n x 1"

    @property
    def num_chips(self) -> int:
        return self.rows * self.columns

    def size(self, axis: str) -> int:
        """Return the chips along an axis."""
        return self.rows if axis == ROWS else self.columns

    def __str__(self) -> str:
        return f"1x{self.rows}" if self.columns == 1 else f"{self.rows}x{self.columns}"


@dataclass(frozen=True, slots=True)
class SplitPolicy:
    """How to split an axis.

    Attributes:
        pads: equal shares padded with zeros, so that all chips run the same program. Else whole
            units without zeros.
        shares: proportions for unpadded shares. Empty: almost equal shares, larger shares first.
    """

    pads: bool = False
    shares: tuple[int, ...] = ()


EQUAL, UNEVEN = SplitPolicy(pads=True), SplitPolicy()


def in_shares(shares: Sequence[int]) -> SplitPolicy:
    """Return the policy for a split in proportion to a positive number per rank."""
    assert shares and all(each > 0 for each in shares), shares
    return SplitPolicy(shares=tuple(shares))


@dataclass(frozen=True, slots=True)
class IndexRange:
    """``count`` positions of the whole axis from ``start``. None: zeros."""

    start: int | None
    count: int

    @property
    def end(self) -> int:
        """The position after the last one. The range must not be zeros."""
        assert self.start is not None
        return self.start + self.count


@dataclass(frozen=True, slots=True)
class Split:
    """Every chip's index ranges along a mesh axis. Padded shares have equal sizes."""

    shares: tuple[tuple[IndexRange, ...], ...]

    @property
    def size(self) -> int:
        """The positions on a chip, with zeros. All shares must be equal."""
        assert len(set(self.sizes)) == 1, self.sizes
        return self.sizes[0]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The positions in each share, with zeros."""
        return tuple(sum(run.count for run in share) for share in self.shares)

    @property
    def is_in_order(self) -> bool:
        """Return whether the concatenated shares are the whole axis."""
        end = 0
        for run in (run for share in self.shares for run in share):
            if run.start != end:
                return False
            end += run.count
        return True

    def in_units(self, unit: int) -> Split:
        """Return the split for an axis whose unit has ``unit`` positions, as a head."""
        runs = [run for share in self.shares for run in share]
        assert all(run.count % unit == 0 and (run.start or 0) % unit == 0 for run in runs)
        return Split(
            tuple(
                tuple(
                    IndexRange(None if r.start is None else r.start // unit, r.count // unit)
                    for r in s
                )
                for s in self.shares
            )
        )

    def times(self, unit: int) -> Split:
        """Return the split for an axis with ``unit`` positions for each position.

        It inverts :meth:`in_units`.
        """
        return Split(
            tuple(
                tuple(
                    IndexRange(None if r.start is None else r.start * unit, r.count * unit)
                    for r in s
                )
                for s in self.shares
            )
        )

    def merged(self) -> Split:
        """Return the same shares with adjacent ranges merged."""
        shares = []
        for share in self.shares:
            runs: list[IndexRange] = []
            for run in share:
                last = runs[-1] if runs else IndexRange(None, 0)
                if None not in (last.start, run.start) and last.end == run.start:
                    runs[-1] = IndexRange(last.start, last.count + run.count)
                else:
                    runs.append(run)
            shares.append(tuple(runs))
        return Split(tuple(shares))

    def moved(self, first: int) -> Split:
        """Return the same shares with all positions shifted by ``first``."""
        return Split(
            tuple(
                tuple(IndexRange(None if r.start is None else first + r.start, r.count) for r in s)
                for s in self.shares
            )
        )

    def indices(self, rank: int) -> Tensor:
        """Return the position in the whole axis of each of a chip's, int64 ``[size]``, -1: zero."""
        parts = [
            torch.full((run.count,), -1)
            if run.start is None
            else torch.arange(run.start, run.start + run.count)
            for run in self.shares[rank]
        ]
        return torch.cat(parts)

    def take(self, whole: Tensor, axis: int, rank: int) -> Tensor:
        """Return a chip's share along ``axis``, with zeros for padding."""
        indices = self.indices(rank).to(whole.device)
        found = whole.index_select(axis, indices.clamp(min=0))
        shape = [1] * whole.ndim
        shape[axis] = -1
        return torch.where((indices < 0).view(shape), whole.new_zeros(()), found)


def deal(size: int, count: int, *, unit: int = TILE, policy: SplitPolicy = EQUAL) -> Split:
    """Split ``size`` positions over ``count`` chips or ranks in whole units.

    Padded splits have zeros at the end. In other splits, every share has at least one unit, and
    only the last share may end within a unit.

    Raises:
        CompileError: without padding, for fewer units than ranks.
    """
    if policy.pads:
        share = -(-size // (count * unit)) * unit
        starts = [min(rank * share, size) for rank in range(count)]
        return Split(tuple(_padded(each, min(share, size - each), share) for each in starts))
    num_units = -(-size // unit)
    if num_units < count:
        raise CompileError(
            f"{size} in blocks of {unit} are {num_units}, over {count} ranks; "
            f"allowed: at most {num_units} ranks"
        )
    shares, start = [], 0
    for given in _units(num_units, policy.shares or (1,) * count):
        shares.append((IndexRange(start, min(given * unit, size - start)),))
        start += given * unit
    return Split(tuple(shares))


def _padded(start: int, real: int, share: int) -> tuple[IndexRange, ...]:
    runs = (IndexRange(start, real),) if real else ()
    return (*runs, IndexRange(None, share - real)) if real < share else runs


def _units(num_units: int, shares: Sequence[int]) -> list[int]:
    """Return whole units in proportion to ``shares``, at least one each.

    The remaining units go to the shares with the largest deficit, then to the first.
    """
    due = [num_units * share / sum(shares) for share in shares]
    given = [max(1, int(each)) for each in due]
    while sum(given) < num_units:
        rank = max(range(len(due)), key=lambda r: (due[r] - given[r], -r))
        given[rank] += 1
    while sum(given) > num_units:
        rank = max((r for r in range(len(due)) if given[r] > 1), key=lambda r: given[r] - due[r])
        given[rank] -= 1
    return given


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """A split for query and key/value heads over ``count`` chips or ranks.

    Attributes:
        num_heads, num_kv_heads: heads on the first chip. Padded splits have equal chips.
        query_of, kv_of: model heads on each chip. None: a head of zeros.
    """

    num_heads: int
    num_kv_heads: int
    query_of: tuple[tuple[int | None, ...], ...]
    kv_of: tuple[tuple[int | None, ...], ...]

    def queries(self, head_dim: int) -> Split:
        """Return the query heads' columns."""
        return _columns(self.query_of, head_dim, 0)

    def keys(self, head_dim: int, *, first: int = 0) -> Split:
        """Return the key (or value) heads' columns."""
        return _columns(self.kv_of, head_dim, first)


def split_heads(
    num_heads: int,
    num_kv_heads: int,
    count: int,
    policy: SplitPolicy = EQUAL,
    *,
    kv_unit: int = 1,
    query_unit: int = 1,
) -> HeadSplit:
    """Split heads. A chip's queries read its own keys only, in equal groups.

    Padded: every chip has equally many heads. The key/value heads are padded to a
    multiple or a divisor of ``count``. In the latter case, each head is repeated on ``count /
    heads`` chips. These chips share its group's queries, padded to equal shares.

    Not padded: whole groups in the policy's proportions. With fewer key/value heads than
    ranks, each rank has a single head, and the ranks with the same head share its queries. No
    rank's heads begin within ``kv_unit`` key/value heads, or ``query_unit`` queries.

    Raises:
        CompileError: for fewer query heads than chips, or fewer units than ranks.
    """
    if num_heads < count:
        noun = ("chips", "meshes of at most") if policy.pads else ("ranks", "at most")
        raise CompileError(
            f"{num_heads} query heads over {count} {noun[0]}; allowed: {noun[1]} {num_heads}"
        )
    if policy.pads:
        return _split_padded(num_heads, num_kv_heads, count)
    if count <= num_kv_heads:
        group = num_heads // num_kv_heads
        unit = kv_unit * (query_unit // math.gcd(kv_unit * group, query_unit))
        keys = deal(num_kv_heads, count, unit=unit, policy=policy)
        return _head_split(keys.times(group), keys)
    if kv_unit > 1:
        raise CompileError(
            f"{num_kv_heads} key/value heads in blocks of {kv_unit}, over {count} ranks; "
            f"allowed: at most {-(-num_kv_heads // kv_unit)} ranks"
        )
    return _split_groups(num_heads, num_kv_heads, count, policy, query_unit)


def _head_split(queries: Split, keys: Split) -> HeadSplit:
    """Return the heads in the ranks' index ranges."""
    query_of, kv_of = (
        tuple(tuple(split.indices(rank).tolist()) for rank in range(len(split.shares)))
        for split in (queries, keys)
    )
    return HeadSplit(len(query_of[0]), len(kv_of[0]), query_of, kv_of)


def _split_groups(
    num_heads: int, num_kv_heads: int, count: int, policy: SplitPolicy, query_unit: int
) -> HeadSplit:
    """Split each key/value head's queries over several ranks."""
    group = num_heads // num_kv_heads
    queries, keys = [], []
    shares = policy.shares or (1,) * count
    for head, ranks in enumerate(deal(count, num_kv_heads, unit=1, policy=UNEVEN).shares):
        first, copies = ranks[0].start or 0, ranks[0].count
        part = in_shares(shares[first : first + copies])
        for share in deal(group, copies, unit=query_unit, policy=part).shares:
            queries.append((IndexRange(head * group + (share[0].start or 0), share[0].count),))
            keys.append((IndexRange(head, 1),))
    return _head_split(Split(tuple(queries)), Split(tuple(keys)))


def _split_padded(num_heads: int, num_kv_heads: int, count: int) -> HeadSplit:
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
            tuple(
                IndexRange(None if h is None else first + h * head_dim, head_dim) for h in of_rank
            )
            for of_rank in heads
        )
    )


def join(*splits: Split) -> Split:
    """Concatenate the shares: a chip's Q columns, then its K columns, then its V columns."""
    count = len(splits[0].shares)
    return Split(
        tuple(tuple(run for split in splits for run in split.shares[r]) for r in range(count))
    )
