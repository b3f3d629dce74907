# mypy: allow-untyped-defs, allow-incomplete-defs
"""Matrix unit arithmetic on one tile of K, bit for bit, compiled by numba.

A float32 sum's last place equals the hardware's alignment grid. Operands with extreme exponents are
summed in integers. Excludes tensors, threads and formats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

LANES = 64  # columns in a decoded weight tile
TILE = 32  # elements along K
GROUP = 8  # products with a common exponent

# A product has 12 bits and a sum of 8 products has 16. If the anchor is near `1.5 * 2 ** 23` grids,
# every float32 addition rounds to the grid. The bias is below half a product unit and breaks ties
# away from zero.
_BIAS = np.float32(1 + 2.0**-13)
_ANCHOR = np.float32(1.5 * 2.0**13)
PHASE_EXPONENTS = (0, 5, 7, 12)
_PHASE_SCALES = tuple(np.float32(2.0**-exponent) for exponent in PHASE_EXPONENTS)
# The grid of the lowest phase must be a normal float32, and an anchor must be finite.
LEAST_EXPONENT, LARGEST_EXPONENT = 12, 230
LEAST_OPERAND, LARGEST_OPERAND = 8, 253  # low bits are not denormal and the bias does not overflow
_FAR = 30  # a larger alignment shifts all bits out

MISCOUNTED, NONE_MISCOUNTED = np.int32(-1), np.int32(0)
"""Sum with a wrong leading-sign count: Wormhole's float32 Dst treats -1 as 28 bits. A sum of 0 has
no exponent, so 0 stands for no such sum.
"""

_ONE = np.float32(1)
_ACT_HIGH, _W_HIGH = np.int32(-0x20000), np.int32(-0x80000)  # 7 and 5 bits of a significand
_NORMAL, _SIGN, _INFINITY = np.int32(0x00800000), np.int32(-(2**31)), np.int32(0x7F800000)
_NAN = np.int32(0x7FC00000)


def _binary(emit: Callable[..., Any]) -> Any:
    """Return an operation on two int32 with an int32 result. By itself, numba widens to int64."""

    @intrinsic
    def operation(typing_context, left, right):
        def generate(context, builder, signature, arguments):
            pairs = zip(arguments, signature.args, strict=True)
            values = [context.cast(builder, value, kind, types.int32) for value, kind in pairs]
            return emit(builder, *values)

        return types.int32(left, right), generate

    return operation


def _bitcast(source: Any, target: Any, llvm: Any) -> Any:
    @intrinsic
    def cast(typing_context, value):
        def generate(context, builder, signature, arguments):
            return builder.bitcast(arguments[0], llvm)

        return target(source), generate

    return cast


_add = _binary(lambda builder, left, right: builder.add(left, right))
_sub = _binary(lambda builder, left, right: builder.sub(left, right))
_and = _binary(lambda builder, left, right: builder.and_(left, right))
_or = _binary(lambda builder, left, right: builder.or_(left, right))
_xor = _binary(lambda builder, left, right: builder.xor(left, right))
_shl = _binary(lambda builder, left, right: builder.shl(left, right))
_shr = _binary(lambda builder, left, right: builder.ashr(left, right))
_bits_of = _bitcast(types.float32, types.int32, ir.IntType(32))
_float_of = _bitcast(types.int32, types.float32, ir.FloatType())


_inlined = numba.njit(nogil=True, error_model="numpy", forceinline=True)


@_inlined
def _aligned(value, shift):
    """Shift right and round halves up. ``shift`` is clamped."""
    shift = min(shift, np.int32(_FAR))
    return _shr(_add(value, _shr(_shl(np.int32(1), shift), np.int32(1))), shift)


@_inlined
def _accumulated(dst, exponent0, sum0, exponent1, sum1, fp32, miscounted):
    """Return Dst's bits after adding two sums of products in units of ``2 ** (exponent - 137)``."""
    dst_exponent = _and(_shr(dst, np.int32(23)), np.int32(255))
    is_there = np.int32(-1) if dst_exponent > 0 else np.int32(0)
    largest = max(max(exponent0, exponent1), dst_exponent)
    fraction = _or(_and(dst, np.int32(0x7FFFFF)), _NORMAL)
    low = np.int32(0) if fp32 else np.int32(13)
    fraction = _and(_shr(fraction, low), is_there)
    fraction = _aligned(fraction, _sub(largest, dst_exponent))
    sign = _shr(dst, np.int32(31))
    total = _sub(_xor(fraction, sign), sign)
    aligned0 = _aligned(_shl(sum0, np.int32(13)), _sub(largest, exponent0))
    aligned1 = _aligned(_shl(sum1, np.int32(13)), _sub(largest, exponent1))
    if fp32:
        return _rounded_fp32(_add(total, _add(aligned0, aligned1)), largest, miscounted)
    # The hardware rounds both alignments in sequence.
    half = np.int32(4096)
    aligned0 = _shr(_add(aligned0, half), low)
    aligned1 = _shr(_add(aligned1, half), low)
    total = _add(total, _add(aligned0, aligned1))
    bits = _add(_bits_of(np.float32(total)), np.int32(0x8000))
    bits = _and(bits, np.int32(-0x10000))
    return _encoded(total, bits, _sub(largest, np.int32(137)), total)


