"""Products of tokens with their own experts' weights in Triton, each weight read once a tile of
pairs, and the weighted sum of a token's products.

Weights are the rows of the matrix product and pairs its columns, in steps of one tile of 128
columns of the weight, so that the arithmetic of a pair depends on no other one.
Legend: T tokens, K experts of a token, C channels, O outputs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from tilewright.compiler.targets.cuda.kernels.common.launch import (
    block_of,
    chained,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.kernels.elementwise.norm import rounded
from tilewright.compiler.targets.cuda.kernels.experts.route_triton import Groups
from tilewright.compiler.targets.cuda.kernels.matmul.dequantise import words_of
from tilewright.compiler.targets.cuda.kernels.matmul.linear_triton import (
    product,
    tile_columns,
    tile_weights,
)
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_ROWS, HeldWeight

_TUNING = tuning()["experts"]["triton"]
FEW_PAIRS: int = _TUNING["few_pairs"]
"""Pairs of a tile in decode steps: the least that tensor cores take well."""
MANY_PAIRS: int = _TUNING["many_pairs"]
"""Pairs of a tile in prompts: measured faster on an H200 than fewer, however few an expert has."""
MOST_PAIRS: int = _TUNING["most_pairs"]
"""Pairs of a tile of bfloat16 weights where experts have :data:`MANY_PAIRS` or more each in the
mean, padding included: faster from there on, as the L2 keeps up with programs of that size.
"""
_MAX_BLOCK = 1024


@dataclass(frozen=True, slots=True)
class Tiling:
    """What a program takes: rows of the weight, and columns a step where the copy engine fetches
    them (0: it does not, and steps are whole tiles); its warps and its steps in flight.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int


@triton.jit
def _tile(tiles_ptr, num_tiles):
    """A program's expert and its first pair and last, in the order of pairs."""
    # All three at once: each would be a way to memory and back before a weight is asked for.
    expert = tl.load(tiles_ptr + tl.program_id(1))
    first = tl.load(tiles_ptr + num_tiles + tl.program_id(1))
    last = tl.load(tiles_ptr + 2 * num_tiles + tl.program_id(1))
    return expert, first, last


