"""Q4_0 and Q8_0 one value at a time, in Python numbers rounded to float32 after each operation.

Shares nothing with the code it is compared with. A block is 32 finite float32 values.
"""

from __future__ import annotations

import math
import struct


def single(x: float) -> float:
    """``x`` rounded to float32; beyond its range, inf."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def half_bytes(x: float) -> bytes:
    """``x`` as two bytes of float16; beyond its range, inf."""
    try:
        return struct.pack("<e", x)
    except OverflowError:
        return struct.pack("<e", math.copysign(math.inf, x))


def slow_q40(values: list[float]) -> bytes:
    """The 18 bytes of a block: the first value of the largest magnitude gets code 0."""
    largest = max(values, key=abs)
    scale = single(largest / -8)
    inverse = _inverse(scale)
    codes = [_code(single(single(value * inverse) + 8.5), 0, 15) for value in values]
    pairs = zip(codes[:16], codes[16:], strict=True)
    return half_bytes(scale) + bytes(low + 16 * high for low, high in pairs)


def slow_q80(values: list[float]) -> bytes:
    """The 34 bytes of a block, rounded half away from zero."""
    scale = single(max(map(abs, values)) / 127)
    inverse = _inverse(scale)
    exact = [single(value * inverse) for value in values]
    codes = [int(math.copysign(_code(abs(x) + 0.5, 0, 127), x)) for x in exact]
    return half_bytes(scale) + struct.pack("32b", *codes)


def _inverse(scale: float) -> float:
    return 0.0 if scale == 0 else single(1 / scale)


def _code(x: float, low: int, high: int) -> int:
    # As x86 converts what has no integer.
    return min(max(math.trunc(x), low), high) if math.isfinite(x) else 0
