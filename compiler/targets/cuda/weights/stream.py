"""A program's weights on a device, loaded from recipes or files, one tensor at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tilewright.compiler.ir.recipe import DecodesOnDevice, WeightRecipe, load_dense
from tilewright.compiler.targets.cuda.numerics import TABLES, format_values, storage_format
from tilewright.compiler.targets.cuda.weights.coded import pack_coded
from tilewright.compiler.targets.cuda.weights.coded_tiles import CODED_TILES, FLOAT4
from tilewright.compiler.targets.cuda.weights.experts import on_device, packed_sizes, place_experts
from tilewright.compiler.targets.cuda.weights.packed_weight import (
    EXPERT_TILE_BYTES,
    EXPONENTS,
    TILE_ROWS,
    PackedWeight,
)
from tilewright.compiler.targets.cuda.weights.packing import GROUP, fits, hold
from tilewright.compiler.targets.host.tensor_files import save_tensors
from tilewright.compiler.targets.interface.base import Progress
from tilewright.compiler.targets.program.instructions import (
    AddGatedOp,
    AllReduceAdd,
    AttentionOp,
    Convolve,
    CrossAttentionOp,
    DeltaRuleOp,
    EmbedOp,
    ExpertLinearOp,
    ExpertSum,
    KernelProgram,
    LinearOp,
    NormHeads,
    NormOp,
    TopKRouteOp,
)
from tilewright.errors import CheckpointError, one_line

_DATA, _SCALE, _SECOND = "data", "scale", "second_scales"
_SHARED = frozenset(("model.embed_tokens.weight", "lm_head.weight"))
"""Tensors of a model that its draft layer has, too. Other equal names are different tensors."""


@dataclass(frozen=True, slots=True)
class CudaTensorSpec:
    """A tensor in a program.

    Attributes:
        kind: Storage format, or ``fp32`` for norms, biases and constants.
        is_paired: Gate and up rows alternate, for a matmul with SwiGLU.
    """

    recipe: WeightRecipe
    kind: str
    is_paired: bool = False


def wanted_by(plan: KernelProgram) -> dict[CudaTensorSpec, None]:
    """Return every tensor in a program once, in first-use order."""
    return dict.fromkeys(_wanted(plan))


def draft_wanted_by(program: KernelProgram) -> dict[CudaTensorSpec, None]:
    """Return the draft layer's tensors that the model lacks."""
    if program.draft_layer is None:
        return {}
    shared = [spec for spec in wanted_by(program) if _SHARED.issuperset(spec.recipe.names)]
    return {spec: None for spec in wanted_by(program.draft_layer) if spec not in shared}


def product_of(linear: LinearOp | ExpertLinearOp | ExpertSum) -> CudaTensorSpec:
    """Return the tensor that a matmul reads."""
    is_paired = not isinstance(linear, ExpertSum) and linear.swiglu
    return CudaTensorSpec(linear.weight, storage_format(linear.weight, linear.group), is_paired)


def table_of(embed: EmbedOp) -> CudaTensorSpec:
    """Return the tensor that an embedding reads."""
    return CudaTensorSpec(embed.table, storage_format(embed.table, TABLES[0]))


def vector_of(recipe: WeightRecipe, *, is_paired: bool = False) -> CudaTensorSpec:
    """Return the tensor for a norm, a bias or a constant."""
    return CudaTensorSpec(recipe, "fp32", is_paired)


def _wanted(plan: KernelProgram) -> Iterator[CudaTensorSpec]:
    for instruction in plan.instructions:
        if isinstance(instruction, EmbedOp):
            yield table_of(instruction)
        elif isinstance(instruction, AttentionOp):
            yield vector_of(instruction.inv_freq)
            if instruction.sinks is not None:
                yield vector_of(instruction.sinks)
        elif isinstance(instruction, NormHeads):
            yield vector_of(instruction.q_norm)
            yield vector_of(instruction.k_norm)
        elif isinstance(instruction, NormOp | Convolve):
            yield vector_of(instruction.weight)
        elif isinstance(instruction, CrossAttentionOp):
            yield vector_of(instruction.norm)
        elif isinstance(instruction, AddGatedOp):
            yield vector_of(instruction.gate)
        elif isinstance(instruction, AllReduceAdd) and instruction.norm is not None:
            yield vector_of(instruction.norm)
        elif isinstance(instruction, DeltaRuleOp):
            yield from map(vector_of, (instruction.a_log, instruction.dt_bias, instruction.norm))
            if instruction.convolve is not None:
                yield vector_of(instruction.convolve.weight)
        elif isinstance(instruction, ExpertLinearOp | ExpertSum):
            yield product_of(instruction)
            if instruction.bias is not None:
                yield vector_of(instruction.bias)
        elif isinstance(instruction, TopKRouteOp) and instruction.bias is not None:
            yield vector_of(instruction.bias)
        elif isinstance(instruction, LinearOp):
            yield product_of(instruction)
            if instruction.norm is not None:
                yield vector_of(instruction.norm)
            if instruction.bias is not None:
                yield vector_of(instruction.bias, is_paired=instruction.swiglu)


