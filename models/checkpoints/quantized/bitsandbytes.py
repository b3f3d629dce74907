"""bitsandbytes weights: 4-bit codes with a codebook (nf4, fp4), or bytes with scales."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.formats import NF4, STORED_NAMES, ScaledEncoded
from tilewright.compiler.formats.scaled_codes import NF4_VALUES
from tilewright.models.checkpoints.quantized.base import (
    WHOLE,
    QuantizedTensor,
    RawModel,
    Read,
    check_finite,
    read_finite,
)

_LABEL = "bitsandbytes"
_STATE = "weight.quant_state.bitsandbytes__"
_MAX_STATE_BYTES = 4096
_MAX_BLOCK = 1 << 16


@dataclass(frozen=True, slots=True)
class CodebookTensor(QuantizedTensor):
    """Codes in pairs, the high nibble first, over the flattened matrix.

    Attributes:
        block: Weights per scale, in the flattened matrix.
        nested_block: Scales per second scale. 0: scales are float32.
        offset: Scale addend with a second scale.
    """

    shape: tuple[int, int]
    names: tuple[str, ...]
    label: str
    block: int
    nested_block: int = 0
    offset: float = 0.0

    def values(self, read: Read, start: int, stop: int) -> Tensor:
        columns = self.shape[1]
        first, last = start * columns, stop * columns
        pairs = read(self.names[0], (slice(first // 2, -(-last // 2)), WHOLE)).flatten()
        codes = torch.stack((pairs >> 4, pairs & 0xF), dim=-1).flatten()
        codes = codes[first % 2 : first % 2 + last - first]
        codebook = read_finite(read, self.names[1])
        scales = self._scales(read)[torch.arange(first, last) // self.block]
        return (codebook[codes.long()] * scales).view(stop - start, columns)

    def stored_type(self, read: Read) -> str:
        if not self.label.endswith("nf4"):
            return self.label
        if self.block != NF4.block or self.shape[1] % self.block:
            return f"{self.label}, blocks of {self.block} across outputs"
        codebook = read_finite(read, self.names[1]).view(torch.int32)  # -0 differs from 0
        if not torch.equal(codebook, torch.tensor(NF4_VALUES).view(torch.int32)):
            return f"{self.label}, own codebook"
        scales = self._scales(read).abs()
        is_normal = (scales >= 2.0**-100) & (scales <= 2.0**100) | (scales == 0)
        return self.label if bool(is_normal.all()) else f"{self.label}, extreme scales"

    def stored(self, read: Read, start: int, stop: int) -> tuple[str, Tensor]:
        columns = self.shape[1]
        pairs = read(self.names[0], (slice(start * columns // 2, stop * columns // 2), WHOLE))
        codes = torch.stack((pairs >> 4, pairs & 0xF), dim=-1).view(stop - start, columns)
        scales = self._scales(read).view(self.shape[0], -1)[start:stop]
        blocks = NF4.pack_encoded(ScaledEncoded(codes, scales, -1))
        return STORED_NAMES[NF4.name], blocks.view(stop - start, -1)

    def _scales(self, read: Read) -> Tensor:
        if not self.nested_block:
            return read_finite(read, self.names[2])
        codes = read(self.names[2], ()).long()
        second = read_finite(read, self.names[3]), read_finite(read, self.names[4])
        blocks = torch.arange(len(codes)) // self.nested_block
        scales = second[1][codes] * second[0][blocks] + torch.tensor(self.offset)
        return check_finite(self.names[2], scales)


@dataclass(frozen=True, slots=True)
class ByteTensor(QuantizedTensor):
    """Codes ``[N, K]`` and each output's largest magnitude.

    The operations are in the package's order.
    """

    shape: tuple[int, int]
    names: tuple[str, ...]
    label: str = f"{_LABEL} int8"

    def values(self, read: Read, start: int, stop: int) -> Tensor:
        codes = read(self.names[0], (slice(start, stop), WHOLE)).float()
        scales = read_finite(read, self.names[1])[start:stop].unsqueeze(1)
        return codes * scales * torch.tensor(1 / 127)


def read_bitsandbytes(config: Mapping[str, object], where: str, model: RawModel) -> None:
    """Take all modules.

    Raises:
        CheckpointError: A tensor is missing, has another shape or type, or has no valid state.
    """
    for codebook in ("nf4", "fp4"):
        for module in model.modules(f"{_STATE}{codebook}"):
            _take_4bit(model, module, codebook)
    for module in model.modules("SCB"):
        codes, scale = f"{module}.weight", f"{module}.SCB"
        shape = model.tensors[codes].shape if codes in model.tensors else ()
        if len(shape) != 2:
            raise model.error(codes, f"has shape {list(shape)}", "I8 of two axes")
        model.take(codes, ("I8",), shape)
        model.take(scale, ("F32",), (shape[0],))
        _check_layout(model, f"{module}.weight_format")
        model.add(module, ByteTensor((shape[0], shape[1]), (codes, scale)))
    _check_rest(model)


def _check_rest(model: RawModel) -> None:
    """Refuse codes without scales or a state."""
    for module in model.modules("weight"):
        dtype = model.tensors[f"{module}.weight"].dtype
        if dtype == "I8":
            raise model.error(f"{module}.SCB", "is missing", "F32, a number per output")
        if dtype == "U8":
            raise model.error(f"{module}.{_STATE}nf4", "is missing", "the state, for nf4 or fp4")


def _check_layout(model: RawModel, name: str) -> None:
    """Refuse the permuted codes of old packages. The layout's number is optional."""
    if name in model.tensors:
        model.take(name, ("U8",), ())
        if int(model.read(name, ())):
            raise model.error(name, "has permuted codes", "0 (rows)")


