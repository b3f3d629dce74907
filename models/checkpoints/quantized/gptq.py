"""GPTQ weights: words packed along the input, with zeros packed along the output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.quantized.awq import group_size
from tilewright.models.checkpoints.quantized.base import WHOLE, RawModel, Read, setting
from tilewright.models.checkpoints.quantized.integers import Codes, IntegerTensor, fields

_FORMATS = ("gptq", "gptq_v2")


@dataclass(frozen=True, slots=True)
class GptqTensor(IntegerTensor):
    """Words ``[K b / 32, N]``, zeros ``[groups, N b / 32]``, scales ``[groups, N]``.

    Attributes:
        offset: Number that the first version subtracts from stored zeros.
        says_symmetric: Whether the configuration promises the middle code as the zero.
        needs_order: Whether the group index by column is stored.
    """

    shape: tuple[int, int]
    names: tuple[str, ...]
    bits: int
    group: int
    offset: int
    says_symmetric: bool
    needs_order: bool
    label: str = "GPTQ"

    @property
    def scale_name(self) -> str:
        return self.names[2]

    def codes(self, read: Read, start: int, stop: int) -> Codes:
        words = read(self.names[0], (WHOLE, slice(start, stop)))
        codes = fields(words.T, self.bits, self.shape[1])
        groups = self._order(read)
        index = torch.arange(self.shape[1]) // self.group if groups is None else groups
        zeros = self._zeros(read, start, stop).T
        scales = read(self.scale_name, (WHOLE, slice(start, stop))).float().T
        return Codes(codes - zeros[:, index], scales.contiguous(), groups)

    def is_symmetric(self, read: Read) -> bool:
        return bool((self._zeros(read, 0, self.shape[0]) == 1 << (self.bits - 1)).all())

    def scales_are_half(self, read: Read) -> bool:
        return True

    def has_order(self, read: Read) -> bool:
        return self._order(read) is not None

    def _zeros(self, read: Read, start: int, stop: int) -> Tensor:
        """Return zeros ``[groups, stop - start]``."""
        first, last = start // 32, -(-stop // 32)
        words = read(self.names[1], (WHOLE, slice(first * self.bits, last * self.bits)))
        stored = fields(words, self.bits, words.shape[1] * 32 // self.bits)
        stored = stored[:, start - 32 * first : stop - 32 * first]
        zeros = stored + self.offset & (1 << self.bits) - 1
        if self.says_symmetric and not bool((zeros == 1 << (self.bits - 1)).all()):
            raise CheckpointError(
                f"tensor {self.names[1]}: sym = true but zeros differ from "
                f"{1 << (self.bits - 1)}; allowed: equal zeros, or sym = false"
            )
        return zeros

    def _order(self, read: Read) -> Tensor | None:
        """Return the group index by column. None: adjacent columns."""
        if not self.needs_order:
            return None
        index = read(self.names[3], (WHOLE,)).long()
        num_groups = -(-self.shape[1] // self.group)
        if not bool(((index >= 0) & (index < num_groups)).all()):
            raise CheckpointError(
                f"tensor {self.names[3]} has a group outside 0 to {num_groups - 1}; "
                f"allowed: one of {num_groups} groups for a column"
            )
        plain = torch.arange(self.shape[1]) // self.group
        return None if torch.equal(index, plain) else index


def read_gptq(config: Mapping[str, object], where: str, model: RawModel) -> None:
    """Take all modules.

    Raises:
        CheckpointError: A setting or a tensor does not fit.
    """
    bits = setting(config, "bits", (2, 3, 4, 8), where, None)
    symmetric = setting(config, "sym", (True, False), where, True)
    ordered = setting(config, "desc_act", (True, False), where, False)
    key = "checkpoint_format" if config.get("checkpoint_format") is not None else "format"
    version = setting(config, key, _FORMATS, where, "gptq")
    if config.get("dynamic"):
        raise CheckpointError(
            f"{where}: quantization_config.dynamic is not read; allowed: equal settings for all "
            "modules"
        )
    assert isinstance(bits, int)
    group = group_size(config, where)
    for module in model.modules("qweight"):
        names = tuple(f"{module}.{each}" for each in ("qweight", "qzeros", "scales", "g_idx"))
        shape = model.tensors[names[0]].shape
        if len(shape) != 2 or 0 in shape or shape[0] * 32 % bits:
            raise model.error(names[0], f"has shape {list(shape)}", f"words of {bits} bits")
        columns, rows = shape[0] * 32 // bits, shape[1]
        own = columns if group == -1 else group
        if columns % own or rows * bits % 32:
            raise model.error(
                names[0],
                f"has {rows} outputs and {columns} inputs",
                f"inputs in groups of {own}, and outputs that fill words",
            )
        model.take(names[0], ("I32",), shape)
        model.take(names[1], ("I32",), (columns // own, rows * bits // 32))
        model.take(names[2], ("F16",), (columns // own, rows))
        has_order = names[3] in model.tensors
        if has_order or (ordered and group != -1):
            model.take(names[3], ("I32", "I64"), (columns,))
        weight = GptqTensor(
            (rows, columns),
            names if has_order else names[:3],
            bits,
            own,
            offset=int(version == "gptq"),
            says_symmetric=bool(symmetric),
            needs_order=has_order,
        )
        model.add(module, weight)