Placed = PackedWeight | Tensor


class Weights:
    """A program's tensors, on its device."""

    def __init__(self, placed: dict[CudaTensorSpec, Placed]) -> None:
        self._placed = placed
        self._by_instruction: dict[int, tuple[object, PackedWeight]] = {}
        self._by_recipe: dict[int, tuple[WeightRecipe, Tensor]] = {}

    def placed(self, wanted: CudaTensorSpec) -> Placed:
        """Return a tensor."""
        return self._placed[wanted]

    def packed(self, wanted: CudaTensorSpec) -> PackedWeight:
        """Return a packed weight or table."""
        found = self._placed[wanted]
        assert isinstance(found, PackedWeight)
        return found

    def vector(self, wanted: CudaTensorSpec) -> Tensor:
        """Return a norm, a bias or a constant, float32."""
        found = self._placed[wanted]
        assert isinstance(found, Tensor)
        return found

    def bias_of(self, product: LinearOp) -> Tensor | None:
        """Return a matmul's bias in packed row order, or None."""
        if product.bias is None:
            return None
        found = self._by_recipe.get(id(product.bias))
        if found is None or found[0] is not product.bias:
            bias = self.vector(vector_of(product.bias, is_paired=product.swiglu))
            found = self._by_recipe[id(product.bias)] = product.bias, bias
        return found[1]

    def weight_of(self, each: LinearOp | ExpertLinearOp | ExpertSum | EmbedOp) -> PackedWeight:
        """Return an instruction's weight. Only the first call hashes its recipe."""
        found = self._by_instruction.get(id(each))
        if found is None or found[0] is not each:
            wanted = table_of(each) if isinstance(each, EmbedOp) else product_of(each)
            found = self._by_instruction[id(each)] = each, self.packed(wanted)
        return found[1]

    def constant(self, recipe: WeightRecipe) -> Tensor:
        """Return a norm or a constant. Only the first call hashes the recipe."""
        found = self._by_recipe.get(id(recipe))
        if found is None or found[0] is not recipe:
            found = self._by_recipe[id(recipe)] = recipe, self.vector(vector_of(recipe))
        return found[1]

    def roundings(self, *, exact: bool) -> tuple[str, ...]:
        """Return notes about codes with other values in fast arithmetic."""
        packed = (item for item in self._placed.values() if isinstance(item, PackedWeight))
        if exact or all(item.format != "nf4" for item in packed):
            return ()
        return ("rounded: values of bitsandbytes nf4 to bf16 (exact with --compute exact)",)

    @property
    def num_bytes(self) -> int:
        """Size on the device in bytes. A table shared with the LM head counts once."""
        return sum(self._sizes().values())

    def bytes_beside(self, other: Weights) -> int:
        """Return the size in bytes without tensors in ``other``."""
        sizes = self._sizes()
        return sum(sizes[key] for key in sizes.keys() - other._sizes().keys())

    def _sizes(self) -> dict[int, int]:
        values = self._placed.values()
        tensors = [value.data if isinstance(value, PackedWeight) else value for value in values]
        return {tensor.data_ptr(): tensor.nbytes for tensor in tensors}


def load_weights(
    plan: KernelProgram,
    get_weight: Callable[[str], Tensor],
    device: torch.device,
    progress: Progress,
) -> Weights:
    """Read, convert and place every tensor of a program.

    Raises:
        CheckpointError: A tensor is missing, has a different shape or is not finite.
        CompileError: Matmuls do not support a format.
    """
    wanted, get_weight = wanted_by(plan), _decoding_on(device, get_weight)
    placed: dict[CudaTensorSpec, Placed] = {}
    for done, each in enumerate(wanted):
        placed[each] = _place(each, get_weight, device)
        progress("weights", done + 1, len(wanted))
    return Weights(placed)


def load_draft_weights(
    program: KernelProgram,
    weights: Weights,
    get_weight: Callable[[str], Tensor],
    device: torch.device,
    progress: Progress,
) -> Weights:
    """Read a draft layer's tensors, without tensors in ``weights``.

    Raises:
        CheckpointError, CompileError: see :func:`load_weights`.
    """
    assert program.draft_layer is not None
    wanted, own = wanted_by(program.draft_layer), draft_wanted_by(program)
    get_weight = _decoding_on(device, get_weight)
    placed: dict[CudaTensorSpec, Placed] = {}
    for done, spec in enumerate(wanted):
        is_own = spec in own
        placed[spec] = _place(spec, get_weight, device) if is_own else weights.placed(spec)
        progress("draft layer", done + 1, len(wanted))
    return Weights(placed)


def _decoding_on(
    device: torch.device, get_weight: Callable[[str], Tensor]
) -> Callable[[str], Tensor]:
    """Return a source that decodes quantized tensors on a device, if it can."""
    if not isinstance(get_weight, DecodesOnDevice):
        return get_weight
    source: Callable[[str], Tensor] = get_weight.on(device)
    return source


