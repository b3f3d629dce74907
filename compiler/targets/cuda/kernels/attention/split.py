"""KV splits: cache pages are distributed to the blocks in an attention.cu launch.

Pure arithmetic without a device. The constants were tuned on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tilewright.compiler.targets.cuda.kernels.matmul.gemm_bf16 import MAX_SMALL_M
from tilewright.compiler.targets.cuda.tuning import tuning

SHORT_PAGES = 32
"""Maximum context in pages for a single split group."""

REACHES = (8, SHORT_PAGES)
"""Context lengths in pages with a separate captured launch, which has no idle blocks.

A launch over a longer table starts idle blocks for short contexts, and their start takes time.
"""

TARGET_BLOCKS = 768
"""Approximate number of blocks for a single row over a long table, with a block for each split. It
determines the number of groups.
"""

ENOUGH_BLOCKS = 512
"""Number of blocks from which a launch uses fewer blocks for each group. Half as many if a block
has twice the threads, and half again for four blocks in a group. Rows count as a single group.
"""

ENOUGH_EIGHTS = 128
"""The same limit for eight blocks in a group over a long table, for any number of threads. Further
groups may run concurrently.
"""

MOST_BLOCKS = 2048
"""Approximate maximum number of blocks over a long table. Beyond it, blocks walk over several
groups with at most `WALKED_PAGES` pages. Short rows have no work in most groups.
"""

MOST_JOINED_BLOCKS = 3072
"""The same maximum for blocks in clusters. Short contexts favor fewer blocks and long contexts
more.
"""

WALKED_PAGES = 64

MAX_GROUPS = 16
"""Maximum number of split groups for a row."""

_TUNING = tuning()["attention"]["spread"]
SPREAD_PAGES = {int(dim): range(*pages) for dim, pages in _TUNING["pages"].items()}
"""Table widths in pages that use a :class:`Spread` for few rows, by head size.

Up to eight pages, a split has at most one page. The ranges balance the gain of long rows against
the loss of short rows.
"""

MAX_SPREAD_CLUSTERS: int = _TUNING["max_clusters"]
"""Maximum number of resident clusters with sixteen blocks, two for every eighth of a GPU. Half
as many if a block has twice the threads.
"""

MOST_SPLITS = 8
"""Maximum number of splits in a group."""

CLUSTER_SPLITS = 32
"""Splits for a cluster of sixteen blocks, if a row has several groups."""

_WARP_CHANNELS = 128
# Maximum rows times key/value heads above 32 pages. With more, walking is faster.
_MAX_LONG_ROWS: int = _TUNING["max_long_rows"]


@dataclass(frozen=True, slots=True)
class SplitKV:
    """KV split for a launch. The groups and their splits determine a row's bits.

    Attributes:
        num_groups: Groups, with up to eight splits.
        num_joined: Blocks for a group.
        each_block: Splits for a block.
        num_begun: Groups with their own blocks, which walk over the remaining groups.
    """

    num_groups: int
    num_joined: int
    each_block: int
    num_begun: int = 1

    @property
    def group_splits(self) -> int:
        """Splits in a group."""
        return self.num_joined * self.each_block


@dataclass(frozen=True, slots=True)
class Spread:
    """KV split for few rows: a cluster has sixteen blocks.

    A cluster computes eight splits with up to four pages, or 32 splits with a single page. The bits
    equal the bits with a :class:`SplitKV` that has equal groups and eight splits in a group.
    """

    num_groups: int
    num_clusters: int  # for a row and key/value head

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
    """Return the KV split for a launch over tables with ``num_pages``.

    Args:
        same_bits: A row's bits must not depend on the number of rows. False: a group has one split
            for each block, so that fewer sums are combined.
    """
    num_groups = 1
    if num_pages > SHORT_PAGES:
        of_a_row = TARGET_BLOCKS // (MOST_SPLITS * num_kv_heads)
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
    """Return the :data:`REACHES` below ``num_pages``, and ``num_pages``."""
    return (*(each for each in REACHES if each < num_pages), num_pages)


def choose_spread(num_rows: int, num_kv_heads: int, num_pages: int, head_dim: int) -> Spread | None:
    """Return the KV split for few rows over tables with ``num_pages``. None: use
    :func:`choose_share`.
    """
    if num_rows > MAX_SMALL_M or num_pages not in SPREAD_PAGES.get(head_dim, ()):
        return None
    most = MAX_SPREAD_CLUSTERS // num_parts(head_dim)
    if num_rows * num_kv_heads > (most if num_pages <= CLUSTER_SPLITS else _MAX_LONG_ROWS):
        return None
    num_groups = choose_share(num_rows, num_kv_heads, num_pages, same_bits=True).num_groups
    assert num_groups == 1 or num_pages <= MOST_SPLITS * num_groups  # a split has at most one page
    return Spread(num_groups, 1 if num_groups == 1 else -(-num_pages // CLUSTER_SPLITS))


def share_of_step(*sizes: int, strict: bool, spreads: bool = True) -> SplitKV | Spread:
    """Return the KV split for a step.

    Args:
        sizes: The sizes for :func:`choose_share`.
        strict: The bits are batch-invariant. With few rows they always are.
        spreads: Few rows with long tables may use a :class:`Spread`.
    """
    if spreads and (spread := choose_spread(*sizes)):
        return spread
    return choose_share(*sizes, same_bits=strict or sizes[0] <= MAX_SMALL_M)


def _choose_joined(
    num_blocks: int, splits: int, num_groups: int, enough: int, same_bits: bool
) -> int:
    """Return the block count for a group.

    Args:
        num_blocks: Blocks of the launch with one for each group.

    With a single group, eight splits and equal bits, two blocks are faster than four.
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
    """Return the split count, a power of two because block counts in a group are."""
    return next(count for count in (1, 2, 4, 8) if count == MOST_SPLITS or count >= num_pages)


def num_parts(head_dim: int) -> int:
    """Return the number of warps that share positions. Every warp has a part of the channels."""
    return -(-head_dim // _WARP_CHANNELS)
