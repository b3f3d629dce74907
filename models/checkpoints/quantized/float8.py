"""FP8 weights: e4m3 codes with a scale per tensor, per row, or per block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.formats import FP8, STORED_NAMES, ScaledEncoded
from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.quantized.base import (
    WHOLE,
    QuantizedTensor,
    RawModel,
    Read,
    setting,
)
from tilewright.models.config import MAX_EXPERTS

CODES = "F8_E4M3"
_SCALES = ("F32", "BF16", "F16", "F8_E8M0", "U8")
_ACTIVATIONS = ("activation_scale", "input_scale")


@dataclass(frozen=True, slots=True)
class Float8Tensor(QuantizedTensor):
    """Codes ``[N, K]`` times scales ``[ceil(N / rows), ceil(K / columns)]``.

    Attributes:
        is_exponent: Whether a scale is stored as its exponent, with a bias of 127.
    """

    shape: tuple[int, int]
    label: str
    names: tuple[str, ...]
    block: tuple[int, int]
    is_exponent: bool = False
    runs_on_device = True

    def values(self, read: Read, start: int, stop: int) -> Tensor:
        codes = self._codes(read, start, stop).view(torch.float8_e4m3fn).float()
        height, width = self.block
        scales = self._scales(read)[torch.arange(start, stop) // height]
        return codes * scales.repeat_interleave(width, dim=1)[:, : self.shape[1]]

    def stored_type(self, read: Read) -> str:
        scales = self._scales(read).abs()
        is_normal = (scales >= 2.0**-100) & (scales <= 2.0**100)  # of products too, in bfloat16
        is_power = (torch.frexp(scales)[0] == 0.5) & is_normal | (scales == 0)
        return f"{self.label}, powers of two" if bool(is_power.all()) else self.label

    def stored(self, read: Read, start: int, stop: int) -> tuple[str, Tensor]:
        codes = self._codes(read, start, stop)
        height, width = self.block
        starts = torch.arange(0, self.shape[1], FP8.block)
        scales = self._scales(read)[torch.arange(start, stop) // height][:, starts // width]
        blocks = FP8.pack_encoded(ScaledEncoded(codes, scales, -1))
        return STORED_NAMES[FP8.name], blocks.view(stop - start, -1)

    def _codes(self, read: Read, start: int, stop: int) -> Tensor:
        codes = read(self.names[0], (slice(start, stop), WHOLE)).view(torch.uint8)
        if bool((codes & 0x7F == 0x7F).any()):
            raise CheckpointError(f"tensor {self.names[0]} has NaN; allowed: finite values")
        return codes

    def _scales(self, read: Read) -> Tensor:
        stored = read(self.names[1], ())
        if not self.is_exponent:
            scales = stored.float()
        else:
            scales = powers_of_two(stored.view(torch.uint8))
        if not bool(scales.isfinite().all()):
            raise CheckpointError(
                f"tensor {self.names[1]} has a scale that is inf or NaN; allowed: finite scales"
            )
        height, width = self.block
        grid = -(-self.shape[0] // height), -(-self.shape[1] // width)
        return scales.reshape(grid)


@dataclass(frozen=True, slots=True)
class ExpertFloat8(QuantizedTensor):
    """An expert in stacked codes ``[E, N, K]`` with scales ``[E, ...]``.

    Attributes:
        stack: The expert's whole matrix.
        expert: Expert index.
        first: First output in the matrix.
        num_shares: Weights in the stored tensors.
    """

    shape: tuple[int, int]
    label: str
    names: tuple[str, ...]
    stack: Float8Tensor
    expert: int
    first: int
    num_shares: int
    runs_on_device = True

    def values(self, read: Read, start: int, stop: int) -> Tensor:
        return self.stack.values(self._own(read), self.first + start, self.first + stop)

    def stored_type(self, read: Read) -> str:
        return self.stack.stored_type(self._own(read))

    def stored(self, read: Read, start: int, stop: int) -> tuple[str, Tensor]:
        return self.stack.stored(self._own(read), self.first + start, self.first + stop)

    def _own(self, read: Read) -> Read:
        expert = slice(self.expert, self.expert + 1)
        return lambda name, where: read(name, (expert, *where))[0]


def powers_of_two(exponents: Tensor) -> Tensor:
    """Return float32 ``2 ** (e - 127)`` for uint8 exponents, or NaN for 255.

    Every device gives the same bits.
    """
    bits = exponents.int() << 23
    bits[exponents == 0] = 1 << 22  # subnormal
    bits[exponents == 255] = 0x7FC00000
    return bits.view(torch.float32)


def read_fp8(config: Mapping[str, object], where: str, model: RawModel) -> None:
    """Take modules of ``quant_method: fp8``, with scales per tensor or per block.

    Raises:
        CheckpointError: A setting or a tensor does not fit.
    """
    setting(config, "activation_scheme", ("dynamic", "static", None), where, None)
    setting(config, "fmt", ("e4m3", None), where, None)
    block = config.get("weight_block_size")
    if block is not None and (
        not isinstance(block, list)
        or len(block) != 2
        or not all(type(size) is int and 1 <= size <= 1 << 16 for size in block)
    ):
        raise CheckpointError(
            f"{where}: quantization_config.weight_block_size = {block!r}; "
            "allowed: two sizes, or null"
        )
    if block is not None:
        for name in sorted(name for name in model.tensors if name.endswith("_proj_scale_inv")):
            _take_experts(model, name.removesuffix("_scale_inv"), (block[0], block[1]))
    for module in model.modules("weight"):
        if model.tensors[f"{module}.weight"].dtype != CODES:
            continue
        named = "weight_scale_inv" if f"{module}.weight_scale_inv" in model.tensors else None
        take_float8(
            model, module, block, named or ("weight_scale_inv" if block else "weight_scale")
        )


def _take_experts(model: RawModel, name: str, block: tuple[int, int]) -> None:
    """Take stacked experts as separate matrices."""
    stored = model.tensors[name].shape if name in model.tensors else ()
    is_odd = len(stored) == 3 and name.endswith("gate_up_proj") and stored[1] % 2
    if len(stored) != 3 or 0 in stored or stored[0] > MAX_EXPERTS or is_odd:
        wanted = f"{CODES}, experts (up to {MAX_EXPERTS}) x outputs x inputs"
        raise model.error(name, f"has shape {list(stored)}", wanted)
    count, rows, columns = stored
    scale = f"{name}_scale_inv"
    model.take(name, (CODES,), stored)
    grid = -(-rows // block[0]), -(-columns // block[1])
    taken = model.take(scale, _SCALES, (count, *grid))
    label = f"FP8 {block[0]}x{block[1]}"
    is_exponent = taken.dtype in ("F8_E8M0", "U8")
    stack = Float8Tensor((rows, columns), label, (name, scale), block, is_exponent)
    path, _, matmul = name.rpartition(".")
    matmuls = ("gate_proj", "up_proj") if matmul == "gate_up_proj" else (matmul,)
    shape, num_shares = (rows // len(matmuls), columns), count * len(matmuls)
    for expert in range(count):
        for index, own in enumerate(matmuls):
            first = index * shape[0]
            weight = ExpertFloat8(shape, label, stack.names, stack, expert, first, num_shares)
            model.add(f"{path}.{expert}.{own}", weight)


def take_float8(model: RawModel, module: str, block: list[int] | None, scale: str) -> None:
    """Take a module's codes and scales. Without a block, the scales' shape decides.

    Raises:
        CheckpointError: A tensor is missing, or has another shape or type.
    """
    codes, scale = f"{module}.weight", f"{module}.{scale}"
    shape = model.tensors[codes].shape
    if len(shape) != 2 or 0 in shape:
        raise model.error(codes, f"is {CODES} {list(shape)}", f"{CODES} of two axes, not empty")
    rows, columns = shape
    if block is not None:
        sizes = block[0], block[1]
        wanted: tuple[int, ...] = (-(-rows // sizes[0]), -(-columns // sizes[1]))
        label = f"FP8 {sizes[0]}x{sizes[1]}"
    else:
        stored = model.tensors[scale].shape if scale in model.tensors else (1,)
        is_grid, is_micro = len(stored) == 4, stored == (rows, -(-columns // 32)) != (rows, 1)
        by_row = rows > 1 and stored in ((rows,), (rows, 1))
        if is_grid:  # as modelopt stores blocks
            sizes, label = (128, 128), "FP8 128x128"
            wanted = -(-rows // 128), 1, -(-columns // 128), 1
        elif is_micro:
            sizes, label, wanted = (1, 32), "FP8 1x32", stored
        else:
            sizes = (1, columns) if by_row else (rows, columns)
            wanted = stored if by_row or stored in ((), (1,), (1, 1)) else (rows, 1)
            label = "FP8 per channel" if by_row else "FP8 per tensor"
    model.take(codes, (CODES,), shape)
    found = model.take(scale, _SCALES, wanted)
    if model.drop(*(f"{module}.{name}" for name in _ACTIVATIONS)):
        model.say_once("activations are quantized to FP8 in other engines")
    is_exponent = found.dtype in ("F8_E8M0", "U8")
    model.add(module, Float8Tensor((rows, columns), label, (codes, scale), sizes, is_exponent))
