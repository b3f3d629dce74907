"""The integer arithmetic of Tenstorrent's block floating point, on float32 rows.

Host packing (what ttnn.from_torch does to weights) and device packing (what a kernel's packer does
to outputs) differ in rounding only. This file knows no names, files or memory layouts.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewright.compiler.formats.rows import pad_blocks, row_chunks

BLOCK = 16
EXPONENT_BIAS = 127

# Shared exponents for which float arithmetic is exact: a denormal in such a block truncates to 0,
# and neither inf nor NaN is in it.
_SMALLEST_PLAIN, _LARGEST_PLAIN = 24, 254

RowEncoder = Callable[[torch.Tensor, int], "tuple[torch.Tensor, torch.Tensor]"]


def encode_host(x_RK: torch.Tensor, mantissa_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes one chunk as the host does: exponents uint8 ``[R, K/16]``, mantissas int8 ``[R, K]``,
    K being a multiple of 16.

    The shared exponent is the largest of the block and is never raised; bits shifted out in the
    alignment are lost before rounding to nearest even; saturates; denormals become +0.
    """
    bits = _block_bits(x_RK)
    largest = _block_max(x_RK.view(bits.shape).abs()).view(torch.int32) >> 23
    if int(largest.min()) >= _SMALLEST_PLAIN and int(largest.max()) <= _LARGEST_PLAIN:
        return _encode_plain(x_RK, largest, mantissa_bits)
    exponents = (bits >> 23).bitwise_and_(0xFF)
    shared = _block_max(exponents)
    magnitudes = (bits & 0x7FFFFF).bitwise_or_(0x800000).masked_fill_(exponents == 0, 0)
    magnitudes.bitwise_right_shift_(exponents.neg_().add_(shared).clamp_(max=31))
    dropped_bits = 24 - mantissa_bits
    odd = (magnitudes >> dropped_bits).bitwise_and_(1)
    magnitudes.add_(odd).add_((1 << (dropped_bits - 1)) - 1)
    magnitudes.bitwise_right_shift_(dropped_bits).clamp_(max=(1 << mantissa_bits) - 1)
    return _signed(bits, magnitudes, shared)


