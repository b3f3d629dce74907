# mypy: allow-untyped-defs, allow-incomplete-defs
"""Matrix unit sums over all of K in Triton integer arithmetic, bit for bit.

The source also runs in Triton's interpreter on a CPU. Excludes formats.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tilewright.compiler.targets.tenstorrent.emulate.strided_weight import StridedWeight

_INFINITY = tl.constexpr(0x7F800000)
_SIGN = tl.constexpr(-(2**31))
MOST_ROWS, COLUMNS = 4, 32  # A Triton program's tile. A warp computes 32 columns in a row.
_NAN = tl.constexpr(0x7FC00000)
_FAR = tl.constexpr(30)  # a larger alignment shifts all bits out


@triton.jit
def _aligned(value, shift):
    """Shift right and round halves up."""
    shift = tl.minimum(shift, _FAR)
    return (value + ((1 << shift) >> 1)) >> shift


@triton.jit
def _encoded(total, bits, shift):
    """Add ``shift`` to the exponent in ``bits``. Underflow gives zero, overflow gives infinity."""
    exponent = ((bits >> 23) & 255) + shift
    finite = (bits + (shift << 23)) & 0x7FFFFFFF
    kept = tl.where(exponent >= 255, _INFINITY, finite) | (total & _SIGN)
    return tl.where((exponent <= 0) | (total == 0), 0, kept)


@triton.jit
def _accumulated(dst, exponent0, sum0, exponent1, sum1, FP32: tl.constexpr):
    """Return Dst's bits after adding two sums of products in units of 2 ** (exponent - 137)."""
    dst_exponent = (dst >> 23) & 255
    largest = tl.maximum(tl.maximum(exponent0, exponent1), dst_exponent)
    fraction = tl.where(dst_exponent > 0, (dst & 0x7FFFFF) | 0x800000, 0)
    fraction = _aligned(fraction if FP32 else fraction >> 13, largest - dst_exponent)
    total = tl.where(dst < 0, -fraction, fraction)
    sum0 = _aligned(sum0 << 13, largest - exponent0)
    sum1 = _aligned(sum1 << 13, largest - exponent1)
    if FP32:
        total += sum0 + sum1
        magnitude = tl.abs(total)
        # An additional low bit of 1 turns rounding to even into rounding halves away from zero.
        more = (magnitude >= (1 << 24)).to(tl.int32)
        bits = ((magnitude << more) | more).to(tl.float32).to(tl.int32, bitcast=True)
        shift = largest - 150 - more
        if FP32 == 2:  # Wormhole's leading-sign count treats -1 as 28 bits
            shift = tl.where(total == -1, largest + (4 - 127), shift)
        return _encoded(total, bits, shift)
    # The hardware rounds both alignments in sequence.
    total += ((sum0 + 4096) >> 13) + ((sum1 + 4096) >> 13)
    bits = total.to(tl.float32).to(tl.int32, bitcast=True)
    return _encoded(total, (bits + 0x8000) & -0x10000, largest - 137)


@triton.jit
def _added_in_l1(partial, dst, FP32: tl.constexpr):
    """Add two packed values in L1 as in `matrix_unit_tile`."""
    total = partial.to(tl.float32, bitcast=True) + dst.to(tl.float32, bitcast=True)
    bits = total.to(tl.int32, bitcast=True)
    if not FP32:
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
    bits = tl.where((bits & _INFINITY) == 0, 0, bits)
    undefined = tl.full(bits.shape, _NAN, tl.int32)
    if not FP32:
        is_nan = (partial & 0x7FFFFFFF) > _INFINITY
        infinity = tl.where((dst & _INFINITY) == _INFINITY, dst, _INFINITY)
        undefined = tl.where(is_nan, infinity, undefined)
    return tl.where(total == total, bits, undefined)


