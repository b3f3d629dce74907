"""Weights in the kernels' layout: panels of 16 rows (see source/panels.h).

Only torch operations are used. Recipes and files are handled elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.compiler.formats import ScaledEncoded, get_format
from tilewright.compiler.formats.ggml_blocks import SuperBlocks
from tilewright.compiler.targets.cpu.native.numerics import (
    BF16,
    FP16,
    FP32,
    HAVE_MINIMUMS,
    K_KINDS,
    SCALED_CODES,
    SCALES_OF_16,
)
from tilewright.compiler.targets.cpu.native.program.mapping import LANES, whole
from tilewright.compiler.targets.cpu.onnxruntime.codes import SignedCodes
from tilewright.errors import CheckpointError

BLOCK = 32
SUPER_BLOCK = 256
_ALIGNMENT = 64
_CODE_BITS = {"q80": 8, "bfp8": 8, "fp8": 8, "q6_k": 6, "q50": 5, "q51": 5, "q5_k": 5}  # others: 4
_OF_POWERS = ("bfp8", "bfp4")


def num_panels(num_rows: int, *, paired: bool) -> int:
    """Return a weight's panel count, which is even. Paired gate and up have equal numbers."""
    if paired:
        return 2 * (whole(num_rows // 2, LANES) // LANES)
    return whole(num_rows, 2 * LANES) // LANES


def panel_bytes(name: str, num_columns: int) -> int:
    """Return the bytes per panel."""
    width = whole(num_columns, BLOCK)
    if name in (FP32, BF16, FP16):
        return width * LANES * (4 if name == FP32 else 2)
    return whole(width * 2 * _CODE_BITS.get(name, 4) + _scale_bytes(name, width), _ALIGNMENT)


def _scale_bytes(name: str, width: int) -> int:
    """Return the bytes for a panel's scales and minimums."""
    num_supers = whole(width, SUPER_BLOCK) // SUPER_BLOCK
    if name in SCALED_CODES:
        block = get_format(name).block
        return 4 * LANES * (whole(width, block) // block)
    if name in ("q6_k", "iq4_xs"):
        return 32 * num_supers + (width if name == "q6_k" else width // BLOCK * LANES)
    if name in K_KINDS:
        return 64 * num_supers + whole(width, 2 * BLOCK) // (2 * BLOCK) * 48
    return width * (2 if name in HAVE_MINIMUMS else 1)


def padded(values: Tensor, missing: tuple[int, ...]) -> Tensor:
    """Append zeros to ``values`` like torch's ``pad``. Copy only if necessary."""
    return pad(values, missing) if any(missing) else values.contiguous()


def value_panels(values: Tensor, kind: str) -> Tensor:
    """Convert float rows ``[16 panels, in]`` to uint8 ``[panels, bytes]`` in float32, bfloat16 or
    float16.
    """
    wide = padded(values, (0, whole(values.shape[1], BLOCK) - values.shape[1]))
    inner = 2 if kind == BF16 else 1
    rounded = wide.to({FP32: torch.float32, BF16: torch.bfloat16, FP16: torch.float16}[kind])
    lanes = rounded.view(-1, LANES, wide.shape[1] // inner, inner).transpose(1, 2).contiguous()
    return lanes.view(torch.uint8).view(lanes.shape[0], -1)


def code_panels(
    signed: SignedCodes, kind: str, name: str, *, minimums: Tensor | None = None
) -> Tensor:
    """Convert block rows ``[16 panels, in]`` to uint8 ``[panels, bytes]``. ``name`` is for errors.

    ``minimums`` have a value per block, like scales. The codes then start at 0.

    Raises:
        CheckpointError: A block's scale is too small for a normal number.
    """
    num_columns = signed.codes.shape[1]
    wide = whole(num_columns, BLOCK)
    bits = _CODE_BITS.get(kind, 4)
    codes = padded(signed.codes, (0, wide - num_columns)).view(torch.uint8)
    codes = codes if minimums is not None else codes + (1 << (bits - 1))
    parts = [_codes(codes, bits), _scales(signed, kind, wide, name)]
    if minimums is not None:
        least = SignedCodes(signed.codes, minimums, signed.block)
        parts.append(_scales(least, kind, wide, name))
    return _joined(parts, kind, num_columns)


def scaled_panels(encoded: ScaledEncoded, name: str) -> Tensor:
    """Convert rows of scaled codes ``[16 panels, in]`` to uint8 ``[panels, bytes]``."""
    num_columns = encoded.codes.shape[1]
    width = whole(num_columns, BLOCK)
    codes = padded(encoded.codes, (0, width - num_columns))
    block = get_format(name).block
    missing = whole(width, block) // block - encoded.scales.shape[1]
    scales = padded(encoded.scales, (0, missing))
    if name == "nvfp4":
        scales = scales * 0.5  # The kernels' codes are twice the values.
    parts = [_codes(codes, _CODE_BITS.get(name, 4)), _lanes(scales.view(torch.uint8), 4)]
    return _joined(parts, name, num_columns)


def super_panels(blocks: SuperBlocks, kind: str, num_columns: int) -> Tensor:
    """Convert K-quant rows ``[16 panels, in]`` to uint8 ``[panels, bytes]``.

    The last block may extend beyond the row.
    """
    wide = whole(num_columns, BLOCK)
    codes = _codes(blocks.codes[:, :wide], _CODE_BITS.get(kind, 4))
    factors = _lanes(blocks.factors.view(torch.uint8), 2)  # [panels, supers of 1 or 2, rows, 2]
    if blocks.minimums is None:
        group = 16 if kind in SCALES_OF_16 else BLOCK
        scales = _lanes(blocks.scales.view(torch.uint8)[:, : wide // group], 1)
        return _joined([codes, factors, scales], kind, num_columns)
    count = whole(wide, 2 * BLOCK) // BLOCK
    scale, least = blocks.scales[:, :count].view(torch.uint8), blocks.minimums[:, :count]
    small = scale | (least & 3) << 6
    high = least[:, 0::2] >> 2 | least[:, 1::2] >> 2 << 4
    three = torch.stack((small[:, 0::2], small[:, 1::2], high), dim=2).flatten(1)
    return _joined([codes, factors, _lanes(three, 1)], kind, num_columns)


def _lanes(values: Tensor, width: int) -> Tensor:
    """Convert rows ``[16 panels, n * width]`` to ``[panels, n, 16, width]``."""
    return values.reshape(-1, LANES, values.shape[1] // width, width).transpose(1, 2)


def _codes(codes: Tensor, bits: int) -> Tensor:
    """Convert uint8 codes ``[16 panels, whole blocks]`` to the panels' order, ``[panels,
    bytes]``.
    """
    fours = _lanes(codes, 4).reshape(-1, codes.shape[1] // BLOCK, 8, LANES, 4)
    if bits == 8:
        return fours.flatten(1)
    low = fours & 15
    parts = [low[:, :, 0::2] | low[:, :, 1::2] << 4]
    if bits > 4:  # one or two bits per column in a byte
        rest, num_words = fours >> 4, bits - 4
        rest = rest.view(*rest.shape[:2], num_words, -1, LANES, 4)
        shifts = torch.arange(rest.shape[3], dtype=torch.uint8) * num_words
        parts.append((rest << shifts.view(-1, 1, 1)).sum(3, dtype=torch.uint8))
    return torch.cat(parts, dim=2).flatten(1)


def _joined(parts: list[Tensor], kind: str, num_columns: int) -> Tensor:
    flat = torch.cat([part.reshape(part.shape[0], -1) for part in parts], dim=1)
    return padded(flat, (0, panel_bytes(kind, num_columns) - flat.shape[1])).contiguous()


def _scales(signed: SignedCodes, kind: str, wide: int, name: str) -> Tensor:
    """Return scales uint8 ``[panels, bytes]``, with padding blocks."""
    missing = wide // signed.block - signed.scales.shape[1]
    scales = padded(signed.scales, (0, missing)).view(-1, LANES, wide // signed.block)
    lanes = scales.transpose(1, 2).contiguous()
    if kind not in _OF_POWERS:
        return lanes.half().view(torch.uint8).view(lanes.shape[0], -1)
    exponents = lanes.view(torch.int32) >> 23
    if bool(((exponents == 0) & (lanes != 0)).any()):  # blocks with zeros have such scales
        codes = padded(signed.codes, (0, wide - signed.codes.shape[1]))
        has_codes = (codes.view(*scales.shape, signed.block) != 0).any(-1).transpose(1, 2)
        if bool(((exponents == 0) & has_codes).any()):
            raise CheckpointError(
                f"{name}: a block lies near the smallest numbers there are, which kernels of "
                f"{kind} do not take; allowed: bf16 for it"
            )
    return exponents.to(torch.uint8).view(lanes.shape[0], -1)