def _encode_plain(
    x_RK: torch.Tensor, shared: torch.Tensor, mantissa_bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """:func:`encode_host` in float arithmetic, for blocks whose exponents are in the plain range.

    Every product is by a power of two and exact; truncation loses what the alignment would shift
    out, and ``round`` is to nearest even. A third of the integer form's passes over memory.
    """
    scale = ((150 + EXPONENT_BIAS) - shared << 23).view(torch.float32)
    aligned = x_RK.view(*shared.shape[:-1], BLOCK) * scale
    aligned = aligned.to(torch.int32).float()  # below 2^24; trunc_ takes five times as long
    limit = (1 << mantissa_bits) - 1
    mantissas = aligned.mul_(2.0 ** (mantissa_bits - 24)).round_().clamp_(-limit, limit)
    return shared.squeeze(-1).to(torch.uint8), mantissas.to(torch.int8).view(x_RK.shape)


def encode_device(x_RK: torch.Tensor, mantissa_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encodes one chunk, K a multiple of 16, as a Wormhole packer rounds on its way out of Dst:
    exponents and mantissas as :func:`encode_host` returns them.

    Twice: to bf16 less one bit, ties away from zero, where NaN counts as inf; then, aligned to the
    block exponent, to a 7-bit magnitude, half away again; narrower formats truncate that magnitude.
    """
    bits = _block_bits(x_RK)
    rounded = (bits & 0x7FFFFFFF).clamp_(max=0x7F800000).add_(1 << 16)
    exponents = rounded >> 23
    significands = (rounded >> 17).bitwise_and_(0x3F).bitwise_or_(0x40)
    # Denormality is judged on the input: one that would round up to a normal is 0 all the same.
    is_zero = (bits & 0x7F800000) == 0
    exponents.masked_fill_(is_zero, 0)
    significands.masked_fill_(is_zero, 0)
    shared = _block_max(exponents)
    shift = exponents.neg_().add_(shared).clamp_(max=15)
    magnitudes = (significands << 1).bitwise_right_shift_(shift).add_(1).bitwise_right_shift_(1)
    magnitudes.clamp_(max=127).bitwise_right_shift_(7 - mantissa_bits)
    return _signed(bits, magnitudes, shared)


def decode(exponents: torch.Tensor, mantissas: torch.Tensor, mantissa_bits: int) -> torch.Tensor:
    """float32 ``[R, K]`` of uint8 ``[R, K/16]`` and int8 ``[R, K]``, normalised.

    A value whose own exponent underflows becomes 0; in a block of exponent 255 a value that
    normalises to exponent 255 is inf or NaN.
    """
    # int8 -> float32 normalises: its exponent field is 127 + floor(log2 M), so that moving the
    # shared exponent in is one integer addition.
    bits = mantissas.float().view(torch.int32).view(*exponents.shape, BLOCK)
    offset = (exponents.int() - (EXPONENT_BIAS + mantissa_bits - 1)).unsqueeze(-1)
    is_zero = (mantissas == 0).view_as(bits)
    if bool((exponents < mantissa_bits).any()):
        is_zero |= ((bits >> 23) & 0xFF) + offset < 1
    bits += offset << 23
    return bits.masked_fill_(is_zero, 0).view(torch.float32).view_as(mantissas)


def map_rows(
    x_RK: torch.Tensor, mantissa_bits: int, encoder: RowEncoder
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run an encoder over rows of any length, chunk by chunk.

    Returns exponents uint8 ``[R, ceil(K/16)]`` and mantissas int8 ``[R, K]``; a trailing partial
    block is encoded as if padded with zeros.
    """
    num_rows, length = x_RK.shape
    num_blocks = -(-length // BLOCK)
    exponents = x_RK.new_empty(num_rows, num_blocks, dtype=torch.uint8)
    mantissas = x_RK.new_empty(num_rows, length, dtype=torch.int8)
    for rows in row_chunks(num_rows, length):
        chunk = pad_blocks(x_RK[rows].float(), BLOCK).contiguous()
        exponents[rows], padded = encoder(chunk, mantissa_bits)
        mantissas[rows] = padded[:, :length]
    return exponents, mantissas


def decode_rows(
    exponents: torch.Tensor, mantissas: torch.Tensor, mantissa_bits: int
) -> torch.Tensor:
    """:func:`decode` for rows of any length, chunk by chunk."""
    num_rows, length = mantissas.shape
    values = mantissas.new_empty(num_rows, length, dtype=torch.float32)
    for rows in row_chunks(num_rows, length):
        chunk = pad_blocks(mantissas[rows], BLOCK)
        values[rows] = decode(exponents[rows], chunk, mantissa_bits)[:, :length]
    return values


def round_trip_rows(x_RK: torch.Tensor, mantissa_bits: int, encoder: RowEncoder) -> torch.Tensor:
    """Encode and decode chunk by chunk, without ever holding the encoded tensor."""
    num_rows, length = x_RK.shape
    values = x_RK.new_empty(num_rows, length, dtype=torch.float32)
    for rows in row_chunks(num_rows, length):
        chunk = pad_blocks(x_RK[rows].float(), BLOCK).contiguous()
        encoded = encoder(chunk, mantissa_bits)
        values[rows] = decode(*encoded, mantissa_bits)[:, :length]
    return values


def _block_bits(x_RK: torch.Tensor) -> torch.Tensor:
    num_rows, length = x_RK.shape
    return x_RK.view(torch.int32).view(num_rows, length // BLOCK, BLOCK)


def _block_max(exponents: torch.Tensor) -> torch.Tensor:
    # Halving beats a reduction over an inner dimension of 16 by several times.
    width = BLOCK
    while width > 1:
        width //= 2
        exponents = torch.maximum(exponents[..., :width], exponents[..., width:])
    return exponents


def _signed(
    bits: torch.Tensor, magnitudes: torch.Tensor, shared: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # (m ^ s) - s with s = 0 or -1; an integer has no negative zero, as the format demands.
    sign = bits >> 31
    mantissas = magnitudes.bitwise_xor_(sign).sub_(sign).to(torch.int8)
    return shared.squeeze(-1).to(torch.uint8), mantissas.flatten(1)
