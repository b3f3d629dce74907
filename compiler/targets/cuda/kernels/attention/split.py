"""How a launch of attention.cu shares out a row's pages between blocks: pure numbers, as they were
measured on an H200, without a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilewright.compiler.targets.cuda.kernels.matmul.dense import FEW_TOKENS
from tilewright.compiler.targets.cuda.tuning import tuning

SHORT_PAGES = 32
"""Pages in sight, up to which one group of splits takes a row."""

REACHES = (8, SHORT_PAGES)
"""Pages that the rows of a step have at most, for which a launch over a longer table has no blocks
but those that work. Others end at once, but have to be begun: 8 rows of Llama-3.1-8B at position
230 of a table of 4,096 take 8.5 us with them and 4.5 without, on an H200.
"""

MANY_BLOCKS = 768
"""Blocks of a launch of one row over a long table, about, by which its groups are counted, with a
block for each split.
"""

ENOUGH_BLOCKS = 512
"""Blocks from which on a launch has fewer blocks a group instead; half as many where a block has
twice the threads, and half of either for four blocks a group. Rows are taken to have one group,
whatever their table has room for.
"""

ENOUGH_EIGHTS = 128
"""The same of eight blocks a group over a long table, however many threads a block has: further
groups may work beside them.
"""

MOST_BLOCKS = 2048
"""Blocks of a launch over a long table, about: beyond, blocks walk over several groups, most of
which rows that are short do not have; of `WALKED_PAGES` pages at most.
"""

MOST_JOINED_BLOCKS = 3072
"""The same where blocks are clusters. These were measured on an H200: at 230 positions of a table
of 4,096 fewer blocks are faster, at 3,900 more.
"""

WALKED_PAGES = 64

MAX_GROUPS = 16
"""Groups of splits that a row's pages are cut into, at most."""

_TUNING = tuning()["attention"]["spread"]
FEW_PAGES = {int(dim): range(*pages) for dim, pages in _TUNING["pages"].items()}
"""Of a table, with which few rows are spread, by channels of a head, as measured on an H200. Up to
eight pages, no split has more than one. Of 128 channels short rows lose what longer ones gain in
tables of up to 20, and of more than 32; of 256, a row of more than 32 pages loses less than
shorter ones gain.
"""

MOST_FEW_CLUSTERS: int = _TUNING["max_clusters"]
"""Clusters of sixteen blocks that a GPU works at once, at most: two in each of its eight parts,
half as many where a block has twice the threads.
"""

MOST_SPLITS = 8
"""Splits of a group, at most."""

CLUSTER_SPLITS = 32
"""Splits of a cluster of sixteen blocks, where a row has several groups."""

_WARP_CHANNELS = 128
# Rows times key/value heads of more than 32 pages: of more, walking is faster.
_FEW_LONG: int = _TUNING["max_long_rows"]


@dataclass(frozen=True, slots=True)
class SplitKV:
    """How a launch shares out the splits of a row: groups of up to eight splits, blocks of a group,
    splits of a block, and of how many groups there are blocks, which walk over the others. The
    bits of a row depend on the groups and on how many splits each has.
    """

    num_groups: int
    num_joined: int
    each_block: int
    num_begun: int = 1

    @property
    def group_splits(self) -> int:
        """The splits of a group."""
        return self.num_joined * self.each_block


@dataclass(frozen=True, slots=True)
class Spread:
    """The same of few rows: clusters of sixteen blocks take up to four pages of eight splits at
    once, or of 32 splits one. A row has the bits of a :class:`SplitKV` of as many groups, of eight
    splits each.
    """

    num_groups: int
    num_clusters: int  # of a row and key/value head

    num_joined: ClassVar[int] = 16
    group_splits: ClassVar[int] = 8


def choose_share(
    num_rows: int,
    num_kv_heads: int,
    num_pages: int,
    head_dim: int = 128,
    *,
    same_bits: bool = True,
) -> SplitKV:
    """Choose how a launch over tables of ``num_pages`` shares out its splits.

    ``same_bits``: of a row however many rows there are. Else a group has as many splits as blocks,
    and fewer sums are combined.
    """
    num_groups = 1
    if num_pages > SHORT_PAGES:
        of_a_row = MANY_BLOCKS // (MOST_SPLITS * num_kv_heads)
        num_groups = max(2, min(MAX_GROUPS, of_a_row))
    splits = MOST_SPLITS if num_groups > 1 else _splits_of_one_group(num_pages)
    num_blocks, parts = num_rows * num_kv_heads, num_parts(head_dim)
    enough = ENOUGH_BLOCKS // parts
    num_joined = _choose_joined(num_blocks, splits, num_groups, enough, same_bits)
    most = MOST_JOINED_BLOCKS if num_joined > 1 else MOST_BLOCKS
    wanted = -(-most // (parts * num_blocks * num_joined))
    num_begun = min(num_groups, max(wanted, -(-num_pages // WALKED_PAGES)))
    return SplitKV(num_groups, num_joined, splits // num_joined if same_bits else 1, num_begun)


def reaches_of(num_pages: int) -> tuple[int, ...]:
    """The :data:`REACHES` of tables of ``num_pages``, and any row's."""
    return (*(each for each in REACHES if each < num_pages), num_pages)


def choose_spread(num_rows: int, num_kv_heads: int, num_pages: int, head_dim: int) -> Spread | None:
    """Choose how few rows over tables of ``num_pages`` are spread; None where they are not."""
    if num_rows > FEW_TOKENS or num_pages not in FEW_PAGES.get(head_dim, ()):
        return None
    most = MOST_FEW_CLUSTERS // num_parts(head_dim)
    if num_rows * num_kv_heads > (most if num_pages <= CLUSTER_SPLITS else _FEW_LONG):
        return None
    num_groups = choose_share(num_rows, num_kv_heads, num_pages, same_bits=True).num_groups
    assert num_groups == 1 or num_pages <= MOST_SPLITS * num_groups  # a page a split
    return Spread(num_groups, 1 if num_groups == 1 else -(-num_pages // CLUSTER_SPLITS))


def share_of_step(*sizes: int, strict: bool, spreads: bool = True) -> SplitKV | Spread:
    """Choose for ``sizes``, which are :func:`choose_share`'s, as a step does, which keeps a row's
    bits where these are promised (``strict``), and with few rows; of more, products of bfloat16
    promise none either. ``spreads``: few rows of long tables may be a :class:`Spread`.
    """
    if spreads and (spread := choose_spread(*sizes)):
        return spread
    return choose_share(*sizes, same_bits=strict or sizes[0] <= FEW_TOKENS)


def _choose_joined(
    num_blocks: int, splits: int, num_groups: int, enough: int, same_bits: bool
) -> int:
    """Blocks of a group, of launches of so many with one a group. Of one group with eight splits,
    four were measured slower than two where bits are the same.
    """
    fours = enough // 2
    if num_groups == 1 and splits < MOST_SPLITS:
        fours = enough
    elif num_groups == 1 and same_bits:
        fours = 0
    at_most = {8: enough if num_groups == 1 else ENOUGH_EIGHTS, 4: fours, 2: enough}
    found = (each for each, most in at_most.items() if num_blocks * each <= most)
    return next((each for each in found if each <= splits), 1)


def _splits_of_one_group(num_pages: int) -> int:
    """A power of two, as the blocks of a group are."""
    return next(count for count in (1, 2, 4, 8) if count == MOST_SPLITS or count >= num_pages)


def num_parts(head_dim: int) -> int:
    """Warps that share positions, each with a part of the channels."""
    return -(-head_dim // _WARP_CHANNELS)
