"""compressed-tensors: FP8, bytes, and packed integers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.quantized.base import WHOLE, RawModel, Read, setting
from tilewright.models.checkpoints.quantized.float4 import MXFP4, NVFP4, take_float4
from tilewright.models.checkpoints.quantized.float8 import CODES, take_float8
from tilewright.models.checkpoints.quantized.groups import Scheme, Schemes
from tilewright.models.checkpoints.quantized.integers import Codes, IntegerTensor, fields

_SCALES = ("F32", "BF16", "F16")
_FORMATS = (
    *("float-quantized", "int-quantized", "pack-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mixed-precision", "dense"),
    "mxfp8-quantized",
)
_LABEL = "compressed-tensors"


@dataclass(frozen=True, slots=True)
class CompressedTensor(IntegerTensor):
    """Codes in words or bytes ``[N, ...]``, scales ``[N, groups]``, and zeros if not symmetric.

    Attributes:
        zeros: Tensor name. None: the middle code.
        order: Tensor name for the group index by column. None: adjacent columns.
        is_packed: Whether codes are bit fields in words. Otherwise a code is a byte.
    """

    shape: tuple[int, int]
    names: tuple[str, ...]
    bits: int
    group: int
    zeros: str | None
    order: str | None
    is_packed: bool
    label: str = _LABEL

    def codes(self, read: Read, start: int, stop: int) -> Codes:
        rows, columns = slice(start, stop), self.shape[1]
        stored = read(self.names[0], (rows, WHOLE))
        middle = 1 << (self.bits - 1)
        codes = fields(stored, self.bits, columns) - middle if self.is_packed else stored.short()
        groups = self._order(read)
        if self.zeros is not None:
            index = torch.arange(columns) // self.group if groups is None else groups
            codes -= self._zeros(read, self.zeros, start, stop)[:, index]
        scales = read(self.names[1], ()).float().reshape(-1, self._num_groups)
        scales = scales.expand(self.shape[0], -1)[rows].contiguous()
        return Codes(codes, scales, groups)

    def is_symmetric(self, read: Read) -> bool:
        return self.zeros is None

    def has_order(self, read: Read) -> bool:
        return self._order(read) is not None

    @property
    def _num_groups(self) -> int:
        return -(-self.shape[1] // self.group)

    def _zeros(self, read: Read, name: str, start: int, stop: int) -> Tensor:
        if not self.is_packed:
            zeros = read(name, ()).short().reshape(-1, self._num_groups)
            return zeros.expand(self.shape[0], -1)[start:stop]
        first, last = start // 32, -(-stop // 32)
        words = read(name, (slice(first * self.bits, last * self.bits), WHOLE)).T
        found = fields(words, self.bits, words.shape[1] * 32 // self.bits)
        own = found[:, start - 32 * first : stop - 32 * first]
        return own.T - (1 << (self.bits - 1))

    def _order(self, read: Read) -> Tensor | None:
        if self.order is None:
            return None
        index = read(self.order, (WHOLE,)).long()
        if not bool(((index >= 0) & (index < self._num_groups)).all()):
            raise CheckpointError(
                f"tensor {self.order} has a group outside 0 to {self._num_groups - 1}; "
                f"allowed: one of {self._num_groups} groups for a column"
            )
        plain = torch.arange(self.shape[1]) // self.group
        return None if torch.equal(index, plain) else index


def read_compressed(config: Mapping[str, object], where: str, model: RawModel) -> None:
    """Take all compressed modules.

    Raises:
        CheckpointError: A setting or a tensor does not fit.
    """
    setting(config, "quantization_status", ("compressed", None), where, None)
    setting(config, "format", _FORMATS, where, "dense")
    for key in ("transform_config", "sparsity_config"):
        if config.get(key):
            raise CheckpointError(
                f"{where}: quantization_config.{key} is not read; allowed: weights without it"
            )
    schemes = Schemes(config, where)
    packed = {
        module: schemes.of(model, module, f"{module}.weight_packed")
        for module in model.modules("weight_packed")
    }
    ordered = {packed[m].where for m in model.modules("weight_g_idx") if m in packed}
    for module, scheme in packed.items():
        if model.tensors[f"{module}.weight_packed"].dtype == "U8":
            _take_pairs(model, module, scheme)
        else:
            _take_packed(model, module, scheme, has_order=scheme.where in ordered)
    for module in model.modules("weight"):
        dtype = model.tensors[f"{module}.weight"].dtype
        if dtype == "I8":
            _take_bytes(model, module, schemes.of(model, module, f"{module}.weight"))
        elif dtype == CODES:
            scheme = schemes.of(model, module, f"{module}.weight")
            outputs = (*model.tensors[f"{module}.weight"].shape, 0)[0]
            scheme.check_scale(model, f"{module}.weight_scale", outputs)
            take_float8(model, module, _block_of(model, module, scheme), "weight_scale")
    if config.get("kv_cache_scheme"):
        model.notes.append(f"{where}: kv_cache_scheme is not used; the cache keeps its own format")


def _take_pairs(model: RawModel, module: str, scheme: Scheme) -> None:
    second = "weight_global_scale"
    has_second = f"{module}.{second}" in model.tensors
    stored = model.tensors.get(f"{module}.weight_scale")
    named = second if has_second or (stored is not None and stored.dtype == CODES) else None
    block = MXFP4 if named is None else NVFP4
    if scheme.group_size not in (None, block):
        raise model.error(f"{module}.weight_packed", f"has {scheme.where}.group_size", str(block))
    take_float4(model, module, "weight_packed", "weight_scale", named, divides=True)


def _take_packed(model: RawModel, module: str, scheme: Scheme, *, has_order: bool) -> None:
    packed, scale = f"{module}.weight_packed", f"{module}.weight_scale"
    model.take(f"{module}.weight_shape", ("I64", "I32"), (2,))
    rows, columns = (int(size) for size in model.read(f"{module}.weight_shape", ()))
    stored, bits = model.tensors[packed].shape, scheme.bits
    if rows < 1 or columns < 1:
        raise model.error(f"{module}.weight_shape", f"has {[rows, columns]}", "rows and columns")
    scheme.check_parts(model, module, has_order=has_order)
    scheme.check_scale(model, scale, rows)
    num_words = -(-columns * bits // 32)
    if stored != (rows, num_words):
        what = f"has shape {list(stored)} for weight_shape {[rows, columns]}"
        raise model.error(packed, what, f"words of {bits} bits")
    groups = columns // scheme.columns_per_scale(model, scale, columns)
    order = f"{module}.weight_g_idx"
    has_order = order in model.tensors
    model.take(packed, ("I32",), (rows, num_words))
    model.take(scale, _SCALES, scheme.scale_shape(model, scale, rows, groups))
    if has_order:
        model.take(order, ("I32", "I64"), (columns,))
    zeros = f"{module}.weight_zero_point"
    has_zeros = zeros in model.tensors
    if has_zeros:
        model.take(zeros, ("I32",), (-(-rows * bits // 32), groups))
    _add(
        model,
        module,
        (rows, columns),
        (packed, scale),
        bits,
        groups,
        zeros if has_zeros else None,
        order if has_order else None,
        is_packed=True,
    )


def _take_bytes(model: RawModel, module: str, scheme: Scheme) -> None:
    codes, scale = f"{module}.weight", f"{module}.weight_scale"
    shape = model.tensors[codes].shape
    if len(shape) != 2:
        raise model.error(codes, f"is I8 {list(shape)}", "I8 of two axes")
    rows, columns = shape
    if not columns:
        raise model.error(codes, f"is I8 {list(shape)}", "columns")
    scheme.check_parts(model, module)
    scheme.check_scale(model, scale, rows)
    groups = columns // scheme.columns_per_scale(model, scale, columns)
    wanted = scheme.scale_shape(model, scale, rows, groups)
    model.take(codes, ("I8",), shape)
    model.take(scale, _SCALES, wanted)
    zeros = f"{module}.weight_zero_point"
    has_zeros = zeros in model.tensors
    if has_zeros:
        model.take(zeros, ("I8",), wanted)
    if model.drop(f"{module}.input_scale", f"{module}.input_zero_point"):
        model.say_once("activations are quantized in other engines")
    _add(
        model,
        module,
        (rows, columns),
        (codes, scale),
        8,
        groups,
        zeros if has_zeros else None,
        None,
        is_packed=False,
    )


def _add(
    model: RawModel,
    module: str,
    shape: tuple[int, int],
    names: tuple[str, ...],
    bits: int,
    groups: int,
    zeros: str | None,
    order: str | None,
    *,
    is_packed: bool,
) -> None:
    parts = (*names, *(name for name in (zeros, order) if name is not None))
    group = shape[1] // groups
    model.add(module, CompressedTensor(shape, parts, bits, group, zeros, order, is_packed))


def _block_of(model: RawModel, module: str, scheme: Scheme) -> list[int] | None:
    """Return the rows and columns of a scale. None: a scale for a tensor, or per channel.

    Raises:
        CheckpointError: The scales are a grid of unknown blocks.
    """
    scale = f"{module}.weight_scale"
    shape = model.tensors[scale].shape if scale in model.tensors else ()
    if scheme.block is not None:
        return list(scheme.block)
    columns = (*model.tensors[f"{module}.weight"].shape, 1, 1)[1]
    if scheme.group_size is not None and columns:
        return [1, scheme.columns_per_scale(model, scale, columns)]
    if len(shape) == 2 and shape[1] > 1:
        raise model.error(scale, f"is a grid {list(shape)}", f"block_structure in {scheme.where}")
    return None
