"""torchao weights: int8 and float8 per channel or group, int4 in pairs, and integers in bytes.

The metadata of safetensors files names a tensor's class and its blocks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.quantized.base import (
    WHOLE,
    QuantizedTensor,
    RawModel,
    Read,
    check_finite,
)
from tilewright.models.checkpoints.quantized.float8 import CODES, Float8Tensor
from tilewright.models.checkpoints.quantized.integers import Codes, IntegerTensor

_FLOATS = ("F32", "BF16", "F16")
_LABEL = "torchao"
_CODES, _SCALE, _ZEROS = (f"_weight_{name}" for name in ("qdata", "scale", "zero_point"))
_ACTIVATIONS = ("act_quant_scale", "act_quant_zero_point")
_MAX_ENTRY = 1 << 16


@dataclass(frozen=True, slots=True)
class TorchaoBytes(IntegerTensor):
    """Codes ``[N, K]`` in bytes, scales and zeros ``[N / height, K / group]``.

    Attributes:
        height: Outputs per scale.
        zeros: Tensor name. None: 0.
    """

    shape: tuple[int, int]
    names: tuple[str, ...]
    bits: int
    height: int
    group: int
    zeros: str | None
    label: str = _LABEL

    def codes(self, read: Read, start: int, stop: int) -> Codes:
        codes = read(self.names[0], (slice(start, stop), WHOLE)).short()
        check_range(self.names[0], codes, self.bits)
        grid = torch.arange(start, stop) // self.height
        if self.zeros is not None:
            zeros = read(self.zeros, ()).short()[grid]
            codes -= zeros.repeat_interleave(self.group, dim=1)
        return Codes(codes, read(self.names[1], ()).float()[grid])

    def is_symmetric(self, read: Read) -> bool:
        return self.zeros is None


@dataclass(frozen=True, slots=True)
class TorchaoPairs(IntegerTensor):
    """Codes ``[N, K / 2]`` with a sign, the low nibble first, and scales ``[K / group, N]``."""

    shape: tuple[int, int]
    names: tuple[str, ...]
    group: int
    bits: int = 4
    label: str = _LABEL

    def codes(self, read: Read, start: int, stop: int) -> Codes:
        codes = _signed_pairs(read(self.names[0], (slice(start, stop), WHOLE)))
        scales = read(self.names[1], (WHOLE, slice(start, stop))).float()
        return Codes(codes, scales.T.contiguous())

    def is_symmetric(self, read: Read) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class TorchaoMinimums(QuantizedTensor):
    """As `TorchaoPairs`, with addends ``[K / group, N]`` of the products."""

    shape: tuple[int, int]
    names: tuple[str, ...]
    group: int
    label: str = f"{_LABEL} int4 with minimums"

    def values(self, read: Read, start: int, stop: int) -> Tensor:
        codes = _signed_pairs(read(self.names[0], (slice(start, stop), WHOLE))).float()
        scales, minimums = (
            check_finite(name, read(name, (WHOLE, slice(start, stop))).float()).T.repeat_interleave(
                self.group, dim=1
            )
            for name in self.names[1:]
        )
        return codes * scales + minimums


def check_range(name: str, codes: Tensor, bits: int) -> None:
    """Refuse codes outside the range.

    Raises:
        CheckpointError: A code needs more bits.
    """
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if bits < 8 and not bool(((codes >= low) & (codes <= high)).all()):
        raise CheckpointError(
            f"tensor {name} has a code outside {low} to {high}; allowed: int{bits}"
        )


def _signed_pairs(pairs: Tensor) -> Tensor:
    """Return int16 codes from -8 to 7."""
    stored = pairs.view(torch.uint8)
    codes = torch.stack((stored & 0xF, stored >> 4), dim=-1).flatten(1).short()
    return (codes ^ 8) - 8


def read_torchao(config: Mapping[str, object], where: str, model: RawModel) -> None:
    """Take all modules.

    Raises:
        CheckpointError: A class is not read, or a tensor does not fit.
    """
    for module in model.modules(_CODES):
        name = f"{module}.{_CODES}"
        entry = _entry_of(model, module)
        class_name = str(entry.get("_type"))[:60]
        if class_name not in _TAKERS:
            raise model.error(name, f"has the class {class_name!r}", ", ".join(_TAKERS))
        data = entry.get("_data")
        settings: Mapping[str, object] = data if isinstance(data, Mapping) else {}
        if f"{module}._weight_act_pre_scale" in model.tensors:
            what = "scales activations, which is not read"
            raise model.error(f"{module}._weight_act_pre_scale", what, "weights without it")
        has_scales = model.drop(*(f"{module}._weight_{scale}" for scale in _ACTIVATIONS))
        if (
            has_scales
            or settings.get("act_quant_kwargs")
            or settings.get("activation_quantization")
        ):
            model.say_once("activations are quantized in other engines")
        _TAKERS[class_name](model, module, settings)


def _entry_of(model: RawModel, module: str) -> Mapping[str, object]:
    """Return the metadata for a weight.

    Raises:
        CheckpointError: There is none.
    """
    codes = f"{module}.{_CODES}"
    stored = model.stored_names.get(codes, codes).removesuffix(_CODES) + "weight"
    text = model.metadata.get(stored, "")
    try:
        entry = json.loads(text) if len(text) <= _MAX_ENTRY else None
    except (ValueError, RecursionError):
        entry = None
    if not isinstance(entry, Mapping):
        raise model.error(codes, "has no entry in the file's metadata", f"an object for {stored}")
    return entry


def _blocks(
    model: RawModel, module: str, settings: Mapping[str, object], shape: tuple[int, ...]
) -> tuple[int, int]:
    """Return outputs and inputs per scale.

    Raises:
        CheckpointError: They do not divide the weight.
    """
    sizes = settings.get("block_size")
    if (
        len(shape) != 2
        or not isinstance(sizes, list)
        or len(sizes) != 2
        or not all(type(size) is int and size >= 1 for size in sizes)
        or shape[0] % sizes[0]
        or shape[1] % sizes[1]
        or 0 in shape
    ):
        what = f"has block_size {repr(sizes)[:40]} for shape {list(shape)}"
        raise model.error(f"{module}.{_CODES}", what, "sizes that divide two axes")
    return sizes[0], sizes[1]


def _take_bytes(model: RawModel, module: str, settings: Mapping[str, object]) -> None:
    names = codes, scale, zeros = tuple(f"{module}.{name}" for name in (_CODES, _SCALE, _ZEROS))
    rows, columns = shape = (*model.tensors[codes].shape, 0, 0)[:2]
    height, group = _blocks(model, module, settings, model.tensors[codes].shape)
    grid = rows // height, columns // group
    model.take(codes, ("I8",), shape)
    model.take(scale, _FLOATS, grid)
    target = settings.get("target_dtype", {"_data": "int8"})
    name = str(target.get("_data")) if isinstance(target, Mapping) else ""
    if name not in _BITS:
        raise model.error(codes, f"has target_dtype {name[:40]!r}", ", ".join(_BITS))
    has_zeros = zeros in model.tensors
    if has_zeros:
        model.take(zeros, ("I8", *_FLOATS), grid)
        numbers, middle = model.read(zeros, ()).float(), 1 << (_BITS[name] - 1)
        is_code = (numbers == numbers.round()) & (numbers >= -middle) & (numbers < middle)
        if not bool(is_code.all()):
            wanted = f"whole numbers from {-middle} to {middle - 1}"
            raise model.error(zeros, "has a zero that is no code", wanted)
        has_zeros = bool(numbers.any())
    weight = TorchaoBytes(
        (rows, columns),
        names if has_zeros else names[:2],
        _BITS[name],
        height,
        group,
        zeros if has_zeros else None,
    )
    model.add(module, weight)


def _take_pairs(model: RawModel, module: str, settings: Mapping[str, object]) -> None:
    names = codes, scale, zeros = tuple(f"{module}.{name}" for name in (_CODES, _SCALE, _ZEROS))
    stored = model.tensors[codes].shape
    rows, columns = shape = (*stored, 0, 0)[0], 2 * (*stored, 0, 0)[1]
    height, group = _blocks(model, module, settings, shape if len(stored) == 2 else stored)
    if height != 1:
        raise model.error(codes, f"has a scale for {height} outputs", "a scale per output")
    model.take(codes, ("I8", "U8"), (rows, columns // 2))
    grid = columns // group, rows
    model.take(scale, _FLOATS, grid)
    model.take(zeros, _FLOATS, grid)
    if bool(model.read(zeros, ()).any()):
        model.add(module, TorchaoMinimums((rows, columns), names, group))
    else:
        model.add(module, TorchaoPairs((rows, columns), names[:2], group))


def _take_float8(model: RawModel, module: str, settings: Mapping[str, object]) -> None:
    codes, scale = f"{module}.{_CODES}", f"{module}.{_SCALE}"
    stored = model.tensors[codes].shape
    height, group = _blocks(model, module, settings, stored)
    rows, columns = stored
    model.take(codes, (CODES,), stored)
    grid = rows // height, columns // group
    shapes = (grid, (), (1,)) if grid == (1, 1) else (grid,)
    own = model.tensors[scale].shape if scale in model.tensors else grid
    model.take(scale, _FLOATS, own if own in shapes else grid)
    blocks = "per tensor" if grid == (1, 1) else f"{height}x{group}"
    label = "per channel" if (height, group) == (1, columns) and rows > 1 else blocks
    model.add(
        module, Float8Tensor((rows, columns), f"FP8 {label}", (codes, scale), (height, group))
    )


_BITS = {f"int{bits}": bits for bits in range(1, 9)}
_TAKERS: Mapping[str, Callable[[RawModel, str, Mapping[str, object]], None]] = {
    "Float8Tensor": _take_float8,
    "Int4Tensor": _take_pairs,
    "Int8Tensor": _take_bytes,
    "IntxUnpackedToInt8Tensor": _take_bytes,
}
