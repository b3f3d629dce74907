"""FP4 weights: e2m1 codes in pairs, with a scale per block of columns (NVFP4, MXFP4)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.formats import NVFP4 as NVFP4_FORMAT
from tilewright.compiler.formats import STORED_NAMES, ScaledEncoded
from tilewright.compiler.formats.scaled_codes import E2M1
from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.quantized.base import WHOLE, QuantizedTensor, RawModel, Read
from tilewright.models.checkpoints.quantized.float8 import CODES, powers_of_two, take_float8

NVFP4, MXFP4 = 16, 32
"""Columns per block."""
_VALUES = torch.tensor(E2M1)
_PAIRS = torch.stack((_VALUES.repeat(16), _VALUES.repeat_interleave(16)), dim=1)
"""Values for a byte of codes, the low nibble first."""


@dataclass(frozen=True, slots=True)
class Float4Tensor(QuantizedTensor):
    """4-bit float codes with scales.

    Codes are ``[N, K / 2]`` bytes, low nibble first. Scales are ``[N, K / block]``. A third tensor
    is the global scale, if any.

    Attributes:
        block: Columns per scale.
        divides: Whether a block's scale is divided by the global scale, or multiplied.
    """

    shape: tuple[int, int]
    names: tuple[str, ...]
    label: str
    block: int
    divides: bool = False
    runs_on_device = True

    def values(self, read: Read, start: int, stop: int) -> Tensor:
        rows = slice(start, stop)
        return scaled_pairs(read(self.names[0], (rows, WHOLE)), self._scales(read, rows))

    def stored_type(self, read: Read) -> str:
        if self.block == MXFP4:
            return label_of(self.label, read(self.names[1], ()), lambda: read(self.names[0], ()))
        scales = self._scales(read, WHOLE).abs()
        is_normal = (scales >= 2.0**-100) & (scales <= 2.0**100) | (scales == 0)
        return self.label if bool(is_normal.all()) else f"{self.label}, extreme scales"

    def stored(self, read: Read, start: int, stop: int) -> tuple[str, Tensor]:
        rows = slice(start, stop)
        encoded = ScaledEncoded(self._codes(read, rows), self._scales(read, rows), -1)
        blocks = NVFP4_FORMAT.pack_encoded(encoded)
        return STORED_NAMES[NVFP4_FORMAT.name], blocks.view(stop - start, -1)

    def _codes(self, read: Read, rows: slice) -> Tensor:
        pairs = read(self.names[0], (rows, WHOLE))
        return torch.stack((pairs & 0xF, pairs >> 4), dim=-1).flatten(1)

    def _scales(self, read: Read, rows: slice) -> Tensor:
        stored = read(self.names[1], (rows, WHOLE))
        if self.block == MXFP4:
            scales = powers_of_two(stored)
        elif len(self.names) == 2:
            scales = stored.float()
        else:
            second = read(self.names[2], ()).float().reshape(1, 1)
            if not bool(second.isfinite() & (second > 0)):
                raise CheckpointError(
                    f"tensor {self.names[2]} is {second.item()}; allowed: finite, above 0"
                )
            scales = stored.float() / second if self.divides else stored.float() * second
        if not bool(scales.isfinite().all()):
            raise CheckpointError(
                f"tensor {self.names[1]} has a scale that is inf or NaN; allowed: finite scales"
            )
        return scales


def scaled_pairs(codes: Tensor, scales: Tensor) -> Tensor:
    """Return float32 values ``[..., K]`` for bytes ``[..., K / 2]`` with two codes each.

    Args:
        scales: Float32 scales ``[..., K / block]``.
    """
    values = _PAIRS.to(codes.device).index_select(0, codes.flatten().int())
    values.view(scales.numel(), -1).mul_(scales.reshape(-1, 1))
    return values.view(*scales.shape[:-1], -1)


def label_of(label: str, exponents: Tensor, codes: Callable[[], Tensor]) -> str:
    """Return the MXFP4 weight label. Exponents within bfloat16's range have the plain label.

    Args:
        label: The plain label.
        exponents: The blocks' stored exponents.
        codes: Returns the blocks' 16 bytes of codes. The exponent of zeros has no effect.
    """
    is_outside = ((exponents < 27) | (exponents > 227)).flatten()  # including products
    if bool(is_outside.any()):
        is_outside &= (codes().reshape(-1, MXFP4 // 2) & 0x77 != 0).any(1)
    return f"{label}, wide exponents" if bool(is_outside.any()) else label


def take_float4(
    model: RawModel, module: str, codes: str, scale: str, second: str | None, *, divides: bool
) -> None:
    """Take codes and scales. Without a second scale they are MXFP4.

    Raises:
        CheckpointError: A tensor is missing, or has another shape or type.
    """
    names = tuple(f"{module}.{each}" for each in (codes, scale, second) if each is not None)
    shape = model.tensors[names[0]].shape
    block = MXFP4 if second is None else NVFP4
    if len(shape) != 2 or 2 * shape[1] % block:
        raise model.error(names[0], f"has shape {list(shape)}", f"rows of whole blocks of {block}")
    rows, columns = shape[0], 2 * shape[1]
    model.take(names[0], ("U8",), shape)
    model.take(names[1], ("U8",) if second is None else (CODES,), (rows, columns // block))
    if second is not None:
        sizes = model.tensors[names[2]].shape if names[2] in model.tensors else (1,)
        model.take(names[2], ("F32",), sizes if sizes in ((), (1,)) else (1,))
    if model.drop(f"{module}.input_global_scale", f"{module}.input_scale"):
        model.say_once("activations are quantized to FP4 in other engines")
    label = "MXFP4" if second is None else "NVFP4 1x16"
    model.add(module, Float4Tensor((rows, columns), names, label, block, divides))


def read_modelopt(config: Mapping[str, object], where: str, model: RawModel) -> None:
    """Take all modules of ``quant_method: modelopt``, NVFP4, FP8 and MXFP8.

    Raises:
        CheckpointError: A setting or a tensor does not fit.
    """
    kind = config.get("quant_algo")
    allowed = (
        *("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "MXFP8"),
        "MIXED_PRECISION",
    )
    if kind is not None and str(kind).upper() not in allowed:
        raise CheckpointError(
            f"{where}: quantization_config.quant_algo = {kind!r}; allowed: {', '.join(allowed)}"
        )
    for name in model.tensors:
        if name.endswith(".pre_quant_scale"):
            raise model.error(name, "scales activations, which is not read", "weights without it")
    for module in model.modules("weight"):
        dtype = model.tensors[f"{module}.weight"].dtype
        if dtype == "U8":
            names = "weight", "weight_scale", "weight_scale_2"
            take_float4(model, module, *names, divides=False)
        elif dtype == CODES:
            take_float8(model, module, None, "weight_scale")
    if config.get("kv_cache_quant_algo") or config.get("kv_cache_scheme"):
        model.notes.append(f"{where}: the format of the KV cache is not used; it keeps its own")