@triton.jit
def _store_pairs(
    out_ptr, sums, token, choice, is_pair, first_row, num_rows, out_stride, out_each,
    ROWS: tl.constexpr, PAIRS: tl.constexpr, SWIGLU: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """``sums [ROWS, PAIRS]`` of rows from ``first_row`` on, or what gate and up among them make."""
    if SWIGLU:
        # Row 16 p + 8 s + g to [p, g, pair, s]: gate and up of a place side by side.
        sides = tl.permute(sums.reshape(ROWS // 16, 2, 8, PAIRS), (0, 2, 3, 1))
        gate, up = tl.split(sides)
        y = (gate * tl.sigmoid(gate) * up).reshape(ROWS // 2, PAIRS)
        place = first_row // 2 + tl.arange(0, ROWS // 2)
    else:
        y = sums
        place = first_row + tl.arange(0, ROWS)
    target = out_ptr + token[None, :] * out_stride + choice[None, :] * out_each + place[:, None]
    y = rounded(y, out_ptr.dtype.element_ty, CHAINED)
    tl.store(target, y, mask=(place < num_rows)[:, None] & is_pair[None, :])


@triton.jit
def _expert_linear_kernel(
    out_ptr, x_ptr, data_ptr, words_ptr, order_ptr, tiles_ptr,
    num_rows, num_columns, row_tiles, all_row_tiles, num_tiles, top_k,
    out_stride, out_each, x_stride, x_each, scale,
    KIND: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr,
    SWIGLU: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Program (i, n): rows i of the expert of tile n. An expert's rows begin a tile of their own;
    those behind its last one are computed and not stored.
    """
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    expert, first, last = _tile(tiles_ptr, num_tiles)
    if expert >= 0:
        place = first + tl.arange(0, PAIRS)
        is_pair = place < last
        pair = tl.load(order_ptr + place, mask=is_pair, other=0)
        token, choice = (pair // top_k).to(tl.int64), pair % top_k
        x_rows = x_ptr + token[None, :] * x_stride + choice[None, :] * x_each
        row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
        held_row = expert * row_tiles * 16 + row
        order = tile_columns(KIND == "bfp4")
        sums = tl.zeros((ROWS, PAIRS), tl.float32)
        for step in range(STEPS):
            column = step * 128 + order[:, None]
            inside = (column < num_columns) & is_pair[None, :]
            x = tl.load(x_rows + column, mask=inside, other=0.0)
            weights = tile_weights(data_ptr, words_ptr, held_row, step, all_row_tiles, STEPS, KIND)
            sums = product(weights, x, sums, CHAINED)
        _store_pairs(
            out_ptr, sums * scale, token, choice, is_pair, tl.program_id(0) * ROWS,
            num_rows, out_stride, out_each, ROWS, PAIRS, SWIGLU, CHAINED,
        )  # fmt: skip


@triton.jit
def _expert_linear_large_kernel(
    out_ptr, x_ptr, weights, order_ptr, tiles_ptr,
    num_rows, num_columns, held_rows, num_tiles, top_k,
    out_stride, out_each, x_stride, x_each, scale,
    STEPS: tl.constexpr, ROWS: tl.constexpr, PAIRS: tl.constexpr, COLUMNS: tl.constexpr,
    SWIGLU: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """`_expert_linear_kernel` of bfloat16 weights, which the copy engine fetches: programs large
    enough that the L2 keeps up with them. The same sums in the same order.
    """
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    expert, first, last = _tile(tiles_ptr, num_tiles)
    if expert >= 0:
        place = first + tl.arange(0, PAIRS)
        pair = tl.load(order_ptr + tl.minimum(place, last - 1))
        token, choice = (pair // top_k).to(tl.int64), pair % top_k
        x_rows = x_ptr + token[None, :] * x_stride + choice[None, :] * x_each
        row = tl.program_id(0) * ROWS
        column = tl.arange(0, COLUMNS)[:, None]
        sums = tl.zeros((ROWS, PAIRS), tl.float32)
        for step in range(STEPS):
            at = step * COLUMNS
            x = tl.load(x_rows + at + column, mask=at + column < num_columns, other=0.0)
            sums = product(weights.load([expert * held_rows + row, at]), x, sums, CHAINED)
        _store_pairs(
            out_ptr, sums * scale, token, choice, place < last, row,
            num_rows, out_stride, out_each, ROWS, PAIRS, SWIGLU, CHAINED,
        )  # fmt: skip


def expert_linear(
    out: Tensor,
    x: Tensor,
    held: HeldWeight,
    groups: Groups,
    *,
    top_k: int,
    swiglu: bool = False,
    tiling: Tiling | None = None,
) -> None:
    """``out [T, K O]``: K products of each token with its experts' weights, float32 sums.

    ``x [T, >= C]``, one for all experts of a token, or ``[T, K C]``: bfloat16, or float32, which
    makes it float32 arithmetic. ``held``: C columns, O rows an expert; with ``swiglu`` paired, and
    what is written are O of silu(gate) * up: all but the rows (less than 8) that are padding.
    ``out`` is float32 or bfloat16; nothing is written for tokens that are padding. Rows may be
    further apart than they are long. ``tiling``: another than :func:`tiling_of` has, of the same
    bits.
    """
    num_tokens, num_columns = x.shape[0], held.num_columns
    num_rows, rest = divmod(out.shape[1], top_k)
    held_rows = held.num_rows // 2 if swiglu else held.num_rows
    assert not rest and held_rows - 8 < num_rows <= held_rows and held.is_paired == swiglu
    assert out.shape[0] == num_tokens and out.stride(1) == 1 == x.stride(1)
    own = x.shape[1] == top_k * num_columns and top_k > 1
    assert own or x.shape[1] >= num_columns
    tiling = tiling or tiling_of(held, groups.tile_size, x.dtype)
    num_tiles = groups.tiles.shape[1]
    grid = (triton.cdiv(held.num_row_tiles * TILE_ROWS, tiling.rows), num_tiles)
    strides = out.stride(0), num_rows, x.stride(0), num_columns if own else 0
    sizes = {"ROWS": tiling.rows, "PAIRS": groups.tile_size, "SWIGLU": swiglu}
    sizes |= {"num_warps": tiling.num_warps, "num_stages": tiling.num_stages, **chained(out)}
    if tiling.columns:
        assert held.kind == "bf16"
        block = [tiling.rows, tiling.columns]
        _expert_linear_large_kernel[grid](
            out, x, TensorDescriptor.from_tensor(held.data, block), groups.order, groups.tiles,
            num_rows, num_columns, held.num_row_tiles * TILE_ROWS, num_tiles, top_k,
            *strides, held.scale,
            STEPS=held.data.shape[1] // tiling.columns, COLUMNS=tiling.columns, **sizes,
        )  # fmt: skip
        return
    _expert_linear_kernel[grid](
        out, x, held.data, None if held.kind == "bf16" else words_of(held),
        groups.order, groups.tiles,
        num_rows, num_columns, held.num_row_tiles, held.num_experts * held.num_row_tiles,
        num_tiles, top_k, *strides, held.scale,
        KIND=held.kind, STEPS=held.num_column_tiles, **sizes,
    )  # fmt: skip


def tiling_of(held: HeldWeight, tile_size: int, operand: torch.dtype) -> Tiling:
    """How a product with tiles of so many pairs goes: as it was measured fast on an H200."""
    if tile_size == FEW_PAIRS:
        name = "few"
    elif held.kind != "bf16":
        name = "blocks"
    elif tile_size == MOST_PAIRS and operand == torch.bfloat16:
        name = "most"
    else:
        name = "many_long" if held.num_column_tiles >= 8 else "many"
    return Tiling(*_TUNING["tilings"][name])


@triton.jit
def _sum_experts_kernel(
    out_ptr, products_ptr, weights_ptr, experts_ptr, shared_ptr, gate_ptr,
    width, out_stride, products_stride, shared_stride, gate_stride,
    K: tl.constexpr, RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
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
    """``out [T, C]``: the K products ``[T, K C]`` of each token times ``weights [T, K]``, summed;
    all float32, but the products maybe bfloat16.

    ``experts [T, K]`` int32: below 0, the product is not there. ``shared``: ``[T, C]`` and its gate
    ``[T, 1]``, of which ``shared * sigmoid(gate)`` is added; ``residual``: what ``out`` holds too.
    Rows may be further apart than they are long.
    """
    num_tokens, width = out.shape
    top_k = weights.shape[1]
    assert products.shape == (num_tokens, top_k * width) and out.stride(1) == 1
    assert products.stride(1) == 1 and weights.is_contiguous() and experts.is_contiguous()
    y, gate = shared or (None, None)
    assert y is None or (y.shape == out.shape and y.stride(1) == 1)
    block = min(_MAX_BLOCK, block_of(width))
    _sum_experts_kernel[(num_tokens, triton.cdiv(width, block))](
        out, products, weights, experts, y, gate,
        width, out.stride(0), products.stride(0),
        0 if y is None else y.stride(0), 0 if gate is None else gate.stride(0),
        K=top_k, RESIDUAL=residual, BLOCK=block, **chained(out),
    )  # fmt: skip
