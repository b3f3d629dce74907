"""Triton matmuls for tokens with their experts, and the weighted sum over a token's results.

A pair tile reads a weight once. Weights are the rows of the matrix product and pairs are its
columns. A step is a tile of 128 weight columns, so a pair's bits do not depend on the batch. Shape
letters: T tokens, K experts for a token, C channels, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewright.compiler.targets.cuda.kernels.common.launch import (
    block_of,
    cdiv,
    chained,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.kernels.experts.expert_pairs import (
    PLAIN,
    ExpertEpilogue,
    ExpertOutput,
    ExpertPairs,
    Finish,
    Shared,
    pairs_at,
    store_pairs,
    tile_of,
)
from tilewright.compiler.targets.cuda.kernels.experts.experts_cut_triton import cut_linear
from tilewright.compiler.targets.cuda.kernels.experts.route_triton import Groups
from tilewright.compiler.targets.cuda.kernels.matmul.dequantise import words_of
from tilewright.compiler.targets.cuda.kernels.matmul.gemv_triton import product
from tilewright.compiler.targets.cuda.kernels.matmul.tile_weights import tile_columns, tile_weights
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_ROWS, PackedWeight

_TUNING = tuning()["experts"]["triton"]
DECODE_PAIRS: int = _TUNING["few_pairs"]
"""Pairs in a tile in decode: the minimum for tensor cores."""
SHORT_PAIRS: int = _TUNING["short_pairs"]
"""Pairs in a tile for bfloat16 weights if experts have a mean up to :data:`MAX_SHORT_MEAN`."""
MAX_SHORT_MEAN: int = _TUNING["max_short_mean"]
PREFILL_PAIRS: int = _TUNING["many_pairs"]
"""Pairs in a tile in prefill."""
MOST_PAIRS: int = _TUNING["most_pairs"]
"""Pairs in a tile for bfloat16 weights if experts have a mean of :data:`PREFILL_PAIRS` or more. The
L2 bandwidth suffices for these large programs.
"""
_MAX_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tiling:
    """Tile sizes of a program.

    Attributes:
        rows: Weight rows.
        columns: Columns in a step with TMA. 0: no TMA, steps are whole tiles.
        num_stages: Steps in flight.
        is_cut: Whether each warp has a segment of K, as in `gemv_triton`.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int
    is_cut: bool = False


