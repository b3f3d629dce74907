"""Block floating point one value at a time, in Python integers, as the specification words it.

Shares nothing with the code it is compared with. ``words`` are the bits of 16 float32 values.
"""

from __future__ import annotations

from fractions import Fraction
from math import floor


def slow_pack(words: list[int], mantissa_bits: int) -> tuple[int, list[int]]:
    """One block as the host packs it: the exponent and 16 signed magnitudes of float32 words."""
    shared = max((word >> 23) & 0xFF for word in words)
    signed = []
    for word in words:
        exponent = (word >> 23) & 0xFF
        significand = 0 if exponent == 0 else (1 << 23) + (word & 0x7FFFFF)
        for _ in range(shared - exponent):
            significand //= 2
        kept, rest = divmod(significand, 1 << (24 - mantissa_bits))
        half = 1 << (23 - mantissa_bits)
        if rest > half or (rest == half and kept % 2 == 1):
            kept += 1
        kept = min(kept, (1 << mantissa_bits) - 1)
        signed.append(-kept if word >> 31 else kept)
    return shared, signed


def slow_unpack(shared: int, signed: int, mantissa_bits: int) -> int:
    """The float32 word of one element."""
    if signed == 0:
        return 0
    magnitude, exponent = abs(signed), shared
    while magnitude < 1 << (mantissa_bits - 1):
        magnitude *= 2
        exponent -= 1
    if exponent < 1:
        return 0
    fraction = (magnitude - (1 << (mantissa_bits - 1))) << (24 - mantissa_bits)
    return (1 << 31 if signed < 0 else 0) | exponent << 23 | fraction


def slow_device_pack(words: list[int], mantissa_bits: int) -> tuple[int, list[int]]:
    """One block as a kernel's packer writes it."""
    rounded = [_six_bits(word) for word in words]
    shared = max(exponent for exponent, _ in rounded)
    signed = []
    for word, (exponent, significand) in zip(words, rounded, strict=True):
        aligned = Fraction(significand, 2 ** (shared - exponent))
        magnitude = min(floor(aligned + Fraction(1, 2)), 127) // 2 ** (7 - mantissa_bits)
        signed.append(-magnitude if word >> 31 else magnitude)
    return shared, signed


def slow_cast_pack(words: list[int], mantissa_bits: int) -> tuple[int, list[int]]:
    """One block as a cast on the device packs it, from the 8 upper bits of a significand."""
    shared = max((word >> 23) & 0xFF for word in words)
    signed = []
    for word in words:
        exponent = (word >> 23) & 0xFF
        significand = 0 if exponent == 0 else 128 + ((word >> 16) & 0x7F)
        aligned = Fraction(significand, 2 ** (shared - exponent + 1))
        magnitude = min(floor(aligned + Fraction(1, 2)), 127) // 2 ** (7 - mantissa_bits)
        signed.append(-magnitude if word >> 31 else magnitude)
    return shared, signed


def _six_bits(word: int) -> tuple[int, int]:
    """Biased exponent and the significand 1.xxxxxx as an integer, rounded half away from zero."""
    exponent, fraction = (word >> 23) & 0xFF, word & 0x7FFFFF
    if exponent == 0:
        return 0, 0
    if exponent == 255:  # inf, and NaN becomes it
        return 255, 64
    significand = floor(Fraction((1 << 23) + fraction, 1 << 17) + Fraction(1, 2))
    return (exponent + 1, 64) if significand == 128 else (exponent, significand)