def _place(
    wanted: CudaTensorSpec, get_weight: Callable[[str], Tensor], device: torch.device
) -> Placed:
    recipe, kind = wanted.recipe, wanted.kind
    if kind != "fp32" and len(recipe.shape) == 3:
        check, paired = partial(_check_fits, wanted), wanted.is_paired
        return place_experts(recipe, kind, get_weight, device, paired=paired, check=check)
    if kind in CODED_TILES:
        return pack_coded(recipe, get_weight, device, paired=wanted.is_paired)
    with torch.device(device):  # generated weights are created on this device
        dense = load_dense(recipe, on_device(get_weight, device))
    if kind == "fp32":
        return _in_turns(dense) if wanted.is_paired else dense
    names = ", ".join(wanted.recipe.names)
    packed = partial(hold, kind=kind, paired=wanted.is_paired, name_of=lambda _: names)
    if kind == "bf16":
        return packed(dense if recipe.format == "bf16" else format_values(dense, recipe))
    _check_fits(wanted, dense)
    return packed(dense)


def _check_fits(
    wanted: CudaTensorSpec, dense: Tensor, scale: float | None = None, parts: Sequence[str] = ()
) -> None:
    if not fits(dense, wanted.kind, scale=scale):
        names = ", ".join(parts or wanted.recipe.names)
        octaves = EXPONENTS[wanted.kind][1] - EXPONENTS[wanted.kind][0]
        raise CheckpointError(
            f"{names}: its blocks lie more than {octaves} octaves apart, or near the smallest "
            f"numbers there are, which kernels of {wanted.kind} do not take; allowed: bf16 for it"
        )


def _in_turns(bias: Tensor) -> Tensor:
    """Return a bias with gate and up parts interleaved, as a paired weight's rows."""
    return bias.view(2, -1, GROUP).transpose(0, 1).reshape(-1)


def write_weights(
    plan: KernelProgram, get_weight: Callable[[str], Tensor], folder: Path, progress: Progress
) -> None:
    """Write every tensor of a program to a separate file in ``folder``.

    Raises:
        NoRoomError: The files cannot be written.
    """
    wanted = wanted_by(plan)
    for done, spec in enumerate(wanted):
        placed = _place(spec, get_weight, torch.device("cpu"))
        save_tensors(_tensors(placed), _file(folder, done))
        progress("weights", done + 1, len(wanted))


def _tensors(placed: Placed) -> dict[str, Tensor]:
    """Return a tensor's file contents."""
    if isinstance(placed, PackedWeight):
        name = _data_name(placed.format)
        tensors = {name: placed.data.contiguous(), _SCALE: torch.tensor(placed.scale)}
        if placed.second_scales is not None:
            tensors[_SECOND] = placed.second_scales
        return tensors
    return {_DATA: placed.contiguous(), _SCALE: torch.tensor(1.0)}


def _data_name(format_name: str) -> str:
    """Return the name of a tensor's data in its file. An old order of codes has another."""
    tile = CODED_TILES.get(format_name)
    has_halves = tile is not None and tile.low_bits == 8
    is_float4 = format_name in EXPERT_TILE_BYTES or (tile is not None and tile.values == FLOAT4)
    return "rotated" if is_float4 else "halves" if has_halves else _DATA


def read_weights(
    plan: KernelProgram, folder: Path, device: torch.device, progress: Progress
) -> Weights:
    """Read the files of :func:`write_weights` to a device.

    Raises:
        CheckpointError: A file is missing or belongs to a different program.
    """
    wanted = wanted_by(plan)
    placed: dict[CudaTensorSpec, Placed] = {}
    for done, spec in enumerate(wanted):
        path = _file(folder, done)
        try:
            tensors = load_file(path, device=str(device))
            data, scale = tensors[_data_name(spec.kind)], float(tensors[_SCALE])
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise CheckpointError(
                f"{path}: not a weight of this program ({one_line(error)})"
            ) from None
        placed[spec] = _as_placed(spec, data, scale, path, tensors.get(_SECOND))
        progress("weights", done + 1, len(wanted))
    return Weights(placed)


def _as_placed(
    wanted: CudaTensorSpec, data: Tensor, scale: float, path: Path, second_scales: Tensor | None
) -> Placed:
    shape = wanted.recipe.shape
    if wanted.kind == "fp32":
        if tuple(data.shape) != shape or data.dtype != torch.float32:
            raise CheckpointError(f"{path}: not a weight of this program; compile it again")
        return data
    num_experts, rows, columns = packed_sizes(wanted.recipe, paired=wanted.is_paired)
    packed = PackedWeight(
        wanted.kind, rows, columns, data, wanted.is_paired, scale, num_experts, second_scales
    )
    is_whole = scale > 0 and math.frexp(scale)[0] == 0.5
    if wanted.kind in CODED_TILES and CODED_TILES[wanted.kind].values == FLOAT4:
        length = TILE_ROWS * len(data)
        is_whole = second_scales is not None and tuple(second_scales.shape) == (length,)
    if tuple(data.shape) != packed.data_shape or data.dtype != packed.data_type or not is_whole:
        raise CheckpointError(f"{path}: not a weight of this program; compile it again")
    return packed


def _file(folder: Path, index: int) -> Path:
    return folder / f"weight-{index:05d}.safetensors"