@triton.jit
def _sum_of_products(act, weight, PHASE: tl.constexpr):
    """Return exponent and sum ``[M, N]`` for groups of 8: act int32 ``[8, M, 1]``, weight ``[8, 1,
    N]``.
    """
    lost: tl.constexpr = 127 + 5 * (PHASE % 2) + 7 * (PHASE // 2)
    act_exponent, weight_exponent = (act >> 7) & 255, (weight >> 7) & 255
    if PHASE // 2 == 1:
        act_part = (act & 1) << 6
    else:
        act_part = ((act & 127) | 128) >> 1
    if PHASE % 2 == 1:
        weight_part = (weight & 7) << 2
    else:
        weight_part = ((weight & 127) | 128) >> 3
    # A zero does not affect the largest exponent, and its product is zero.
    act_part = tl.where(act_exponent > 0, tl.where(act < 0, -act_part, act_part), 0)
    weight_part = tl.where(weight_exponent > 0, tl.where(weight < 0, -weight_part, weight_part), 0)
    act_exponent = tl.where(act_exponent > 0, act_exponent, -1024)
    weight_exponent = tl.where(weight_exponent > 0, weight_exponent, -1024)
    exponents = act_exponent + weight_exponent - lost
    largest = tl.maximum(tl.max(exponents, axis=0), 0)
    products = act_part * weight_part
    magnitudes = _aligned(tl.abs(products), largest[None, :, :] - exponents)
    total = tl.sum(tl.where(products < 0, -magnitudes, magnitudes), axis=0)
    return largest, tl.where(largest > 0, total, 0)


@triton.jit
def _phase(
    dst,
    act0,
    act1,
    act2,
    act3,
    weight0,
    weight1,
    weight2,
    weight3,
    PHASE: tl.constexpr,
    FP32: tl.constexpr,
):
    """Add one fidelity phase of a tile: two halves with 16 products, each in two groups with 8."""
    exponent0, sum0 = _sum_of_products(act0, weight0, PHASE)
    exponent1, sum1 = _sum_of_products(act1, weight1, PHASE)
    dst = _accumulated(dst, exponent0, sum0, exponent1, sum1, FP32)
    exponent0, sum0 = _sum_of_products(act2, weight2, PHASE)
    exponent1, sum1 = _sum_of_products(act3, weight3, PHASE)
    return _accumulated(dst, exponent0, sum0, exponent1, sum1, FP32)


@triton.jit
def _load_group(act_ptrs, weight_ptrs, k, num_k, step_k, rows_inside, columns_inside):
    inside = (k < num_k)[:, None, None]
    act = tl.load(act_ptrs + k[:, None, None], mask=inside & rows_inside, other=0)
    at = k.to(tl.int64)[:, None, None] * step_k
    weight = tl.load(weight_ptrs + at, mask=inside & columns_inside, other=0)
    return act.to(tl.int32), weight.to(tl.int32)


@triton.jit
def _kernel(
    out_ptr,
    act_ptr,
    weight_ptr,
    offsets_ptr,
    num_rows,
    num_k,
    num_n,
    step_k,
    step_n,
    num_tiles,
    block_tiles,
    last_block,
    PHASES: tl.constexpr,
    FP32: tl.constexpr,
    RELOAD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    batch = tl.program_id(2)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    all_rows = batch.to(tl.int64) * num_rows + row
    rows_inside = (row < num_rows)[None, :, None]
    columns_inside = (column < num_n)[None, None, :]
    act_ptrs = act_ptr + (all_rows * num_k)[None, :, None]
    weight_ptrs = weight_ptr + tl.load(offsets_ptr + batch)
    weight_ptrs += (column.to(tl.int64) * step_n)[None, None, :]
    out_ptrs = out_ptr + all_rows[:, None] * num_n + column[None, :]
    inside = (row < num_rows)[:, None] & (column < num_n)[None, :]
    dst = tl.zeros((ROWS, COLUMNS), tl.int32)
    partial = dst
    if RELOAD:
        dst = tl.load(out_ptrs, mask=inside, other=0)
    lane = tl.arange(0, 8)
    for tile in range(0, num_tiles):
        if (tile > 0) & (tile % block_tiles == 0):
            partial = dst if tile == block_tiles else _added_in_l1(partial, dst, FP32)
            dst = partial if tile == last_block else tl.zeros_like(dst)
        k = tile * 32 + lane
        edge = (num_k, step_k, rows_inside, columns_inside)
        act0, weight0 = _load_group(act_ptrs, weight_ptrs, k, *edge)
        act1, weight1 = _load_group(act_ptrs, weight_ptrs, k + 8, *edge)
        act2, weight2 = _load_group(act_ptrs, weight_ptrs, k + 16, *edge)
        act3, weight3 = _load_group(act_ptrs, weight_ptrs, k + 24, *edge)
        for phase in tl.static_range(PHASES):
            dst = _phase(
                dst, act0, act1, act2, act3, weight0, weight1, weight2, weight3, phase, FP32
            )
    # A NaN loaded from L1 becomes an infinity if nothing was added to it.
    dst = tl.where((dst & _INFINITY) == _INFINITY, dst & -0x800000, dst)
    tl.store(out_ptrs, dst, mask=inside)


def accumulate(
    out: Tensor,
    act: Tensor,
    weight: StridedWeight,
    *,
    num_phases: int,
    fp32_dst: bool,
    sign_error: bool,
    block_tiles: int,
    reload: bool,
) -> None:
    """Write Dst after all of K to ``out`` on a GPU, as `matrix_unit_cpu.accumulate`."""
    dst_type = (2 if sign_error else 1) if fp32_dst else 0
    num_batches, num_rows, num_k = act.shape
    num_n, num_tiles = out.shape[-1], -(-num_k // 32)
    last_block = (num_tiles - 1) // block_tiles * block_tiles
    rows = min(MOST_ROWS, triton.next_power_of_2(num_rows))
    grid = (triton.cdiv(num_n, COLUMNS), triton.cdiv(num_rows, rows), num_batches)
    _kernel[grid](
        out.view(torch.int32),
        act.view(torch.int16),
        weight.bits,
        weight.offsets.to(act.device),
        num_rows,
        num_k,
        num_n,
        weight.step_k,
        weight.step_n,
        num_tiles,
        block_tiles,
        last_block,
        PHASES=num_phases,
        FP32=dst_type,
        RELOAD=reload,
        ROWS=rows,
        COLUMNS=COLUMNS,
        num_warps=min(rows, 4),
    )
