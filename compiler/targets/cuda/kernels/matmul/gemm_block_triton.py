"""Matmul for 17 to 64 tokens with a block-format weight in Triton, for GPUs without CUDA C++.

A program decodes a tile once for all tokens. Asynchronous copies to shared memory fetch the next
steps. Small weights have a program for each K split. The last program adds all splits in order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common.launch import (
    block_of,
    capability_of,
    cdiv,
    chained,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.kernels.matmul.coded_values import weights
from tilewright.compiler.targets.cuda.kernels.matmul.dequantise import words_of
from tilewright.compiler.targets.cuda.kernels.matmul.gemv_triton import (
    Operand,
    OutputMatrix,
    check_operands,
    product,
    store_rows,
)
from tilewright.compiler.targets.cuda.kernels.matmul.tile_pairs import layout_of, vector_pairs
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.e4m3 import MAX_BLOCK_TOKENS
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_COLUMNS, PackedWeight

_TUNING = tuning()["matmul"]["block_triton"]
MAX_TOKENS = MAX_BLOCK_TOKENS


class SplitScratch(NamedTuple):
    """Buffers for K splits. Consecutive launches on a stream may share them.

    Attributes:
        partial: Sums of splits, fp32.
        arrived: Finished splits, int32. Zero between launches.
    """

    partial: Tensor
    arrived: Tensor


@triton.jit
def _rows_of(first, second, exponents, LAYOUT: tl.constexpr, CHAINED: tl.constexpr):
    """Return bfloat16 ``[R, 128]`` with ascending columns from words ``[R, 16]``."""
    FORMAT: tl.constexpr = LAYOUT.name
    if LAYOUT.vectors == 2:
        pairs = tl.join(
            vector_pairs(first, exponents, 0, 0, FORMAT, CHAINED),
            vector_pairs(second, exponents, 16, 16, FORMAT, CHAINED),
        )
    else:
        pairs = vector_pairs(first, exponents, 0, 16, FORMAT, CHAINED)
    R: tl.constexpr = first.shape[0]
    pairs = pairs.reshape(R, 4, 2, 2, 2, 2)
    if LAYOUT.vectors == 2:
        pairs = tl.permute(pairs, (0, 5, 1, 4, 2, 3))
    else:
        pairs = tl.permute(pairs, (0, 5, 1, 2, 4, 3))
    return weights(pairs.reshape(R, 64))


@triton.jit
def _split_sums(
    words_ptr,
    x,
    tile,
    num_steps,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    CHAINED: tl.constexpr,
):
    """Return this program's float32 ``[ROWS, TOKENS]``. ``tile [ROWS]``: tile numbers."""
    index = tl.arange(0, ROWS)
    side, group = index % 16 // 8, index % 8
    base = words_ptr + tile.to(tl.int64)[:, None] * num_steps * LAYOUT.tile
    words = base + (side * 128 + group * 16)[:, None] + tl.arange(0, 16)[None, :]
    exponents = base + LAYOUT.exponents + (group * LAYOUT.lanes)[:, None]
    exponents += tl.arange(0, LAYOUT.lanes)[None, :]
    shift = (8 * side)[:, None]
    column = tl.arange(0, 128)[None, :]
    own, mask = x.ptr[:, None] + column, x.is_token[:, None]
    begin = tl.program_id(1) * num_steps // tl.num_programs(1)
    end = (tl.program_id(1) + 1) * num_steps // tl.num_programs(1)
    sums = tl.zeros((x.ptr.shape[0], ROWS), tl.float32)
    for step in tl.range(begin, end, num_stages=STAGES):
        inside = mask if IS_EVEN else mask & (step * 128 + column < x.num_columns)
        tokens = tl.load(own + step * 128, mask=inside, other=0.0)
        first = tl.load(words + step * LAYOUT.tile)
        second = tl.load(words + (step * LAYOUT.tile + 256)) if LAYOUT.vectors == 2 else first
        factors = tl.load(exponents + step * LAYOUT.tile) >> shift
        rows = _rows_of(first, second, factors, LAYOUT, CHAINED)
        sums = product(tokens, tl.trans(rows), sums, CHAINED)
    return tl.trans(sums)


