"""Block weights as codes for MatMulNBits and QMoE, with bit-identical values.

A block becomes unsigned codes with a zero point (128 or 8) and a float scale. bfp8 and bfp4 have 16
codes and a power of two. q80 and q40 have 32 codes and a float16.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.compiler.formats import (
    BlockEncoded,
    BlockFloat,
    GgmlFormat,
    ScaledEncoded,
    get_format,
)
from tilewright.compiler.targets.cpu.onnxruntime.numerics import (
    NATIVE_BITS,
    ExpertLayout,
    block_layout,
)


@dataclass(frozen=True, slots=True)
class SignedCodes:
    """A weight in a native format. A value is code * scale.

    Attributes:
        codes: int8 ``[out, in]`` around zero.
        scales: float32 ``[out, ceil(in / block)]``.
        block: Block size.
    """

    codes: Tensor
    scales: Tensor
    block: int


def signed_codes(dense: Tensor, format_name: str) -> SignedCodes:
    """Quantize a dense ``[out, in]`` weight to a native format."""
    number_format = get_format(format_name)
    encoded = number_format.quantise(dense, axis=-1)
    if isinstance(encoded, ScaledEncoded):
        assert isinstance(number_format, GgmlFormat)
        return _around_zero(encoded, number_format)
    assert isinstance(number_format, BlockFloat) and isinstance(encoded, BlockEncoded)
    mantissas = encoded.mantissas[:, : dense.shape[1]]
    return SignedCodes(mantissas, number_format.scales(encoded), number_format.block)


def stored_codes(data: Tensor, shape: tuple[int, int], format_name: str) -> SignedCodes:
    """Return a weight with ``shape`` from a checkpoint's stored bytes."""
    number_format = get_format(format_name)
    assert isinstance(number_format, GgmlFormat)
    return _around_zero(number_format.read(data.reshape(-1), shape), number_format)


def _around_zero(encoded: ScaledEncoded, number_format: GgmlFormat) -> SignedCodes:
    assert encoded.minimums is None, f"{number_format.name} has minimums"
    codes = encoded.codes.to(torch.int8) - number_format.zero_point
    return SignedCodes(codes, number_format.scales(encoded), number_format.block)


def block_codes(signed: SignedCodes, format_name: str) -> tuple[np.ndarray, np.ndarray]:
    """Return MatMulNBits codes and scales for an ``[out, in]`` weight in a native format.

    Zeros pad the last block in a row.
    """
    layout = block_layout(tuple(signed.codes.shape), format_name)
    width = layout.num_blocks * layout.block
    codes = _unsigned(signed.codes, NATIVE_BITS[format_name], (layout.num_rows, width))
    shape = layout.num_rows, layout.num_blocks, layout.block_bytes
    return codes.reshape(shape), signed.scales.numpy().reshape(-1)


def expert_codes(
    signed: SignedCodes, layout: ExpertLayout, *, num_experts: int, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return QMoE codes ``[E, num_rows, C * bits / 8]`` and scales ``[E, num_rows, C / block]``.

    The input is the ``[E * O, C]`` weight over all experts. Values are exact. Zeros pad C to whole
    blocks and rows to ``num_rows``.
    """
    num_columns = signed.codes.shape[-1]
    width = layout.padded(num_columns)
    codes = signed.codes.view(num_experts, -1, num_columns)
    missing = num_rows - codes.shape[1]
    codes = pad(codes, (0, width - num_columns, 0, missing)).flatten(0, 1)
    scales = signed.scales.reshape(num_experts, -1, signed.scales.shape[-1])
    scales = scales.repeat_interleave(signed.block // layout.block, -1)
    scales = pad(scales[..., : width // layout.block], (0, 0, 0, missing))
    packed = _unsigned(codes, layout.bits, (num_experts * num_rows, width))
    return packed.reshape(num_experts, num_rows, -1), scales.numpy()


def _unsigned(signed: Tensor, bits: int, shape: tuple[int, int]) -> np.ndarray:
    """Return codes around the zero point for ``bits``. Padding columns are zeros."""
    codes: np.ndarray = np.full(shape, 1 << (bits - 1), dtype=np.uint8)
    codes[:, : signed.shape[1]] += signed.numpy().view(np.uint8)  # modulo 256: two's complement
    return codes[:, 0::2] | (codes[:, 1::2] << 4) if bits == 4 else codes
