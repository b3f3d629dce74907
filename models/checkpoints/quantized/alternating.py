"""Experts in gpt-oss: alternating rows for gate and up, in transposed floats or MXFP4, and biases.

Gate, up and down become a tensor each: weights ``[E, out, in]`` and biases ``[E, out, 1]``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.base import row_range
from tilewright.models.checkpoints.quantized.base import WHOLE, QuantizedTensor, RawModel, Read
from tilewright.models.checkpoints.quantized.float4 import MXFP4, label_of, scaled_pairs
from tilewright.models.checkpoints.quantized.float8 import powers_of_two

_FLOATS = ("F32", "F16", "BF16")
_EXPERTS = ".mlp.experts"
_LABEL = "MXFP4"


@dataclass(frozen=True, slots=True)
class _ExpertTensor(QuantizedTensor):
    """Every ``step``-th output of stored tensors, starting at output ``first``."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    label: str
    first: int = 0
    step: int = 1
    runs_on_device = True

    def slices(self, read: Read, where: tuple[slice, ...]) -> Tensor:
        experts, rows, columns = where
        start, stop = row_range(rows, self.shape[1])
        stored = slice(start * self.step, stop * self.step)
        taken = slice(self.first, None, self.step)
        return self._values(read, experts, stored, taken, columns).contiguous()

    def values(self, read: Read, start: int, stop: int) -> Tensor:
        return self.slices(read, (slice(start, stop), WHOLE, WHOLE))

    def _values(
        self, read: Read, experts: slice, stored: slice, taken: slice, columns: slice
    ) -> Tensor:
        raise NotImplementedError


class _Transposed(_ExpertTensor):
    """Floats ``[E, in, out]``."""

    __slots__ = ()

    def _values(
        self, read: Read, experts: slice, stored: slice, taken: slice, columns: slice
    ) -> Tensor:
        return read(self.names[0], (experts, columns, stored))[..., taken].transpose(1, 2)


class _Bias(_ExpertTensor):
    """Floats ``[E, out]``."""

    __slots__ = ()

    def _values(
        self, read: Read, experts: slice, stored: slice, taken: slice, columns: slice
    ) -> Tensor:
        return read(self.names[0], (experts, stored))[:, taken].unsqueeze(-1)[..., columns]


class _AlternatingBlocks(_ExpertTensor):
    """Codes ``[E, out, blocks, 16]``, the low nibble first, and exponents ``[E, out, blocks]``."""

    __slots__ = ()

    def _values(
        self, read: Read, experts: slice, stored: slice, taken: slice, columns: slice
    ) -> Tensor:
        codes = read(self.names[0], (experts, stored, WHOLE, WHOLE))[:, taken]
        exponents = read(self.names[1], (experts, stored, WHOLE))[:, taken]
        if bool((exponents == 255).any()):
            raise CheckpointError(
                f"tensor {self.names[1]} has a scale that is NaN; allowed: exponents below 255"
            )
        return scaled_pairs(codes, powers_of_two(exponents))[..., columns]

    def stored_type(self, read: Read) -> str:
        return label_of(self.label, read(self.names[1], ()), lambda: read(self.names[0], ()))


def read_mxfp4(config: Mapping[str, object], where: str, model: RawModel) -> None:
    """Take all expert tensors for ``quant_method: mxfp4``.

    Raises:
        CheckpointError: A tensor is missing, or has another shape or type.
    """
    ending = "_blocks"
    for name in sorted(name for name in model.tensors if name.endswith(ending)):
        stem = name.removesuffix(ending)
        shape = model.tensors[name].shape
        if len(shape) != 4 or 0 in shape or shape[3] != MXFP4 // 2 or not stem.endswith("_proj"):
            allowed = f"experts x rows x blocks x {MXFP4 // 2}"
            raise model.error(name, f"has shape {list(shape)}", allowed)
        model.take(name, ("U8",), shape)
        model.take(f"{stem}_scales", ("U8",), shape[:3])
        names = name, f"{stem}_scales"
        _add(
            model, _AlternatingBlocks, stem, (*shape[:2], shape[2] * MXFP4), names, _LABEL, "weight"
        )


def take_alternating(model: RawModel) -> None:
    """Take the remaining expert tensors: floats and biases.

    Raises:
        CheckpointError: A tensor has another shape or type.
    """
    for name in sorted(model.tensors):
        path, _, tensor_name = name.rpartition(".")
        if not path.endswith(_EXPERTS) or not tensor_name.startswith(("gate_up_proj", "down_proj")):
            continue
        tensor, is_bias = model.tensors[name], tensor_name.endswith("_bias")
        if len(tensor.shape) != 3 - is_bias:
            allowed = "experts x rows" if is_bias else "experts x columns x rows"
            raise model.error(name, f"has shape {list(tensor.shape)}", allowed)
        model.take(name, _FLOATS, tensor.shape)
        if is_bias:
            shape = (*tensor.shape, 1)
            _add(model, _Bias, name.removesuffix("_bias"), shape, (name,), tensor.dtype, "bias")
        else:
            count, columns, rows = tensor.shape
            _add(model, _Transposed, name, (count, rows, columns), (name,), tensor.dtype, "weight")


def _add(
    model: RawModel,
    tensor_type: type[_ExpertTensor],
    stem: str,
    shape: tuple[int, ...],
    names: tuple[str, ...],
    label: str,
    role: str,
) -> None:
    """Add a tensor, or its gate and up."""
    if not stem.endswith("gate_up_proj"):
        model.found[f"{stem}.{role}"] = tensor_type(shape, names, label)
        return
    if shape[1] % 2:
        raise model.error(names[0], f"has {shape[1]} rows", "an even number: gate and up in turns")
    half = (shape[0], shape[1] // 2, *shape[2:])
    for first, matmul in enumerate(("gate_proj", "up_proj")):
        name = f"{stem.removesuffix('gate_up_proj')}{matmul}.{role}"
        model.found[name] = tensor_type(half, names, label, first, 2)