@triton.jit
def _expert_linear_kernel(
    out_ptr,
    x_ptr,
    data_ptr,
    words_ptr,
    order_ptr,
    tiles_ptr,
    num_rows,
    num_columns,
    row_tiles,
    all_row_tiles,
    num_tiles,
    top_k,
    out_stride,
    out_each,
    x_stride,
    x_each,
    scale,
    bias_ptr,
    limit,
    alpha,
    KIND: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    SWIGLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Program (i, n) computes rows i of the expert of tile n.

    An expert's rows start a new tile. Rows after its last row are computed and not stored.
    """
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    expert, first, last = tile_of(tiles_ptr, num_tiles)
    if expert >= 0:
        pairs = pairs_at(order_ptr, first + tl.arange(0, PAIRS), last, top_k)
        x_rows = x_ptr + pairs.token[None, :] * x_stride + pairs.choice[None, :] * x_each
        feature = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        packed_row = expert * row_tiles * 16 + feature
        order = tile_columns(KIND == "bfp4" or KIND == "mxfp4")
        sums = tl.zeros((ROWS, PAIRS), tl.float32)
        for step in range(STEPS):
            column = step * 128 + order[:, None]
            inside = (column < num_columns) & pairs.is_pair[None, :]
            x = tl.load(x_rows + column, mask=inside, other=0.0)
            weights = tile_weights(
                data_ptr, words_ptr, packed_row, step, all_row_tiles, STEPS, KIND
            )
            sums = product(weights, x, sums, CHAINED)
        out = ExpertOutput(out_ptr, out_stride, out_each, num_rows)
        epilogue = ExpertEpilogue(bias_ptr, limit, alpha)
        first_feature, sums = tl.program_id(0) * ROWS, sums * scale
        store_pairs(
            out, sums, pairs, first_feature, epilogue, expert, ROWS, PAIRS, SWIGLU, CLAMPED, CHAINED
        )


@triton.jit
def _expert_linear_large_kernel(
    out_ptr,
    x_ptr,
    weights,
    order_ptr,
    tiles_ptr,
    num_rows,
    num_columns,
    packed_rows,
    num_tiles,
    top_k,
    out_stride,
    out_each,
    x_stride,
    x_each,
    scale,
    bias_ptr,
    limit,
    alpha,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SWIGLU: tl.constexpr,
    CLAMPED: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Compute `_expert_linear_kernel` for bfloat16 weights loaded by TMA, with the same order of
    sums.

    Programs are large enough for the L2 bandwidth.
    """
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    expert, first, last = tile_of(tiles_ptr, num_tiles)
    if expert >= 0:
        place = first + tl.arange(0, PAIRS)
        pair = tl.load(order_ptr + tl.minimum(place, last - 1))
        token, choice = (pair // top_k).to(tl.int64), pair % top_k
        x_rows = x_ptr + token[None, :] * x_stride + choice[None, :] * x_each
        feature = tl.program_id(0) * ROWS
        column = tl.arange(0, COLUMNS)[:, None]
        sums = tl.zeros((ROWS, PAIRS), tl.float32)
        for step in range(STEPS):
            at = step * COLUMNS
            x = tl.load(x_rows + at + column, mask=at + column < num_columns, other=0.0)
            sums = product(weights.load([expert * packed_rows + feature, at]), x, sums, CHAINED)
        out = ExpertOutput(out_ptr, out_stride, out_each, num_rows)
        pairs = ExpertPairs(token, choice, place < last)
        epilogue = ExpertEpilogue(bias_ptr, limit, alpha)
        sums *= scale
        store_pairs(
            out, sums, pairs, feature, epilogue, expert, ROWS, PAIRS, SWIGLU, CLAMPED, CHAINED
        )


def result_rows(out: Tensor, packed: PackedWeight, top_k: int, *, swiglu: bool) -> int:
    """Return an expert's results per pair, O in ``out [T, K O]``. The weight may have up to 7 more
    rows.
    """
    num_rows, rest = divmod(out.shape[1], top_k)
    packed_rows = packed.num_rows // 2 if swiglu else packed.num_rows
    assert not rest and packed_rows - 8 < num_rows <= packed_rows and packed.is_paired == swiglu
    return num_rows


def pair_stride(x: Tensor, packed: PackedWeight, top_k: int) -> int:
    """Return the stride between a token's pairs in ``x [T, K C]``. 0: all experts have one input,
    ``[T, >= C]``.
    """
    has_own = x.shape[1] == top_k * packed.num_columns and top_k > 1
    assert has_own or x.shape[1] >= packed.num_columns
    return packed.num_columns if has_own else 0


def expert_linear(
    out: Tensor,
    x: Tensor,
    packed: PackedWeight,
    groups: Groups,
    *,
    top_k: int,
    swiglu: bool = False,
    tiling: Tiling | None = None,
    finish: Finish = PLAIN,
    shared: Shared | None = None,
    is_early: bool = False,
    has_copy_engine: bool = False,
) -> None:
    """Multiply each token with its K experts' weights, with float32 sums.

    Padding tokens have no results.

    Args:
        out: float32 or bfloat16 ``[T, K O]`` with any row stride.
        x: bfloat16 or float32, ``[T, >= C]`` for all experts or ``[T, K C]``. float32 selects
            float32 arithmetic.
        packed: Packed weights with C columns and O rows for each expert. Up to 7 rows are padding.
        swiglu: The weight has paired gate and up rows, and the result is silu(gate) * up.
        tiling: Tile sizes. None: :func:`tiling_of`. The bits do not depend on them.
        finish: Biases, and the bound of SwiGLU.
        shared: The shared expert, for up to ``groups.tile_size`` tokens, tiled with segments.
        is_early: Read ``groups`` before the wait, after a launch with segments and these groups.
        has_copy_engine: Whether the default tile sizes may use TMA.
    """
    num_rows = result_rows(out, packed, top_k, swiglu=swiglu)
    assert out.shape[0] == x.shape[0] and out.stride(1) == 1 == x.stride(1)
    tiling = tiling or tiling_of(packed, groups.tile_size, x.dtype, has_copy_engine=has_copy_engine)
    assert packed.kind == "bf16" or not tiling.columns
    grid = (cdiv(packed.num_row_tiles * TILE_ROWS, tiling.rows), groups.tiles.shape[1])
    how: dict[str, Any] = {"num_rows": num_rows, "top_k": top_k}
    arguments = _arguments(out, x, packed, groups, **how, finish=finish)
    if tiling.is_cut:
        arguments |= {"SEGMENTS": tiling.num_warps, "STAGES": tiling.num_stages, "EARLY": is_early}
        cut_linear(grid[1], arguments, packed, shared)
        return
    assert shared is None
    sizes = {"ROWS": tiling.rows, "num_warps": tiling.num_warps, "num_stages": tiling.num_stages}
    if tiling.columns:
        _launch_copied(grid, arguments | sizes, packed, tiling)
        return
    _expert_linear_kernel[grid](
        data_ptr=packed.data,
        words_ptr=None if packed.kind == "bf16" else words_of(packed),
        row_tiles=packed.num_row_tiles,
        all_row_tiles=packed.num_experts * packed.num_row_tiles,
        KIND=packed.kind,
        STEPS=packed.num_column_tiles,
        **arguments | sizes,
    )


def _launch_copied(
    grid: tuple[int, int], arguments: dict[str, Any], packed: PackedWeight, tiling: Tiling
) -> None:
    """Launch the kernel with TMA."""
    _expert_linear_large_kernel[grid](
        weights=TensorDescriptor.from_tensor(packed.data, [tiling.rows, tiling.columns]),
        packed_rows=packed.num_row_tiles * TILE_ROWS,
        STEPS=packed.data.shape[1] // tiling.columns,
        COLUMNS=tiling.columns,
        **arguments,
    )


def _arguments(
    out: Tensor,
    x: Tensor,
    packed: PackedWeight,
    groups: Groups,
    *,
    num_rows: int,
    top_k: int,
    finish: Finish,
) -> dict[str, Any]:
    """Return the arguments of all kernels: operands, strides and epilogue."""
    swiglu = packed.is_paired
    bias, limit, alpha = finish.checked(packed.num_experts * num_rows, swiglu=swiglu)
    operands = {"out_ptr": out, "x_ptr": x, "order_ptr": groups.order, "tiles_ptr": groups.tiles}
    return {
        **operands,
        "num_rows": num_rows,
        "num_columns": packed.num_columns,
        "num_tiles": groups.tiles.shape[1],
        "top_k": top_k,
        "out_stride": out.stride(0),
        "out_each": num_rows,
        "x_stride": x.stride(0),
        "x_each": pair_stride(x, packed, top_k),
        "scale": packed.scale,
        "bias_ptr": bias,
        "limit": limit,
        "alpha": alpha,
        "PAIRS": groups.tile_size,
        "SWIGLU": swiglu,
        "CLAMPED": finish.limit > 0,
        **chained(out),
    }


def tiling_of(
    packed: PackedWeight, tile_size: int, operand: torch.dtype, *, has_copy_engine: bool
) -> Tiling:
    """Return the tile sizes for a matmul, tuned on an H200."""
    is_long, is_bf16 = packed.num_column_tiles >= 8, operand == torch.bfloat16
    if tile_size == DECODE_PAIRS:
        small = "cut" if packed.kind == "bf16" else "cut_blocks"
        name = "exact" if operand == torch.float32 else "cut_long" if is_long else small
    elif packed.kind != "bf16":
        name = "blocks"
    elif tile_size == MOST_PAIRS and is_bf16:
        name = "most"
    elif has_copy_engine and is_bf16:
        name = "copied_long" if is_long else "copied"
    else:
        name = "many_long" if is_long else "many"
    return Tiling(*_TUNING["tilings"][name])


@triton.jit
def _sum_experts_kernel(
    out_ptr,
    products_ptr,
    weights_ptr,
    experts_ptr,
    shared_ptr,
    gate_ptr,
    width,
    out_stride,
    products_stride,
    shared_stride,
    gate_stride,
    K: tl.constexpr,
    RESIDUAL: tl.constexpr,
    BLOCK: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    token = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < width
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(K):
        has = tl.load(experts_ptr + token * K + choice) >= 0
        weight = tl.load(weights_ptr + token * K + choice)
        at = products_ptr + token * products_stride + choice * width + channel
        y = tl.load(at, mask=inside & has, other=0.0).to(tl.float32)
        total += tl.where(has, weight, 0.0) * y
    if shared_ptr is not None:
        gate = tl.load(gate_ptr + token * gate_stride)
        shared = tl.load(shared_ptr + token * shared_stride + channel, mask=inside, other=0.0)
        total += shared * tl.sigmoid(gate)
    target = out_ptr + token * out_stride + channel
    if RESIDUAL:
        total += tl.load(target, mask=inside, other=0.0)
    tl.store(target, total, mask=inside)


def sum_experts(
    out: Tensor,
    products: Tensor,
    weights: Tensor,
    experts: Tensor,
    *,
    residual: bool,
    shared: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Add the K results of each token times their weights.

    Args:
        out: float32 ``[T, C]`` with any row stride.
        products: Results, float32 or bfloat16 ``[T, K C]``.
        weights: float32 ``[T, K]``.
        experts: int32 ``[T, K]``. Negative: the result is absent.
        residual: Add to the values in ``out``.
        shared: Result ``[T, C]`` and gate ``[T, 1]`` of the shared expert. Adds ``shared *
            sigmoid(gate)``.
    """
    num_tokens, width = out.shape
    top_k = weights.shape[1]
    assert products.shape == (num_tokens, top_k * width) and out.stride(1) == 1
    assert products.stride(1) == 1 and weights.is_contiguous() and experts.is_contiguous()
    y, gate = shared or (None, None)
    assert y is None or (y.shape == out.shape and y.stride(1) == 1)
    block = min(_MAX_BLOCK, block_of(width))
    _sum_experts_kernel[(num_tokens, cdiv(width, block))](
        out,
        products,
        weights,
        experts,
        y,
        gate,
        width,
        out.stride(0),
        products.stride(0),
        0 if y is None else y.stride(0),
        0 if gate is None else gate.stride(0),
        K=top_k,
        RESIDUAL=residual,
        BLOCK=block,
        **chained(out),
    )
