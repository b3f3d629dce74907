"""AWQ weights: words packed along the output, as the ``gemm`` kernels read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.quantized.base import WHOLE, RawModel, Read, setting
from tilewright.models.checkpoints.quantized.integers import Codes, IntegerTensor

_PLACES = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7])
"""Nibble in a word, by column."""


@dataclass(frozen=True, slots=True)
class AwqTensor(IntegerTensor):
    """Words ``[K, N / 8]``, zeros ``[groups, N / 8]`` and scales ``[groups, N]``."""

    shape: tuple[int, int]
    names: tuple[str, ...]
    group: int
    label: str = "AWQ"
    bits: int = 4

    @property
    def scale_name(self) -> str:
        return self.names[2]

    def codes(self, read: Read, start: int, stop: int) -> Codes:
        first, last = start // 8, -(-stop // 8)
        own = slice(start - 8 * first, stop - 8 * first)
        codes = _nibbles(read(self.names[0], (WHOLE, slice(first, last))))[:, own]
        zeros = _nibbles(read(self.names[1], (WHOLE, slice(first, last))))[:, own]
        zeros = zeros.repeat_interleave(self.group, dim=0)[: len(codes)]
        scales = read(self.scale_name, (WHOLE, slice(start, stop))).float()
        return Codes((codes - zeros).T.contiguous(), scales.T.contiguous())

    def is_symmetric(self, read: Read) -> bool:
        return False

    def scales_are_half(self, read: Read) -> bool:
        return True


def _nibbles(words: Tensor) -> Tensor:
    """Unpack words ``[rows, n]`` to int16 ``[rows, 8 n]`` in column order."""
    found = words[:, :, None] >> (4 * _PLACES).to(torch.int32) & 0xF
    return found.flatten(1).to(torch.int16)


def read_awq(config: Mapping[str, object], where: str, model: RawModel) -> None:
    """Take all modules.

    Raises:
        CheckpointError: A setting or a tensor does not fit.
    """
    setting(config, "bits", (4,), where, 4)
    setting(config, "zero_point", (True,), where, True)
    version = config.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise CheckpointError(f"{where}: quantization_config.version = {version!r}; allowed: gemm")
    group = group_size(config, where)
    for module in model.modules("qweight"):
        names = tuple(f"{module}.{each}" for each in ("qweight", "qzeros", "scales"))
        shape = model.tensors[names[0]].shape
        if len(shape) != 2 or 0 in shape:
            raise model.error(names[0], f"has shape {list(shape)}", "two axes of 1 and above")
        columns, rows = shape[0], 8 * shape[1]
        own = columns if group == -1 else group
        if columns % own:
            raise model.error(names[0], f"has {columns} inputs", f"a multiple of {own}")
        model.take(names[0], ("I32",), (columns, rows // 8))
        model.take(names[1], ("I32",), (columns // own, rows // 8))
        model.take(names[2], ("F16",), (columns // own, rows))
        model.add(module, AwqTensor((rows, columns), names, own))


def group_size(config: Mapping[str, object], where: str) -> int:
    """Return columns per group. -1: all columns.

    Raises:
        CheckpointError: No such number.
    """
    group = config.get("group_size", 128)
    if type(group) is not int or not (group == -1 or 1 <= group <= 1 << 20):
        raise CheckpointError(
            f"{where}: quantization_config.group_size = {group!r}; allowed: -1, or 1 and above"
        )
    return group