@triton.jit
def _gemm_block_kernel(
    out_ptr,
    x_ptr,
    words_ptr,
    bias_ptr,
    partial_ptr,
    arrived_ptr,
    num_tokens,
    num_rows,
    num_columns,
    num_steps,
    out_stride,
    x_stride,
    scale,
    LAYOUT: tl.constexpr,
    ROWS: tl.constexpr,
    TOKENS: tl.constexpr,
    SPLITS: tl.constexpr,
    STAGES: tl.constexpr,
    IS_EVEN: tl.constexpr,
    RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    index = tl.arange(0, ROWS)[:, None]
    feature = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    x = Operand(x_ptr + token.to(tl.int64) * x_stride, token < num_tokens, num_columns)
    # Features past the last tile repeat it. They are not stored.
    tile = tl.minimum(feature // 16, (num_rows - 1) // 16)
    wait_for_inputs(CHAINED)
    sums = _split_sums(words_ptr, x, tile, num_steps, LAYOUT, ROWS, STAGES, IS_EVEN, CHAINED)
    sums *= scale
    out = OutputMatrix(out_ptr, out_stride, num_tokens, num_rows)
    if SPLITS == 1:
        store_rows(out, bias_ptr, sums, feature, token, ROWS, TOKENS, RESIDUAL, SWIGLU, CHAINED)
    else:
        block = tl.program_id(0)
        own = partial_ptr + block * (SPLITS * ROWS * TOKENS)
        own += index * TOKENS + token[None, :]
        tl.store(own + tl.program_id(1) * (ROWS * TOKENS), sums)
        # All stores of this program must precede its arrival.
        tl.debug_barrier()
        before = tl.atomic_add(arrived_ptr + block, 1, sem="acq_rel", scope="gpu")
        if before == SPLITS - 1:
            tl.store(arrived_ptr + block, 0)
            total = tl.load(own, cache_modifier=".cg")
            for split in tl.static_range(1, SPLITS):
                total += tl.load(own + split * (ROWS * TOKENS), cache_modifier=".cg")
            store_rows(
                out, bias_ptr, total, feature, token, ROWS, TOKENS, RESIDUAL, SWIGLU, CHAINED
            )


class BlockTiling(NamedTuple):
    """Tile sizes of a launch: weight rows of a program, steps in flight, and K splits."""

    rows: int
    stages: int
    splits: int


def tiling_of(num_rows: int, *, has_wgmma: bool) -> BlockTiling:
    """Return the tile sizes for a weight. They do not depend on tokens."""
    name = "large" if num_rows >= _TUNING["min_large_rows"] else "small"
    rows, stages = _TUNING[name if has_wgmma else "plain"]
    splits = min(_TUNING["max_splits"], _TUNING["programs"] // cdiv(num_rows, rows))
    return BlockTiling(rows, stages, 1 << (max(1, splits).bit_length() - 1))


def split_scratch(device: torch.device) -> SplitScratch:
    """Allocate buffers for the splits of any weight."""
    programs = _TUNING["programs"]
    rows = max(_TUNING[name][0] for name in ("small", "large", "plain"))
    partial = torch.empty(programs * rows * MAX_TOKENS, device=device)
    return SplitScratch(partial, torch.zeros(programs, dtype=torch.int32, device=device))


def linear(
    out: Tensor,
    x: Tensor,
    packed: PackedWeight,
    scratch: SplitScratch,
    *,
    bias: Tensor | None = None,
    residual: bool = False,
    swiglu: bool = False,
) -> None:
    """Compute `gemv_triton.linear` for more tokens."""
    num_tokens, num_rows = x.shape[0], packed.num_rows
    check_operands(out, x, packed, residual=residual, swiglu=swiglu)
    assert num_tokens <= MAX_TOKENS
    # `wgmma` has 64 rows at least: tokens. Its second operand is in shared memory.
    has_wgmma = out.is_cuda and capability_of(out.device) >= (9, 0)
    tiling = tiling_of(num_rows, has_wgmma=has_wgmma)
    _gemm_block_kernel[(cdiv(num_rows, tiling.rows), tiling.splits)](
        out,
        x,
        words_of(packed),
        bias,
        *(scratch.partial, scratch.arrived, num_tokens, num_rows, packed.num_columns),
        *(packed.num_column_tiles, out.stride(0), x.stride(0), packed.scale),
        LAYOUT=layout_of(packed.format),
        ROWS=tiling.rows,
        TOKENS=MAX_TOKENS if has_wgmma else block_of(num_tokens),
        SPLITS=tiling.splits,
        STAGES=tiling.stages,
        IS_EVEN=packed.num_columns % TILE_COLUMNS == 0,
        RESIDUAL=residual,
        SWIGLU=swiglu,
        num_warps=4,
        num_stages=tiling.stages,
        **chained(out),
    )