@_inlined
def _rounded_fp32(total, largest, miscounted):
    sign = _shr(total, np.int32(31))
    magnitude = _sub(_xor(total, sign), sign)
    # A low bit with value 1 turns rounding to even into rounding halves away from zero.
    more = np.int32(1) if magnitude >= (1 << 24) else np.int32(0)
    bits = _bits_of(np.float32(_or(_shl(magnitude, more), more)))
    shift = _sub(largest, _add(more, np.int32(150)))
    shift = _add(largest, np.int32(4 - 127)) if total == miscounted else shift
    return _encoded(total, bits, shift, total)


@_inlined
def _encoded(total, bits, shift, signed):
    """Add ``shift`` to the exponent in ``bits``. Underflow gives zero, overflow gives infinity."""
    exponent = _add(_and(_shr(bits, np.int32(23)), np.int32(255)), shift)
    finite = _and(_add(bits, _shl(shift, np.int32(23))), np.int32(0x7FFFFFFF))
    kept = _INFINITY if exponent >= 255 else finite
    kept = _or(kept, _and(signed, _SIGN))
    return np.int32(0) if (exponent <= 0) | (total == 0) else kept


@_inlined
def _added_in_l1(partial, dst, fp32):
    """Add two packed values in L1: float32, or bf16 rounded to even. Denormals become zero.

    Infinities with opposite signs give NaN. In bf16, a NaN in L1 becomes an infinity at the next
    sum.
    """
    total = _float_of(partial) + _float_of(dst)
    bits = _bits_of(total)
    if not fp32:
        even = _and(_shr(bits, np.int32(16)), np.int32(1))
        bits = _and(_add(bits, _add(even, np.int32(0x7FFF))), np.int32(-0x10000))
    bits = np.int32(0) if _and(bits, _INFINITY) == 0 else bits
    undefined = _NAN
    if not fp32 and _float_of(partial) != _float_of(partial):
        undefined = dst if _and(dst, _INFINITY) == _INFINITY else _INFINITY
    return bits if total == total else undefined


@_inlined
def without_nan(state):
    """Return Dst. A NaN loaded from L1 becomes an infinity if nothing was added to it."""
    return state & -0x800000 if state & 0x7F800000 == 0x7F800000 else state


@_inlined
def _largest_product(xs, x, ws, w):
    """Return the power of 2 in a group's largest product, computed from the exponents."""
    largest = xs[x] * ws[w]
    for j in range(1, GROUP):
        power = xs[x + j] * ws[w + j * LANES]
        largest = power if power > largest else largest
    return largest


