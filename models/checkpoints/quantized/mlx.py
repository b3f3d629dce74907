"""MLX weights: bit fields along the input, with a scale and a minimum per group of columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.formats import Q41, Q51, STORED_NAMES, ScaledEncoded
from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.quantized.base import WHOLE, QuantizedTensor, RawModel, Read
from tilewright.models.checkpoints.quantized.float4 import MXFP4, NVFP4, Float4Tensor
from tilewright.models.checkpoints.quantized.float8 import Float8Tensor
from tilewright.models.checkpoints.quantized.integers import BLOCK, are_half, fields

BITS = (2, 3, 4, 5, 6, 8)
GROUPS = (16, 32, 64, 128)
_FLOATS = ("F16", "BF16", "F32")


@dataclass(frozen=True, slots=True)
class MlxTensor(QuantizedTensor):
    """Words ``[N, K b / 32]``, scales ``[N, K / group]`` and minimums of the same shape."""

    shape: tuple[int, int]
    names: tuple[str, ...]
    label: str
    bits: int
    group: int

    def values(self, read: Read, start: int, stop: int) -> Tensor:
        scales, minimums = self._numbers(read, slice(start, stop))
        scales, minimums = (x.repeat_interleave(self.group, 1) for x in (scales, minimums))
        return self._codes(read, slice(start, stop)).float() * scales + minimums

    def stored_type(self, read: Read) -> str:
        if self.group % BLOCK:
            return f"{self.label}, groups of {self.group}"
        is_half = all(are_half(numbers) for numbers in self._numbers(read, WHOLE))
        return self.label if is_half else f"{self.label}, extreme scales"

    def stored(self, read: Read, start: int, stop: int) -> tuple[str, Tensor]:
        blocks = Q41 if self.bits <= 4 else Q51
        scales, minimums = self._numbers(read, slice(start, stop))
        scales, minimums = (
            x.half().repeat_interleave(self.group // BLOCK, 1) for x in (scales, minimums)
        )
        codes = self._codes(read, slice(start, stop)).to(torch.uint8)
        data = blocks.pack_encoded(ScaledEncoded(codes, scales, -1, minimums))
        return STORED_NAMES[blocks.name], data.view(stop - start, -1)

    def _codes(self, read: Read, rows: slice) -> Tensor:
        return fields(read(self.names[0], (rows, WHOLE)), self.bits, self.shape[1])

    def _numbers(self, read: Read, rows: slice) -> tuple[Tensor, Tensor]:
        result = []
        for name in self.names[1:]:
            numbers = read(name, (rows, WHOLE)).float()
            if not bool(numbers.isfinite().all()):
                raise CheckpointError(
                    f"tensor {name} has a scale that is inf or NaN; allowed: finite scales"
                )
            result.append(numbers)
        return result[0], result[1]


@dataclass(frozen=True, slots=True)
class MlxFloatTensor(QuantizedTensor):
    """Float codes in words, and scales in bytes, without minimums.

    Attributes:
        tensor: The weight with typed codes and scales.
        types: Element types by tensor name.
    """

    shape: tuple[int, int]
    names: tuple[str, ...]
    label: str
    tensor: QuantizedTensor
    types: Mapping[str, torch.dtype]

    def values(self, read: Read, start: int, stop: int) -> Tensor:
        return self.tensor.values(self._typed(read), start, stop)

    def stored_type(self, read: Read) -> str:
        return self.tensor.stored_type(self._typed(read))

    def stored(self, read: Read, start: int, stop: int) -> tuple[str, Tensor]:
        return self.tensor.stored(self._typed(read), start, stop)

    def _typed(self, read: Read) -> Read:
        return lambda name, where: read(name, where).view(self.types[name])


def read_mlx(config: Mapping[str, object], where: str, model: RawModel) -> None:
    """Take all modules. Nothing is inherited by a module's entry, as in MLX.

    Raises:
        CheckpointError: A setting or a tensor does not fit.
    """
    for module, own in config.items():
        if own is True or isinstance(own, Mapping):
            name = f"{module}.scales"
            if f"{module}.weight" in model.tensors and name not in model.tensors:
                raise model.error(name, "is missing", "a module with scales, or false")
    for module in model.modules("scales"):
        own = config.get(module)
        if own is False:
            what = f"is stored, but quantization.{module[:80]} is false"
            raise model.error(f"{module}.scales", what, "no scales, or no such key")
        settings = own if isinstance(own, Mapping) else config
        mode = settings.get("mode", "affine")
        if mode not in ("affine", *_FLOAT_MODES):
            raise CheckpointError(
                f"{where}: quantization.{module[:80]}: mode = {str(mode)[:40]!r}; "
                f"allowed: affine, {', '.join(_FLOAT_MODES)}"
            )
        usual = dict(zip(("bits", "group_size"), _FLOAT_MODES.get(str(mode), _AFFINE), strict=True))
        bits, group = (
            _setting(settings, usual, key, allowed, f"{where}: quantization.{module[:80]}")
            for key, allowed in (("bits", BITS), ("group_size", GROUPS))
        )
        names = f"{module}.weight", f"{module}.scales", f"{module}.biases"
        if mode in _FLOAT_MODES:
            _take_floats(model, module, str(mode), (bits, group))
            continue
        shape = model.tensors[names[1]].shape
        if len(shape) != 2 or not shape[1]:
            raise model.error(names[1], f"has shape {list(shape)}", "rows x groups")
        rows, columns = shape[0], shape[1] * group
        if columns * bits % 32:
            raise model.error(names[1], f"has {columns} columns", "rows of whole words")
        model.take(names[0], ("U32",), (rows, columns * bits // 32))
        model.take(names[1], _FLOATS, shape)
        model.take(names[2], _FLOATS, shape)
        model.add(module, MlxTensor((rows, columns), names, f"MLX int{bits}", bits, group))
    for module in model.modules("weight"):
        if model.tensors[f"{module}.weight"].dtype == "U32":
            raise model.error(f"{module}.scales", "is missing", f"{' or '.join(_FLOATS)}")


_AFFINE = (4, 64)
_FLOAT_MODES = {"mxfp4": (4, MXFP4), "mxfp8": (8, MXFP4), "nvfp4": (4, NVFP4)}
"""Bits and columns per scale."""


def _take_floats(model: RawModel, module: str, mode: str, sizes: tuple[int, int]) -> None:
    weight, scales = names = f"{module}.weight", f"{module}.scales"
    bits, group = _FLOAT_MODES[mode]
    stored = model.tensors[scales].shape
    if sizes != (bits, group) or len(stored) != 2 or 0 in stored:
        what = f"is {list(stored)} with bits and group_size {list(sizes)} in mode {mode}"
        raise model.error(scales, what, f"rows x groups, with {[bits, group]}")
    rows, columns = shape = stored[0], stored[1] * group
    model.take(weight, ("U32",), (rows, columns * bits // 32))
    model.take(scales, ("U8",), stored)
    tensor: QuantizedTensor
    if bits == 8:
        tensor = Float8Tensor(shape, f"FP8 1x{group}", names, (1, group), is_exponent=True)
    else:
        label = "MXFP4" if group == MXFP4 else "NVFP4 1x16"
        tensor = Float4Tensor(shape, names, label, group)
    types = {weight: torch.uint8, scales: torch.float8_e4m3fn if group == NVFP4 else torch.uint8}
    model.add(module, MlxFloatTensor(shape, names, tensor.label, tensor, types))


def _setting(
    own: Mapping[str, object],
    common: Mapping[str, object],
    key: str,
    allowed: tuple[int, ...],
    where: str,
) -> int:
    value = own.get(key, common.get(key))
    if type(value) is not int or value not in allowed:
        names = ", ".join(map(str, allowed))
        raise CheckpointError(f"{where}: {key} = {repr(value)[:40]}; allowed: {names}")
    return value
