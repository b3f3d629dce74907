"""Exact rows from a weight in code tiles, in Triton: embeddings and dense matmuls."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common.launch import (
    cdiv,
    chained,
    release_dependents,
    wait_for_inputs,
)
from tilewright.compiler.targets.cuda.kernels.elementwise.norm import rounded
from tilewright.compiler.targets.cuda.kernels.matmul.coded_values import (
    CodedWeight,
    code_values,
    codes_of,
    layout_of,
    numbers,
    scales_of,
    typed_views,
)
from tilewright.compiler.targets.cuda.weights.coded_tiles import CODEBOOKS, CODED_TILES
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_ROWS, PackedWeight


@triton.jit
def _decode_kernel(
    out_ptr,
    rows_ptr,
    data_ptr,
    words_ptr,
    halves_ptr,
    half_words_ptr,
    floats_ptr,
    values_ptr,
    second_scales_ptr,
    num_lines,
    num_columns,
    num_steps,
    out_stride,
    LINES: tl.constexpr,
    LAYOUT: tl.constexpr,
    CHAINED: tl.constexpr,
):
    release_dependents(CHAINED)
    wait_for_inputs(CHAINED)
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)[:, None]
    step, column = tl.program_id(1), tl.arange(0, 128)[None, :]
    feature = line if rows_ptr is None else tl.load(rows_ptr + line).to(tl.int64)
    source, lane = (feature // 16 * num_steps + step) * LAYOUT.num_bytes, feature % 16
    weight = CodedWeight(data_ptr, words_ptr, halves_ptr, half_words_ptr, floats_ptr, values_ptr)
    codes = codes_of(weight, source, lane, column, LAYOUT)
    group, factors = column // LAYOUT.group * 16 + lane, 1.0
    if LAYOUT.factor:
        factors = numbers(weight, source + LAYOUT.factors, lane, LAYOUT.factor)
    scales = scales_of(weight, source + LAYOUT.scales, group, factors, LAYOUT)
    if second_scales_ptr is not None:
        scales = (scales.to(tl.float64) * tl.load(second_scales_ptr + feature)).to(tl.float32)
    values = code_values(codes, values_ptr, LAYOUT) * scales
    if LAYOUT.has_minimums:
        if LAYOUT.factor:
            factors = numbers(weight, source + LAYOUT.minima_factors, lane, LAYOUT.factor)
        minima = scales_of(weight, source + LAYOUT.minima, group, factors, LAYOUT)
        values += -minima if LAYOUT.subtracts else minima
    column += step * 128
    values = rounded(values, out_ptr.dtype.element_ty, CHAINED)
    inside = (line < num_lines) & (column < num_columns)
    tl.store(out_ptr + line * out_stride + column, values, mask=inside)


@functools.cache
def _codebook(format_name: str, device: torch.device) -> Tensor:
    """Return a codebook's float32 values. A captured launch cannot copy from the host."""
    return torch.tensor(CODEBOOKS[format_name], device=device)


def decode_rows(out: Tensor, weight: PackedWeight, rows: Tensor | None = None) -> None:
    """Write some rows, or all rows, to ``out [R, K]``, float32 or bfloat16.

    Float32 values are exact. ``rows`` are int64 below ``weight.num_rows``.
    """
    assert out.shape[1] == weight.num_columns and out.stride(1) == 1
    assert len(out) == (weight.num_rows if rows is None else len(rows))
    data, tile = weight.data, CODED_TILES[weight.format]
    values = _codebook(weight.format, data.device) if weight.format in CODEBOOKS else None
    lines = TILE_ROWS if rows is None else 1
    _decode_kernel[(cdiv(len(out), lines), weight.num_column_tiles)](
        out,
        rows,
        *typed_views(data),
        values,
        weight.second_scales,
        len(out),
        weight.num_columns,
        weight.num_column_tiles,
        out.stride(0),
        LINES=lines,
        LAYOUT=layout_of(tile),
        num_warps=4,
        **chained(out),
    )