def _take_4bit(model: RawModel, module: str, codebook: str) -> None:
    weight, name = f"{module}.weight", f"{module}.{_STATE}{codebook}"
    state = _state_of(model, name)
    shape = state.get("shape")
    if (
        not isinstance(shape, list)
        or len(shape) != 2
        or not all(type(size) is int and 1 <= size <= 1 << 32 for size in shape)
    ):
        raise model.error(name, f"has shape {str(shape)[:40]!r}", "two sizes")
    rows, columns = shape
    block = _size(model, name, state, "blocksize")
    num_blocks = -(-rows * columns // block)
    names = [weight, f"{weight}.quant_map", f"{weight}.absmax"]
    model.take(weight, ("U8",), (-(-rows * columns // 2), 1))
    model.take(names[1], ("F32",), (16,))
    is_nested = f"{weight}.nested_absmax" in model.tensors
    model.take(names[2], ("U8",) if is_nested else ("F32",), (num_blocks,))
    nested_block, offset = 0, 0.0
    if is_nested:
        nested_block = _size(model, name, state, "nested_blocksize")
        offset = _number(model, name, state, "nested_offset")
        names += [f"{weight}.nested_absmax", f"{weight}.nested_quant_map"]
        model.take(names[3], ("F32",), (-(-num_blocks // nested_block),))
        model.take(names[4], ("F32",), (256,))
    label = f"{_LABEL} {codebook}"
    tensor = CodebookTensor((rows, columns), tuple(names), label, block, nested_block, offset)
    model.add(module, tensor)


def _state_of(model: RawModel, name: str) -> Mapping[str, object]:
    """Return the JSON object in a tensor.

    Raises:
        CheckpointError: The tensor is too large, or contains something else.
    """
    shape = model.tensors[name].shape
    if len(shape) != 1 or not 1 <= shape[0] <= _MAX_STATE_BYTES:
        raise model.error(name, f"has shape {list(shape)}", f"up to {_MAX_STATE_BYTES} bytes")
    model.take(name, ("U8",), shape)
    try:
        state = json.loads(bytes(model.read(name, ()).tolist()))
    except (ValueError, RecursionError):
        state = None
    if not isinstance(state, Mapping):
        raise model.error(name, "has no quantization state", "a JSON object")
    return state


def _size(model: RawModel, name: str, state: Mapping[str, object], key: str) -> int:
    size = state.get(key)
    if type(size) is not int or not 1 <= size <= _MAX_BLOCK:
        raise model.error(name, f"has {key} {str(size)[:40]!r}", f"1 to {_MAX_BLOCK}")
    return size


def _number(model: RawModel, name: str, state: Mapping[str, object], key: str) -> float:
    number = state.get(key)
    if not isinstance(number, float | int) or not abs(number) <= 3e38:
        raise model.error(name, f"has {key} {str(number)[:40]!r}", "a finite number")
    return math.fsum((number,))
