"""Tenstorrent boards as targets: passes, numeric contract, programs and the emulated executable."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.fx import GraphModule

from tilewright.compiler.formats.block_float import TILE
from tilewright.compiler.ir.info import NodeInfo
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.mesh import Mesh
from tilewright.compiler.passes.fuse_rope_attention import fuse_rope_attention
from tilewright.compiler.passes.gather_before_norm import gather_before_norm
from tilewright.compiler.passes.merge_qkv import merge_qkv
from tilewright.compiler.precision.names import MIXED
from tilewright.compiler.targets.contract.build import build_contract
from tilewright.compiler.targets.contract.record import (
    HONOURED,
    NOT_HONOURED,
    Meaning,
    Meanings,
    NumericContract,
)
from tilewright.compiler.targets.host.tensor_files import save_tensors
from tilewright.compiler.targets.interface.base import (
    BuiltProgram,
    CompileOptions,
    Emission,
    Executable,
    Progress,
    Stage,
    Target,
    WeightStorage,
)
from tilewright.compiler.targets.pipeline import MATCH, PRECISION, fuse, lower
from tilewright.compiler.targets.tenstorrent.lower.graph import lower_program
from tilewright.compiler.targets.tenstorrent.program.chips import (
    PerChip,
    axes_of,
    check_part,
    load_weight,
)
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    DECODE,
    PREFILL,
    DeviceProgram,
    tile_bytes,
)
from tilewright.compiler.targets.tenstorrent.program.memory_plan import check_memory
from tilewright.compiler.targets.tenstorrent.program.placement import (
    ACTIVATION_FORMATS,
    CACHE_FORMATS,
    PROMPT_CHUNK,
    WEIGHT_FORMATS,
    check_weight_format,
)
from tilewright.errors import (
    CheckpointError,
    CompileError,
    ConfigError,
    allowed,
    one_line,
)

_WEIGHTS = "weights.safetensors"

# The first number shards the heads and the second shards the residual stream.
MESHES: Mapping[str, Mesh] = {
    "n150": Mesh(1),
    "n300": Mesh(2),
    "t3k": Mesh(8),
    "tg": Mesh(8, 4),
    "p100": Mesh(1),
    "p150": Mesh(1),
    "p300": Mesh(2),
    "qb2": Mesh(4),
    "loudbox": Mesh(8),
    "bh-galaxy": Mesh(8, 4),
}


class BoardTarget(Target):
    """A board, or the mesh in one box."""

    is_emulated = True
    block_axis = "out"
    emits = ("program", "ttnn")

    def __init__(self, name: str) -> None:
        self.name = name
        self.mesh = MESHES[name]

    def group(self, num_groups: int) -> Mesh:
        """Return the mesh for a data-parallel group, of ``num_groups`` in the box.

        Raises:
            ConfigError: ``num_groups`` does not divide the chip count.
        """
        chips = self.mesh.num_chips
        if num_groups == 1:
            return self.mesh
        if chips % num_groups:
            counts = [str(n) for n in range(1, chips + 1) if chips % n == 0]
            raise ConfigError(
                f"{num_groups} data-parallel groups of the {chips} chips of {self.name}; "
                f"{allowed(counts)}"
            )
        return Mesh(chips // num_groups)

    def stages(self) -> tuple[Stage, ...]:
        """Return the passes. Gate and up remain separate matmuls, so that both use all cores."""
        return (
            MATCH,
            PRECISION,
            fuse(merge_qkv),
            lower(fuse_rope_attention, gather_before_norm),
        )

    def contract(self, graph_module: GraphModule, options: CompileOptions) -> NumericContract:
        return build_contract(graph_module, _MEANINGS)

    def weight_storage(
        self,
        recipe: WeightRecipe,
        facts: NodeInfo,
        *,
        compute: str,
        block: Sequence[tuple[WeightRecipe, NodeInfo]] = (),
    ) -> WeightStorage:
        """Return how a weight is stored: one copy in 32 x 32 tiles, without padding for the banks.

        Vectors and the embedding table are bfloat16.
        """
        form, group, is_product = recipe.format, facts.tensor_group, False
        assert form is not None
        if group is None or group == "embedding":
            form = "bf16"
        else:
            check_weight_format(group, form)
            is_product = True
        *experts, rows, columns = (1, *recipe.shape)[-max(2, len(recipe.shape)) :]
        tiles = math.prod(experts) * -(-rows // TILE) * -(-columns // TILE)
        return WeightStorage(
            f"{form} tiles", tiles * tile_bytes(form), "[in, out]" if is_product else ""
        )

    def programs(
        self,
        graph_module: GraphModule,
        options: CompileOptions,
        *,
        length: int | None = None,
        num_groups: int = 1,
    ) -> tuple[DeviceProgram, DeviceProgram]:
        """Return the prefill program and the decode program for a data-parallel group.

        Decode has ``options.max_batch`` users. Longer prompts run in chunks of ``PROMPT_CHUNK``
        tokens, and the memory check uses one chunk.

        Args:
            length: Prompt tokens. None: one chunk.

        Raises:
            CompileError: A graph or format has no instructions, the mesh cannot split the heads, a
                decode step has more users than a tile has rows, or the program does not fit the
                board.
        """
        if options.compute == "exact":
            raise CompileError(
                f"compute exact on target {self.name}, whose arithmetic is the board's own; "
                "allowed: fast, or --target reference"
            )
        if options.max_batch > TILE:
            raise CompileError(
                f"{options.max_batch} users of {self.name}: a decode step is one tile of rows; "
                f"allowed: 1 to {TILE} a data-parallel group"
            )
        mesh = self.group(num_groups)

        def lowered(phase: str, batch: int, length: int) -> DeviceProgram:
            return lower_program(
                graph_module,
                device=self.name,
                mesh=mesh,
                phase=phase,
                batch=batch,
                length=length,
                context=options.max_context,
            )

        chunk = lowered(PREFILL, 1, min(length or PROMPT_CHUNK, PROMPT_CHUNK, options.max_context))
        decode = lowered(DECODE, options.max_batch, 1)
        check_memory(chunk, decode)
        if length is not None and length > chunk.length:
            return lowered(PREFILL, 1, length), decode
        return chunk, decode

    def build(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        folder: Path,
        options: CompileOptions,
        progress: Progress,
    ) -> None:
        # Loading checks the cache capacity for the served context.
        _, decode = self.programs(graph_module, replace(options, max_context=1))
        per_chip = self._load_weights(decode, get_weight, progress)
        parts = {
            f"{name}@{row}.{column}": part
            for name, weight in per_chip.items()
            for (row, column), part in weight.parts().items()
        }
        save_tensors(parts, folder / _WEIGHTS)

    def emit(self, kind: str, emission: Emission) -> None:
        """Write a ``ttnn`` Python file and its weights.

        The file serves ``options.max_batch`` users with ``options.max_context`` positions.
        """
        self.check_emits(kind)
        assert kind == "ttnn"
        from tilewright.compiler.targets.tenstorrent.emit_ttnn.emit import (
            emit_ttnn,
            prompt_length,
            write_weights,
        )

        graph_module, options = emission.lower(self.stages()), emission.options
        length = prompt_length(options.max_context)
        prefill, decode = self.programs(graph_module, options, length=length)
        emission.write("model.py", emit_ttnn(prefill, decode, title=emission.title).encode())
        write_weights(decode, emission.get_weight, emission.folder)

    def load(
        self, program: BuiltProgram, options: CompileOptions, progress: Progress
    ) -> Executable:
        _check_emulator()
        graph_module, path = program.graph(), program.folder / _WEIGHTS
        prefill, decode = self.programs(graph_module, options)
        progress("weights", 0, 1)
        per_chip = {}
        try:
            parts = load_file(path)
            for weight in decode.weights:
                per_chip[weight.name] = PerChip(self.mesh, axes_of(weight))
                for chip in per_chip[weight.name].chips():
                    name = f"{weight.name}@{chip[0]}.{chip[1]}"
                    per_chip[weight.name][chip] = check_part(weight, name, parts[name])
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{path}: not the weights of this graph: {one_line(error)}"
            ) from None
        progress("weights", 1, 1)
        return _executable(prefill, decode, per_chip, options, program.contract)

    def compile(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        options: CompileOptions,
        progress: Progress,
    ) -> Executable:
        """Shard the weights in memory, without a directory."""
        _check_emulator()
        prefill, decode = self.programs(graph_module, options)
        per_chip = self._load_weights(decode, get_weight, progress)
        return _executable(prefill, decode, per_chip, options, self.contract(graph_module, options))

    def _load_weights(
        self,
        decode: DeviceProgram,
        get_weight: Callable[[str], Tensor],
        progress: Progress,
    ) -> dict[str, PerChip]:
        per_chip, weights = {}, decode.weights
        for done, weight in enumerate(weights):
            per_chip[weight.name] = load_weight(weight, self.mesh, get_weight)
            progress("weights", done + 1, len(weights))
        return per_chip


def _check_emulator() -> None:
    """Check before weights are read that this machine can emulate a board.

    Raises:
        CompileError: A dependency is missing.
    """
    from tilewright.compiler.targets.tenstorrent.emulate.matrix_unit import accumulator
    from tilewright.compiler.targets.tenstorrent.executable import emulation_device

    accumulator(emulation_device())


def _executable(
    prefill: DeviceProgram,
    decode: DeviceProgram,
    weights: Mapping[str, PerChip],
    options: CompileOptions,
    contract: NumericContract,
) -> Executable:
    from tilewright.compiler.targets.tenstorrent.executable import (
        EmulatedExecutable,
        emulation_device,
    )

    device = emulation_device()
    for per_chip in weights.values():
        for chip, part in list(per_chip.parts().items()):
            per_chip[chip] = part.to(device)
    return EmulatedExecutable(prefill, decode, weights, options, contract)


def _weight(name: str, axis: str) -> Meaning:
    if name not in WEIGHT_FORMATS:
        return Meaning(NOT_HONOURED, "refused")
    if name == "bf16":
        return Meaning(HONOURED, name)
    return Meaning(HONOURED if axis == "out" else NOT_HONOURED, f"{name} blocks along out")


def _storage(name: str, formats: tuple[str, ...]) -> Meaning:
    return Meaning(HONOURED, name) if name in formats else Meaning(NOT_HONOURED, "refused")


def _fidelity(format_: str, axis: str, fidelity: str, phase: str) -> Meaning:
    return Meaning(HONOURED, fidelity)


_MEANINGS = Meanings(
    weight=_weight,
    fidelity=_fidelity,
    attention=lambda fidelity, phase: Meaning(HONOURED, fidelity),
    kv_cache=lambda name: _storage(name, CACHE_FORMATS),
    activation=lambda name: _storage(name, (*ACTIVATION_FORMATS, MIXED)),
    v_cache=lambda name: _storage(name, CACHE_FORMATS),
)
