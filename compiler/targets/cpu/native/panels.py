"""Weights as the kernels read them: panels of 16 rows, laid out as source/panels.h says.

Torch operations alone; it knows no recipes and no files.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.compiler.errors import CheckpointError
from tilewright.compiler.targets.cpu.codes import SignedCodes
from tilewright.compiler.targets.cpu.native.numerics import BF16, FP32

LANES, BLOCK = 16, 32
_ALIGNMENT = 64
_CODE_BITS = {"q80": 8, "bfp8": 8, "q40": 4, "q41": 4, "bfp4": 4}
_SCALE_BYTES = {"q41": 64}  # of the rows of a panel, for 32 columns; 32 of the other kinds
_OF_POWERS = ("bfp8", "bfp4")


def whole(count: int, multiple: int) -> int:
    """The least multiple that is not below ``count``."""
    return -(-count // multiple) * multiple


def num_panels(num_rows: int, *, paired: bool) -> int:
    """Panels of a weight: an even number; of gate and up (``paired``) as many for each."""
    if paired:
        return 2 * (whole(num_rows // 2, LANES) // LANES)
    return whole(num_rows, 2 * LANES) // LANES


def panel_bytes(kind: str, num_columns: int) -> int:
    """Bytes of one panel of a kind."""
    wide = whole(num_columns, BLOCK)
    if kind in (FP32, BF16):
        return wide * LANES * (4 if kind == FP32 else 2)
    scales = wide // BLOCK * _SCALE_BYTES.get(kind, 32)
    return whole(wide * LANES * _CODE_BITS[kind] // 8 + scales, _ALIGNMENT)


def value_panels(values: Tensor, kind: str) -> Tensor:
    """uint8 ``[panels, bytes]`` of float rows ``[16 panels, in]`` in float32 or bfloat16."""
    wide = pad(values, (0, whole(values.shape[1], BLOCK) - values.shape[1]))
    inner = 1 if kind == FP32 else 2
    held = wide.float() if kind == FP32 else wide.bfloat16()
    lanes = held.view(-1, LANES, wide.shape[1] // inner, inner).transpose(1, 2).contiguous()
    return lanes.view(torch.uint8).view(lanes.shape[0], -1)


def code_panels(
    signed: SignedCodes, kind: str, name: str, *, minimums: Tensor | None = None
) -> Tensor:
    """uint8 ``[panels, bytes]`` of rows ``[16 panels, in]`` in blocks; ``name`` is for errors.

    ``minimums``: of each block, as the scales; the codes then begin at 0.

    Raises:
        CheckpointError: for a block whose scale is too small to be a normal number.
    """
    num_columns = signed.codes.shape[1]
    wide = whole(num_columns, BLOCK)
    bits = _CODE_BITS[kind]
    codes = pad(signed.codes, (0, wide - num_columns)).view(torch.uint8)
    codes = codes if minimums is not None else codes + (1 << (bits - 1))
    lanes = codes.view(-1, LANES, wide // 4, 4).transpose(1, 2)
    if bits == 4:
        halves = lanes.reshape(lanes.shape[0], wide // 8, 2, LANES, 4)
        lanes = halves[:, :, 0] | halves[:, :, 1] << 4
    scales = _scales(signed, kind, wide, name)
    parts = [lanes.reshape(lanes.shape[0], -1), scales]
    if minimums is not None:
        least = SignedCodes(signed.codes, minimums, signed.block)
        parts.append(_scales(least, kind, wide, name))
    flat = torch.cat(parts, dim=1)
    return pad(flat, (0, panel_bytes(kind, num_columns) - flat.shape[1])).contiguous()


def _scales(signed: SignedCodes, kind: str, wide: int, name: str) -> Tensor:
    """uint8 ``[panels, bytes]``, of all blocks of a panel, the padding's included."""
    missing = wide // signed.block - signed.scales.shape[1]
    scales = pad(signed.scales, (0, missing)).view(-1, LANES, wide // signed.block)
    lanes = scales.transpose(1, 2).contiguous()
    if kind not in _OF_POWERS:
        return lanes.half().view(torch.uint8).view(lanes.shape[0], -1)
    exponents = lanes.view(torch.int32) >> 23
    if bool(((exponents == 0) & (lanes != 0)).any()):  # blocks of zeros have such a scale
        codes = pad(signed.codes, (0, wide - signed.codes.shape[1]))
        has_codes = (codes.view(*scales.shape, signed.block) != 0).any(-1).transpose(1, 2)
        if bool(((exponents == 0) & has_codes).any()):
            raise CheckpointError(
                f"{name}: a block lies near the smallest numbers there are, which kernels of "
                f"{kind} do not take; allowed: bf16 for it"
            )
    return exponents.to(torch.uint8).view(lanes.shape[0], -1)
