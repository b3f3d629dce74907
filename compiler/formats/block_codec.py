"""Integer arithmetic of Tenstorrent's block floating point, on float32 rows.

Host packing is the conversion of weights by ``ttnn.from_torch``. Device packing is the conversion
of kernel outputs by the packer. A cast on the device packs in its own way. The three differ in
rounding only. Names, files and memory layouts are not defined here.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tilewright.compiler.formats.rows import pad_blocks, row_chunks

BLOCK = 16
EXPONENT_BIAS = 127

# In this range float arithmetic is exact: a denormal truncates to 0, and inf and NaN are excluded.
_SMALLEST_PLAIN, _LARGEST_PLAIN = 24, 254

RowEncoder = Callable[[torch.Tensor, int], "tuple[torch.Tensor, torch.Tensor]"]


def encode_host(x_RK: torch.Tensor, mantissa_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a chunk with the rounding of the host.

    The shared exponent is the block's largest exponent. Rounding never increases it. Alignment
    drops the shifted bits before rounding to nearest even. Large magnitudes saturate. Denormals
    become +0.

    Args:
        x_RK: float32 ``[R, K]``. K is a multiple of 16.
        mantissa_bits: A magnitude's bits, without the sign.

    Returns:
        Exponents uint8 ``[R, K/16]`` and mantissas int8 ``[R, K]``.
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
    """Encode like :func:`encode_host`, in float arithmetic, for exponents in the plain range.

    Every product is by a power of two and therefore exact. Truncation drops the same bits as the
    alignment, and ``round`` is to nearest even. This form makes a third of the passes over memory.
    """
    scale = ((150 + EXPONENT_BIAS) - shared << 23).view(torch.float32)
    aligned = x_RK.view(*shared.shape[:-1], BLOCK) * scale
    aligned = aligned.to(torch.int32).float()  # below 2^24; trunc_ takes five times as long
    limit = (1 << mantissa_bits) - 1
    mantissas = aligned.mul_(2.0 ** (mantissa_bits - 24)).round_().clamp_(-limit, limit)
    return shared.squeeze(-1).to(torch.uint8), mantissas.to(torch.int8).view(x_RK.shape)


def encode_device(x_RK: torch.Tensor, mantissa_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a chunk with the rounding of a Wormhole packer. Shapes are as in :func:`encode_host`.

    Rounding has two steps. Step 1 rounds to bf16 minus a bit, with ties away from zero and NaN as
    inf. Step 2 aligns to the block exponent and rounds to a 7-bit magnitude, with ties away from
    zero. Narrower formats truncate this magnitude.
    """
    bits = _block_bits(x_RK)
    rounded = (bits & 0x7FFFFFFF).clamp_(max=0x7F800000).add_(1 << 16)
    exponents = rounded >> 23
    significands = (rounded >> 17).bitwise_and_(0x3F).bitwise_or_(0x40)
    # The input decides: a denormal that rounds up to a normal number is still 0.
    is_zero = (bits & 0x7F800000) == 0
    exponents.masked_fill_(is_zero, 0)
    significands.masked_fill_(is_zero, 0)
    shared = _block_max(exponents)
    shift = exponents.neg_().add_(shared).clamp_(max=15)
    magnitudes = (significands << 1).bitwise_right_shift_(shift).add_(1).bitwise_right_shift_(1)
    magnitudes.clamp_(max=127).bitwise_right_shift_(7 - mantissa_bits)
    return _signed(bits, magnitudes, shared)


def encode_cast(x_RK: torch.Tensor, mantissa_bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode a chunk with the rounding of a device's cast. Shapes are as in :func:`encode_host`.

    The packer truncates to bf16, aligns to the block exponent and rounds to a 7-bit magnitude,
    with ties away from zero. Narrower formats truncate this magnitude.
    """
    bits = _block_bits(x_RK)
    exponents = (bits >> 23).bitwise_and_(0xFF)
    shared = _block_max(exponents)
    significands = (bits >> 16).bitwise_and_(0x7F).bitwise_or_(0x80)
    significands.masked_fill_(exponents == 0, 0)
    shift = exponents.neg_().add_(shared).clamp_(max=15)
    magnitudes = significands.bitwise_right_shift_(shift).add_(1).bitwise_right_shift_(1)
    magnitudes.clamp_(max=127).bitwise_right_shift_(7 - mantissa_bits)
    return _signed(bits, magnitudes, shared)


def decode(exponents: torch.Tensor, mantissas: torch.Tensor, mantissa_bits: int) -> torch.Tensor:
    """Decode uint8 exponents ``[R, K/16]`` and int8 mantissas ``[R, K]`` to float32 ``[R, K]``.

    A value becomes 0 if its own exponent underflows. In a block with exponent 255, a value with
    normalized exponent 255 is inf or NaN.
    """
    # The conversion from int8 to float32 normalizes: its exponent field is 127 + floor(log2 M). A
    # single integer addition then applies the shared exponent.
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

    Zeros pad a partial last block. Return exponents uint8 ``[R, ceil(K/16)]`` and mantissas int8
    ``[R, K]``.
    """
    num_rows, length = x_RK.shape
    num_blocks = -(-length // BLOCK)
    exponents = x_RK.new_empty(num_rows, num_blocks, dtype=torch.uint8)
    mantissas = x_RK.new_empty(num_rows, length, dtype=torch.int8)
    for rows in row_chunks(x_RK):
        chunk = pad_blocks(x_RK[rows].float(), BLOCK).contiguous()
        exponents[rows], padded = encoder(chunk, mantissa_bits)
        mantissas[rows] = padded[:, :length]
    return exponents, mantissas


def decode_rows(
    exponents: torch.Tensor, mantissas: torch.Tensor, mantissa_bits: int
) -> torch.Tensor:
    """Run :func:`decode` over rows of any length, chunk by chunk."""
    num_rows, length = mantissas.shape
    values = mantissas.new_empty(num_rows, length, dtype=torch.float32)
    for rows in row_chunks(mantissas):
        chunk = pad_blocks(mantissas[rows], BLOCK)
        values[rows] = decode(exponents[rows], chunk, mantissa_bits)[:, :length]
    return values


def round_trip_rows(x_RK: torch.Tensor, mantissa_bits: int, encoder: RowEncoder) -> torch.Tensor:
    """Encode and decode chunk by chunk, without memory for the whole encoded tensor."""
    num_rows, length = x_RK.shape
    values = x_RK.new_empty(num_rows, length, dtype=torch.float32)
    for rows in row_chunks(x_RK):
        chunk = pad_blocks(x_RK[rows].float(), BLOCK).contiguous()
        encoded = encoder(chunk, mantissa_bits)
        values[rows] = decode(*encoded, mantissa_bits)[:, :length]
    return values


def _block_bits(x_RK: torch.Tensor) -> torch.Tensor:
    num_rows, length = x_RK.shape
    return x_RK.view(torch.int32).view(num_rows, length // BLOCK, BLOCK)


def _block_max(exponents: torch.Tensor) -> torch.Tensor:
    # Repeated halving is several times faster than a reduction over an inner dimension of 16.
    width = BLOCK
    while width > 1:
        width //= 2
        exponents = torch.maximum(exponents[..., :width], exponents[..., width:])
    return exponents


def _signed(
    bits: torch.Tensor, magnitudes: torch.Tensor, shared: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    # This is (m ^ s) - s with s = 0 or -1. Integers have no negative zero, as the format demands.
    sign = bits >> 31
    mantissas = magnitudes.bitwise_xor_(sign).sub_(sign).to(torch.int8)
    return shared.squeeze(-1).to(torch.uint8), mantissas.flatten(1)
