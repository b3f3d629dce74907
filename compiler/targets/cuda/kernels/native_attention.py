"""attention.cu on the device: decode attention of bf16 and bfp8 pages at the usual head sizes.

Knows how a row's pages are shared out between blocks, and nothing of where its operands come from.
Legend: B rows, H query heads, G key/value heads, D head size, S slots, M pages of a slot.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch

from tilewright.compiler.targets.cuda.kernels import nvrtc
from tilewright.compiler.targets.cuda.kernels.attention_decode import Scratch
from tilewright.compiler.targets.cuda.kernels.launch import LOG2_E
from tilewright.compiler.targets.cuda.kernels.native_dense import FEW_TOKENS
from tilewright.compiler.targets.cuda.pages import KVPages

HEAD_DIMS = (64, 96, 128, 256)
MAX_GROUP_HEADS = 16
"""Query heads of a key/value head, at most."""

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
twice the threads, and half of either over a long table for more than two blocks a group. Rows are
taken to have one group, whatever their table has room for.
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

MOST_FEW_HEADS = 8
"""Query heads of a key/value head, at most, of few rows that clusters of sixteen blocks take."""

FEW_PAGES = {128: range(21, 33), 256: range(9, 65)}
"""Of a table, with which few rows are spread, by channels of a head, as measured on an H200. Up to
eight pages, no split has more than one. Of 128 channels short rows lose what longer ones gain in
tables of up to 20, and of more than 32; of 256, a row of more than 32 pages loses less than
shorter ones gain.
"""

MOST_FEW_CLUSTERS = 16
"""Clusters of sixteen blocks that a GPU works at once, at most: two in each of its eight parts,
half as many where a block has twice the threads.
"""

_WARPS = 4
_WARP_CHANNELS = 128
_MOST_SPLITS = 8
_TEAMS = 8
_CLUSTER_SPLITS = 32
_FEW_LONG = 2  # rows times key/value heads of more than 32 pages: of more, walking is faster


class _Attend(ctypes.Structure):
    """`Attend` of attention.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "positions", "slots", "tables")),
        *((name, ctypes.c_void_p) for name in ("inv_freq", "values", "exponents")),
        *((name, ctypes.c_void_p) for name in ("partial", "peaks", "totals", "arrived")),
        *((name, ctypes.c_int) for name in ("table_width", "out_stride", "group_heads")),
        *((name, ctypes.c_int) for name in ("num_kv_heads", "half", "window", "interleaved")),
        *((name, ctypes.c_int) for name in ("early", "num_groups", "num_joined")),
        *((name, ctypes.c_int) for name in ("group_splits", "short_pages")),
        ("scale", ctypes.c_float),
    )


_FEW_NAMES = tuple(f"attend_few_{kind}_{d}" for kind in ("bf16", "bfp8") for d in FEW_PAGES)
SOURCE = nvrtc.Source(
    Path(__file__).with_name("attention.cu"),
    tuple(
        f"{way}_{kind}_{d}_{n}"
        for way in ("attend", "walk")
        for kind in ("bf16", "bfp8")
        for d in HEAD_DIMS
        for n in (1, 2)
    )
    + _FEW_NAMES,
    headers=(
        "primitives.cuh",
        "attention_primitives.cuh",
        "attention_pages.cuh",
        "attention_bfp8.cuh",
        "attention_tiles.cuh",
        "attention_few.cuh",
    ),
    structures=(("Attend", _Attend),),
    large_clusters=_FEW_NAMES,
)


