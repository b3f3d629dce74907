"""MLX weights: bit fields along the input, with a scale and a minimum per group of columns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.formats import Q41, Q51, STORED_NAMES, ScaledEncoded
from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.quantized.base import WHOLE, QuantizedTensor, RawModel, Read
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


def read_mlx(config: Mapping[str, object], where: str, model: RawModel) -> None:
    """Take all modules. Entries of modules override bits and group size.

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
        bits, group = (
            _setting(settings, config, key, allowed, f"{where}: quantization.{module[:80]}")
            for key, allowed in (("bits", BITS), ("group_size", GROUPS))
        )
        mode = settings.get("mode", config.get("mode", "affine"))
        if mode != "affine":
            raise CheckpointError(
                f"{where}: quantization.{module[:80]}: mode = {str(mode)[:40]!r}; allowed: affine"
            )
        names = f"{module}.weight", f"{module}.scales", f"{module}.biases"
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