@_inlined
def _sum_of_products(xs, x, ws, w, anchor):
    """Return a sum of eight products, each rounded to the anchor's last place."""
    total = anchor
    for j in range(GROUP):
        total += xs[x + j] * ws[w + j * LANES]
    return _sub(_bits_of(total), _bits_of(anchor))


@_inlined
def _exponent(power, phase_exponent):
    return max(_sub(_shr(_bits_of(power), np.int32(23)), np.int32(phase_exponent)), np.int32(0))


@_inlined
def _phase(state, xs, ws, w, powers, phase, fp32, miscounted):
    """Add one fidelity phase of a tile: two halves with 16 products, each in two groups with 8."""
    scale = _ANCHOR * _PHASE_SCALES[phase]
    lost = PHASE_EXPONENTS[phase]
    x = TILE * (1 + phase // 2)
    w += TILE * LANES * (1 + phase % 2)
    sum0 = _sum_of_products(xs, x, ws, w, powers[0] * scale)
    sum1 = _sum_of_products(xs, x + 8, ws, w + 8 * LANES, powers[1] * scale)
    sum2 = _sum_of_products(xs, x + 16, ws, w + 16 * LANES, powers[2] * scale)
    sum3 = _sum_of_products(xs, x + 24, ws, w + 24 * LANES, powers[3] * scale)
    exponents = _exponent(powers[0], lost), _exponent(powers[1], lost)
    state = _accumulated(state, exponents[0], sum0, exponents[1], sum1, fp32, miscounted)
    exponents = _exponent(powers[2], lost), _exponent(powers[3], lost)
    return _accumulated(state, exponents[0], sum2, exponents[1], sum3, fp32, miscounted)


@_inlined
def add_tile(xs, ws, dst, num_phases, fp32, miscounted):
    """Add the products for one row's 32 values along K to LANES columns in Dst."""
    for n in range(LANES):
        state = dst[n]
        powers = (
            _largest_product(xs, 0, ws, n),
            _largest_product(xs, 8, ws, n + 8 * LANES),
            _largest_product(xs, 16, ws, n + 16 * LANES),
            _largest_product(xs, 24, ws, n + 24 * LANES),
        )
        state = _phase(state, xs, ws, n, powers, 0, fp32, miscounted)
        if num_phases > 1:
            state = _phase(state, xs, ws, n, powers, 1, fp32, miscounted)
        if num_phases > 2:
            state = _phase(state, xs, ws, n, powers, 2, fp32, miscounted)
        if num_phases > 3:
            state = _phase(state, xs, ws, n, powers, 3, fp32, miscounted)
        dst[n] = state


@_inlined
def _split(bits, parts, at, step, bias, high_mask):
    """Store an operand's power of 2, high bits and low bits. Return its exponent, 0 for zero."""
    word = _shl(np.int32(bits), np.int32(16))
    power = _and(word, _INFINITY)
    word = word if power != 0 else np.int32(0)
    high = _float_of(_and(word, high_mask))
    parts[at] = _float_of(power)
    parts[at + step] = high * bias
    parts[at + 2 * step] = (_float_of(word) - high) * bias
    return _shr(power, np.int32(23))


def decode_rows(act, num_columns, xs, ranges, first, last):
    """Split rows of activations (int16 bits, flat) into 96 float32 and an exponent range a tile."""
    num_tiles = (num_columns + TILE - 1) // TILE
    for row in range(first, last):
        for tile in range(num_tiles):
            at = row * num_tiles + tile
            least, largest = np.int32(256), np.int32(0)
            for j in range(min(TILE, num_columns - tile * TILE)):
                bits = act[row * num_columns + tile * TILE + j]
                exponent = _split(bits, xs, at * 3 * TILE + j, TILE, _BIAS, _ACT_HIGH)
                largest = max(largest, exponent)
                least = min(least, exponent) if exponent > 0 else least
            ranges[2 * at], ranges[2 * at + 1] = least, largest


@_inlined
def decode_weight(weight, at, steps, num_k, num_n, raw, ws):
    """Split a weight tile (int16 bits, flat). Return its exponent range."""
    step_k, step_n = steps
    least, largest = np.int32(256), np.int32(0)
    is_plain = step_n == 1 and num_n == LANES
    if not is_plain or num_k < TILE:
        raw[:] = 0
    if not is_plain:
        for n in range(num_n):
            line = weight[at + n * step_n :]
            for j in range(num_k):
                raw[j * LANES + n] = line[j * step_k]
    for j in range(TILE):
        line = raw[j * LANES : (j + 1) * LANES]
        if is_plain and j < num_k:
            line = weight[at + j * step_k : at + j * step_k + LANES]
        parts = ws[j * LANES :]
        for n in range(LANES):
            exponent = _split(line[n], parts, n, TILE * LANES, _ONE, _W_HIGH)
            largest = max(largest, exponent)
            least = min(least, exponent if exponent > 0 else np.int32(256))
    return least, largest


@_inlined
def _group_in_integers(act, x, weight, w, step_k, count, phase):
    """Return the exponent and sum of up to 8 products, for operands with any exponent."""
    a: Any
    b: Any
    offset = np.int32(127 + PHASE_EXPONENTS[phase])
    largest = np.int32(0)
    for j in range(count):
        a, b = np.int32(act[x + j]), np.int32(weight[w + j * step_k])
        a_exponent, b_exponent = (a >> 7) & 255, (b >> 7) & 255
        if a_exponent > 0 and b_exponent > 0:
            largest = max(largest, np.int32(a_exponent + b_exponent - offset))
    total: Any = 0
    for j in range(count if largest > 0 else 0):
        a, b = np.int32(act[x + j]), np.int32(weight[w + j * step_k])
        a_exponent, b_exponent = (a >> 7) & 255, (b >> 7) & 255
        if a_exponent > 0 and b_exponent > 0:
            a_part = (a & 1) << 6 if phase // 2 else (a & 127 | 128) >> 1
            b_part = (b & 7) << 2 if phase % 2 else (b & 127 | 128) >> 3
            shift: Any = min(int(largest - (a_exponent + b_exponent - offset)), _FAR)
            product = (a_part * b_part + ((1 << shift) >> 1)) >> shift
            total += -product if (a ^ b) < 0 else product
    return largest, np.int32(total)


@_inlined
def add_tile_in_integers(
    act, x, weight, w, steps, num_k, num_n, dst, at, num_phases, fp32, miscounted
):
    """Add a tile's products to Dst as `add_tile`, for operands with any exponent."""
    step_k, step_n = steps
    for n in range(num_n):
        state, column = dst[at + n], w + n * step_n
        for phase in range(num_phases):
            for j in range(0, num_k, 2 * GROUP):
                count = min(GROUP, num_k - j)
                exponent0, sum0 = _group_in_integers(
                    act, x + j, weight, column + j * step_k, step_k, count, phase
                )
                j8 = min(j + GROUP, num_k)
                count = min(GROUP, num_k - j8)
                exponent1, sum1 = _group_in_integers(
                    act, x + j8, weight, column + j8 * step_k, step_k, count, phase
                )
                state = _accumulated(state, exponent0, sum0, exponent1, sum1, fp32, miscounted)
        dst[at + n] = state


@_inlined
def fits_float32(ranges, x, low, high, least):
    """Return whether `add_tile` is exact for tile ``x`` of a row and the weight exponents."""
    act_low, act_high = ranges[2 * x], ranges[2 * x + 1]
    operands = min(act_low, low) >= LEAST_OPERAND and max(act_high, high) <= LARGEST_OPERAND
    products = act_low + low - 127 >= least and act_high + high - 127 <= LARGEST_EXPONENT
    return operands and products


@_inlined
def spill(dst, partial, is_first, is_last, fp32):
    """Add Dst to the partial sums in L1 and clear Dst. Before the last block, Dst keeps the
    sums.
    """
    for at in range(len(dst)):
        total = dst[at] if is_first else _added_in_l1(partial[at], dst[at], fp32)
        partial[at] = total
        dst[at] = total if is_last else np.int32(0)