@dataclass(frozen=True, slots=True)
class Share:
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
    once, or of 32 splits one. A row has the bits of a :class:`Share` of as many groups, of eight
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
) -> Share:
    """Choose how a launch over tables of ``num_pages`` shares out its splits.

    ``same_bits``: of a row however many rows there are. Else a group has as many splits as blocks,
    and fewer sums are combined.
    """
    num_groups = 1
    if num_pages > SHORT_PAGES:
        of_a_row = MANY_BLOCKS // (_MOST_SPLITS * num_kv_heads)
        num_groups = max(2, min(MAX_GROUPS, of_a_row))
    splits = _MOST_SPLITS if num_groups > 1 else _splits_of_one_group(num_pages)
    num_blocks, parts = num_rows * num_kv_heads, _num_parts(head_dim)
    enough = ENOUGH_BLOCKS // parts
    num_joined = _choose_joined(num_blocks, splits, num_groups, enough, same_bits)
    most = MOST_JOINED_BLOCKS if num_joined > 1 else MOST_BLOCKS
    wanted = -(-most // (parts * num_blocks * num_joined))
    num_begun = min(num_groups, max(wanted, -(-num_pages // WALKED_PAGES)))
    return Share(num_groups, num_joined, splits // num_joined if same_bits else 1, num_begun)


def reaches_of(num_pages: int) -> tuple[int, ...]:
    """The :data:`REACHES` of tables of ``num_pages``, and any row's."""
    return (*(each for each in REACHES if each < num_pages), num_pages)


def choose_spread(num_rows: int, num_kv_heads: int, num_pages: int, head_dim: int) -> Spread | None:
    """Choose how few rows over tables of ``num_pages`` are spread; None where they are not."""
    if num_rows > FEW_TOKENS or num_pages not in FEW_PAGES.get(head_dim, ()):
        return None
    most = MOST_FEW_CLUSTERS // _num_parts(head_dim)
    if num_rows * num_kv_heads > (most if num_pages <= _CLUSTER_SPLITS else _FEW_LONG):
        return None
    num_groups = choose_share(num_rows, num_kv_heads, num_pages, same_bits=True).num_groups
    assert num_groups == 1 or num_pages <= _MOST_SPLITS * num_groups  # a page a split
    return Spread(num_groups, 1 if num_groups == 1 else -(-num_pages // _CLUSTER_SPLITS))


def share_of_step(*sizes: int, strict: bool, spreads: bool = True) -> Share | Spread:
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
    """Blocks of a group, of launches of so many with one a group. Four were measured slower than
    two where one group has eight splits, and else where there are more than half of enough.
    """
    fours = enough // 2
    if num_groups == 1 and splits < _MOST_SPLITS:
        fours = enough
    elif num_groups == 1 and same_bits:
        fours = 0
    at_most = {8: enough if num_groups == 1 else ENOUGH_EIGHTS, 4: fours, 2: enough}
    found = (each for each, most in at_most.items() if num_blocks * each <= most)
    return next((each for each in found if each <= splits), 1)


def _splits_of_one_group(num_pages: int) -> int:
    """A power of two, as the blocks of a group are."""
    return next(count for count in (1, 2, 4, 8) if count == _MOST_SPLITS or count >= num_pages)


def why_not(pages: KVPages, *, num_heads: int, num_frequencies: int) -> str:
    """Why attention.cu cannot take such pages and heads; empty where it can."""
    if pages.values.dtype not in (torch.bfloat16, torch.int8):
        return f"pages of {pages.values.dtype}"
    if pages.head_dim not in HEAD_DIMS:
        return f"head size {pages.head_dim}"
    if num_heads > MAX_GROUP_HEADS * pages.num_kv_heads:
        return f"{num_heads} heads over {pages.num_kv_heads} of keys and values"
    if num_frequencies % 4:
        return f"{num_frequencies} frequencies of rotation"
    return nvrtc.why_not(pages.values.device, SOURCE)


def attend_decode(
    pages: KVPages,
    qkv: torch.Tensor,
    *,
    out: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    inv_freq: torch.Tensor,
    num_heads: int,
    scale: float,
    window: int = 0,
    interleaved: bool = False,
    scratch: Scratch,
    early: bool = False,
    share: Share | Spread | None = None,
) -> None:
    """What :func:`targets.cuda.kernels.attention_decode.attend_decode` does, with the same
    arguments, where :func:`why_not` has no objection; ``out`` is bf16, its rows 8-byte aligned.
    Products over bfp8 are of float16, where blocks 2^20 times smaller than others nearby are 0.
    A :class:`Spread` that there is no room for becomes a :class:`Share`, of which bits are equal.
    """
    num_rows, heads = qkv.shape[0], num_heads // pages.num_kv_heads
    if share is None or (isinstance(share, Spread) and not _fits(share, pages, num_rows, heads)):
        is_short = share is not None and share.num_groups == 1
        num_pages = SHORT_PAGES if is_short else block_tables.shape[1]
        share = choose_share(num_rows, pages.num_kv_heads, num_pages, pages.head_dim)
    _check_operands(pages, qkv, out, block_tables, inv_freq)
    assert positions.dtype == slots.dtype == torch.int64
    parts = num_rows * num_heads * share.num_groups if share.num_groups > 1 else 0
    assert scratch.peaks.numel() >= parts and scratch.partial.numel() >= parts * pages.head_dim
    arguments = _Attend(
        **_page_arguments(pages, block_tables),
        qkv=qkv.data_ptr(),
        out=out.data_ptr(),
        positions=positions.data_ptr(),
        slots=slots.data_ptr(),
        **_rotation(inv_freq, interleaved),
        partial=scratch.partial.data_ptr(),
        peaks=scratch.peaks.data_ptr(),
        totals=scratch.totals.data_ptr(),
        arrived=scratch.arrived.data_ptr(),
        out_stride=out.stride(0),
        group_heads=heads,
        window=window,
        early=early,
        **_splits(share),
        scale=scale * LOG2_E,
    )
    _launch(pages, arguments, num_rows, share)


def _splits(share: Share | Spread) -> dict[str, int]:
    names = "num_groups", "num_joined", "group_splits"
    return {name: getattr(share, name) for name in names} | {"short_pages": SHORT_PAGES}


def _page_arguments(pages: KVPages, block_tables: torch.Tensor) -> dict[str, int]:
    return {
        "values": pages.values.data_ptr(),
        "exponents": 0 if pages.exponents is None else pages.exponents.data_ptr(),
        "num_kv_heads": pages.num_kv_heads,
        "tables": block_tables.data_ptr(),
        "table_width": block_tables.shape[1],
    }


def _rotation(inv_freq: torch.Tensor, interleaved: bool) -> dict[str, int]:
    return {
        "inv_freq": inv_freq.data_ptr(),
        "half": inv_freq.shape[0],
        "interleaved": interleaved,
    }


def _launch(pages: KVPages, arguments: _Attend, num_rows: int, share: Share | Spread) -> None:
    """The kernel of these pages and so many heads, its splits shared out so."""
    if isinstance(share, Spread):
        at = _spread_launch(share, pages, num_rows)
        nvrtc.launch(SOURCE, _few_name(pages), at=at, arguments=arguments)
        return
    way = "attend" if share.num_begun == share.num_groups else "walk"
    kind = _kind(pages)
    heads = arguments.group_heads
    nvrtc.launch(
        SOURCE,
        f"{way}_{kind}_{pages.head_dim}_{1 if heads <= 8 else 2}",
        at=nvrtc.Launch(
            blocks=(share.num_joined, num_rows, pages.num_kv_heads * share.num_begun),
            num_threads=32 * _WARPS * _num_parts(pages.head_dim),
            shared=_shared_bytes(pages.head_dim, heads, share.group_splits),
            cluster=(share.num_joined, 1, 1),
        ),
        arguments=arguments,
    )


def _kind(pages: KVPages) -> str:
    return "bf16" if pages.exponents is None else "bfp8"


def _few_name(pages: KVPages) -> str:
    return f"attend_few_{_kind(pages)}_{pages.head_dim}"


def _spread_launch(share: Spread, pages: KVPages, num_rows: int) -> nvrtc.Launch:
    most_splits = _MOST_SPLITS if share.num_groups == 1 else _CLUSTER_SPLITS
    return nvrtc.Launch(
        blocks=(Spread.num_joined, num_rows, pages.num_kv_heads * share.num_clusters),
        num_threads=32 * _TEAMS * _num_parts(pages.head_dim),
        shared=_few_bytes(pages.head_dim, most_splits),
        cluster=(Spread.num_joined, 1, 1),
    )


def _fits(share: Spread, pages: KVPages, num_rows: int, group_heads: int) -> bool:
    """Whether the kernel has so many heads, and the GPU works all rows at once."""
    if group_heads > MOST_FEW_HEADS or pages.head_dim not in FEW_PAGES:
        return False
    at = _spread_launch(share, pages, 1)
    room = nvrtc.clusters_at_once(SOURCE, _few_name(pages), at, torch.cuda.current_device())
    return num_rows * pages.num_kv_heads * share.num_clusters <= room


def _check_operands(
    pages: KVPages,
    qkv: torch.Tensor,
    out: torch.Tensor,
    block_tables: torch.Tensor,
    inv_freq: torch.Tensor,
) -> None:
    """What the kernel takes for granted."""
    assert pages.values.is_contiguous() and block_tables.is_contiguous() and qkv.is_contiguous()
    assert pages.exponents is None or pages.exponents.is_contiguous()
    assert qkv.dtype == inv_freq.dtype == torch.float32 and out.dtype == torch.bfloat16
    assert block_tables.dtype == torch.int32 and 2 * inv_freq.shape[0] <= pages.head_dim
    assert qkv.data_ptr() % 16 == 0 and pages.values.data_ptr() % 16 == 0
    assert out.stride(1) == 1 and out.stride(0) % 4 == 0 and out.data_ptr() % 8 == 0


def _num_parts(head_dim: int) -> int:
    """Warps that share positions, each with a part of the channels."""
    return -(-head_dim // _WARP_CHANNELS)


def _few_bytes(head_dim: int, num_splits: int) -> int:
    """`FewShared` of attention_few.cuh, with some to spare; behind it what the cluster sends."""
    parts = _num_parts(head_dim)
    token = 12 * head_dim + 8 * (2 * head_dim + 64) + 48 * parts
    traded = 512 * (_TEAMS * parts if parts > 1 else 1)
    left = _TEAMS * (32 + 512 + 64) + _CLUSTER_SPLITS * 64
    return token + traded + left + 64 + num_splits * _WARPS * (64 + 2 * head_dim)


def _shared_bytes(head_dim: int, group_heads: int, num_splits: int) -> int:
    """`Shared` of attention.cu, with some to spare, and behind it the scores that two warps trade
    and the sums of warps, of a turn's heads, and of splits.
    """
    eights, parts = 1 if group_heads <= 8 else 2, _num_parts(head_dim)
    queries = eights * 8 * (2 * head_dim + 64)
    stats = (_WARPS * parts + _MOST_SPLITS) * eights * 8 * 8 + parts * eights * 8 * 4
    scores = 2 * _WARPS * parts * eights * 32 * 16 if parts > 1 else 0
    fixed = 8 * head_dim + queries + 4 * head_dim + 16 * parts + stats + 64 + scores
    of_a_turn = -(-group_heads // parts)
    return fixed + (_WARPS * of_a_turn + num_splits * group_heads) * head_dim * 4
