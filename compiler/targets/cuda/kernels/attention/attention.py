"""Launcher for ``attention.cu``: decode attention over bf16 and bfp8 pages at common head sizes.

Makes a launch from a KV split. Excludes the operands' source. Shape letters: B rows, H query
heads, G key/value heads, D head size, S slots, M pages of a slot.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch

from tilewright.compiler.targets.cuda.kernels.attention.decode_triton import DecodeScratch
from tilewright.compiler.targets.cuda.kernels.attention.split import (
    CLUSTER_SPLITS,
    MOST_SPLITS,
    SHORT_PAGES,
    SPREAD_PAGES,
    SplitKV,
    Spread,
    choose_share,
    num_parts,
)
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.launch import LOG2_E
from tilewright.compiler.targets.cuda.state.pages import KVPages

HEAD_DIMS = (64, 96, 128, 256)
MAX_GROUP_HEADS = 16
"""Maximum number of query heads for a key/value head."""

MAX_SPREAD_HEADS = 8
"""Maximum number of query heads for a key/value head in the kernel with clusters of sixteen
blocks.
"""

_WARPS = 4
_TEAMS = 8


class _AttentionParams(ctypes.Structure):
    """Mirror of `Attend` in attention.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("qkv", "out", "positions", "slots", "tables")),
        *((name, ctypes.c_void_p) for name in ("inv_freq", "values", "exponents")),
        *((name, ctypes.c_void_p) for name in ("partial", "peaks", "totals", "arrived")),
        *((name, ctypes.c_int) for name in ("table_width", "out_stride", "group_heads")),
        *((name, ctypes.c_int) for name in ("num_kv_heads", "half", "window", "interleaved")),
        *((name, ctypes.c_int) for name in ("early", "num_groups", "num_joined")),
        *((name, ctypes.c_int) for name in ("group_splits", "short_pages")),
        *((name, ctypes.c_int) for name in ("num_places", "is_coded")),
        ("scale", ctypes.c_float),
    )


_SMALL_M_NAMES = tuple(f"attend_small_m_bf16_{d}" for d in SPREAD_PAGES)
SOURCE = nvrtc.KernelSource(
    Path(__file__).with_name("attention.cu"),
    tuple(
        f"{way}_{kind}_{d}_{n}"
        for way in ("attend", "walk")
        for kind in ("bf16", "bfp8")
        for d in HEAD_DIMS
        for n in (1, 2)
    )
    + _SMALL_M_NAMES,
    headers=(
        "primitives.cuh",
        "arrange.cuh",
        "attention_primitives.cuh",
        "attention_pages.cuh",
        "attention_bfp8.cuh",
        "attention_tiles.cuh",
        "attention_small_m.cuh",
    ),
    structures=(("Attend", _AttentionParams),),
    large_clusters=_SMALL_M_NAMES,
)


@dataclass(frozen=True, slots=True)
class ArrangedOutput:
    """Memory for attention's result as the next matmul's x.

    Attributes:
        data: From :func:`.gemm_block.scratch`.
        num_places: See :func:`.gemm_block.num_places`.
        is_coded: Whether the weight has tiles of codes.
    """

    data: torch.Tensor
    num_places: int
    is_coded: bool


def attend_decode(
    pages: KVPages,
    qkv: torch.Tensor,
    *,
    out: torch.Tensor | ArrangedOutput,
    positions: torch.Tensor,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    inv_freq: torch.Tensor,
    num_heads: int,
    scale: float,
    window: int = 0,
    interleaved: bool = False,
    scratch: DecodeScratch,
    early: bool = False,
    share: SplitKV | Spread | None = None,
) -> None:
    """Run decode attention with the arguments of :func:`.decode_triton.attend_decode`.

    `.table.why_no_cpp` names unsupported operands. A tensor ``out`` must be bf16 with rows aligned
    to 8 bytes. Matmuls over bfp8 use float16: a block 2^20 times smaller than its neighbors becomes
    0.

    Args:
        share: The KV split. A :class:`Spread` that does not fit the GPU becomes a :class:`SplitKV`
            with the same bits. None: `choose_share`.
    """
    num_rows, heads = qkv.shape[0], num_heads // pages.num_kv_heads
    if share is None or (isinstance(share, Spread) and not _fits(share, pages, num_rows, heads)):
        # One group implies a short context, regardless of the table's width.
        num_pages = SHORT_PAGES if share and share.num_groups == 1 else block_tables.shape[1]
        share = choose_share(num_rows, pages.num_kv_heads, num_pages, pages.head_dim)
    _check_operands(pages, qkv, (positions, slots, block_tables), inv_freq)
    parts = num_rows * num_heads * share.num_groups if share.num_groups > 1 else 0
    assert scratch.peaks.numel() >= parts and scratch.partial.numel() >= parts * pages.head_dim
    arguments = _AttentionParams(
        **_output(out, num_rows, num_heads * pages.head_dim),
        **_page_arguments(pages, block_tables),
        qkv=qkv.data_ptr(),
        positions=positions.data_ptr(),
        slots=slots.data_ptr(),
        **_rotation(inv_freq, interleaved),
        partial=scratch.partial.data_ptr(),
        peaks=scratch.peaks.data_ptr(),
        totals=scratch.totals.data_ptr(),
        arrived=scratch.arrived.data_ptr(),
        group_heads=heads,
        window=window,
        early=early,
        **_splits(share),
        scale=scale * LOG2_E,
    )
    _launch(pages, arguments, num_rows, share)


def _output(out: torch.Tensor | ArrangedOutput, num_rows: int, num_columns: int) -> dict[str, int]:
    """Return the output's fields."""
    if isinstance(out, ArrangedOutput):
        assert num_rows <= out.num_places and num_columns % 128 == 0
        assert out.data.numel() >= out.num_places * num_columns * 2
        address, num_places = out.data.data_ptr(), out.num_places
        return {"out": address, "num_places": num_places, "is_coded": out.is_coded}
    assert out.dtype == torch.bfloat16 and out.data_ptr() % 8 == 0
    assert out.stride(1) == 1 and out.stride(0) % 4 == 0
    return {"out": out.data_ptr(), "out_stride": out.stride(0)}


def _splits(share: SplitKV | Spread) -> dict[str, int]:
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


def _launch(
    pages: KVPages, arguments: _AttentionParams, num_rows: int, share: SplitKV | Spread
) -> None:
    """Launch the kernel for the page format, head count and KV split."""
    if isinstance(share, Spread):
        at = _spread_launch(share, pages, num_rows)
        nvrtc.launch(SOURCE, f"attend_small_m_bf16_{pages.head_dim}", at=at, arguments=arguments)
        return
    way = "attend" if share.num_begun == share.num_groups else "walk"
    kind = _kind(pages)
    heads = arguments.group_heads
    nvrtc.launch(
        SOURCE,
        f"{way}_{kind}_{pages.head_dim}_{1 if heads <= 8 else 2}",
        at=nvrtc.Launch(
            blocks=(share.num_joined, num_rows, pages.num_kv_heads * share.num_begun),
            num_threads=32 * _WARPS * num_parts(pages.head_dim),
            shared=_shared_bytes(pages.head_dim, heads, share.group_splits),
            cluster=(share.num_joined, 1, 1),
        ),
        arguments=arguments,
    )


def _kind(pages: KVPages) -> str:
    return "bf16" if pages.exponents is None else "bfp8"


def _spread_launch(share: Spread, pages: KVPages, num_rows: int) -> nvrtc.Launch:
    most_splits = MOST_SPLITS if share.num_groups == 1 else CLUSTER_SPLITS
    return nvrtc.Launch(
        blocks=(Spread.num_joined, num_rows, pages.num_kv_heads * share.num_clusters),
        num_threads=32 * _TEAMS * num_parts(pages.head_dim),
        shared=_small_m_bytes(pages.head_dim, most_splits),
        cluster=(Spread.num_joined, 1, 1),
    )


def _fits(share: Spread, pages: KVPages, num_rows: int, group_heads: int) -> bool:
    """Return whether the kernel supports pages and heads and all clusters are resident at once."""
    if (
        group_heads > MAX_SPREAD_HEADS
        or pages.head_dim not in SPREAD_PAGES
        or pages.exponents is not None
    ):
        return False
    at, name = _spread_launch(share, pages, 1), f"attend_small_m_bf16_{pages.head_dim}"
    room = nvrtc.clusters_at_once(SOURCE, name, at, torch.cuda.current_device())
    return num_rows * pages.num_kv_heads * share.num_clusters <= room


def _check_operands(
    pages: KVPages,
    qkv: torch.Tensor,
    where: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    inv_freq: torch.Tensor,
) -> None:
    """Check the kernel's assumptions. ``where`` has positions, slots and tables."""
    positions, slots, block_tables = where
    assert positions.dtype == slots.dtype == torch.int64
    assert pages.values.is_contiguous() and block_tables.is_contiguous() and qkv.is_contiguous()
    assert pages.exponents is None or pages.exponents.is_contiguous()
    assert qkv.dtype == inv_freq.dtype == torch.float32
    assert block_tables.dtype == torch.int32 and 2 * inv_freq.shape[0] <= pages.head_dim
    assert qkv.data_ptr() % 16 == 0 and pages.values.data_ptr() % 16 == 0


def _small_m_bytes(head_dim: int, num_splits: int) -> int:
    """Return the size of `SpreadShared` in attention_small_m.cuh with the cluster's messages,
    rounded up.
    """
    parts = num_parts(head_dim)
    token = 12 * head_dim + 8 * (2 * head_dim + 64) + 48 * parts
    traded = 512 * (_TEAMS * parts if parts > 1 else 1)
    left = _TEAMS * (32 + 512 + 64) + CLUSTER_SPLITS * 64
    return token + traded + left + 64 + num_splits * _WARPS * (64 + 2 * head_dim)


def _shared_bytes(head_dim: int, group_heads: int, num_splits: int) -> int:
    """Return the size of `Shared` in attention.cu, rounded up, with the buffers after it.

    The buffers are the scores that two warps exchange and the sums of warps and splits.
    """
    eights, parts = 1 if group_heads <= 8 else 2, num_parts(head_dim)
    queries = eights * 8 * (2 * head_dim + 64)
    stats = (_WARPS * parts + MOST_SPLITS) * eights * 8 * 8 + parts * eights * 8 * 4
    scores = 2 * _WARPS * parts * eights * 32 * 16 if parts > 1 else 0
    fixed = 8 * head_dim + queries + 4 * head_dim + 16 * parts + stats + 64 + scores
    of_a_turn = -(-group_heads // parts)
    return fixed + (_WARPS * of_a_turn + num_splits * group_heads) * head_dim * 4
