"""The target ``cpu-native``. A bundle loads without torch: imports for graphs are local."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.compiler.ir.state import PER_TOKEN, StateSpec
from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.cpu.native.memory import REACH_BACK
from tilewright.compiler.targets.interface.base import (
    BuiltProgram,
    CompileOptions,
    Executable,
    Progress,
    Stage,
    Target,
    WeightStorage,
)

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import GraphModule

    from tilewright.compiler.ir.info import NodeInfo
    from tilewright.compiler.ir.recipe import WeightRecipe
    from tilewright.compiler.targets.cpu.native.program.assembly import Assembly
    from tilewright.compiler.targets.cpu.native.program.bundle import Packed
    from tilewright.compiler.targets.program.instructions import KernelProgram


_SHOWN = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


class NativeTarget(Target):
    """The native kernels. Fusions follow their instructions."""

    name = "cpu-native"
    is_cached = True
    has_images = has_images_on_ranks = True
    has_bidirectional_images = True
    has_cross_layers = True
    wire = "bf16"
    reach_back = REACH_BACK

    def stages(self) -> tuple[Stage, ...]:
        from tilewright.compiler.targets.cpu.native.program.stages import STAGES

        return STAGES

    def contract(self, graph_module: GraphModule, options: CompileOptions) -> NumericContract:
        from tilewright.compiler.targets.contract.build import build_contract
        from tilewright.compiler.targets.cpu.native.numerics import meanings

        return build_contract(graph_module, meanings(exact=options.compute == "exact"))

    def weight_storage(
        self,
        recipe: WeightRecipe,
        facts: NodeInfo,
        *,
        compute: str,
        block: Sequence[tuple[WeightRecipe, NodeInfo]] = (),
    ) -> WeightStorage:
        """Return how a weight is stored: in panels of 16 rows, with block codes or floats."""
        from tilewright.compiler.targets.cpu.native.numerics import (
            BLOCK_KINDS,
            VECTOR,
            storage_format,
        )
        from tilewright.compiler.targets.cpu.native.program.weights import tensor_bytes

        if facts.tensor_group is None:
            return WeightStorage("float32", tensor_bytes(recipe, VECTOR))
        kind = storage_format(recipe)
        shown = f"{kind} blocks" if kind in BLOCK_KINDS else _SHOWN[kind]
        return WeightStorage(shown, tensor_bytes(recipe, kind))

    def state_storage(self, spec: StateSpec, *, compute: str) -> WeightStorage:
        """Return the state storage. Keys and values are bfloat16, bfp8 or float32."""
        from tilewright.compiler.targets.cpu.native.numerics import FP32, cache_kind

        cache_format, _ = cache_kind(spec.format, exact=compute == "exact")
        if spec.kind == PER_TOKEN and cache_format != FP32:
            return super().state_storage(
                dataclasses.replace(spec, format=cache_format, value_format=""), compute=compute
            )
        return WeightStorage("float32", 4 * math.prod(spec.shape))

    def build(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        folder: Path,
        options: CompileOptions,
        progress: Progress,
    ) -> None:
        from tilewright.compiler.targets.cpu.native.program.assemble import pack
        from tilewright.compiler.targets.cpu.native.program.bundle import digest_of, write_packed
        from tilewright.compiler.targets.cpu.native.program.weights import write_weights
        from tilewright.compiler.targets.interface.threads import single_torch_thread

        plan, assembly = _assembled(graph_module, options)
        packed = pack(plan, assembly)
        write_packed(packed, folder)
        digest = digest_of(packed)
        with single_torch_thread():
            write_weights(list(assembly.wanted), get_weight, folder, progress, digest=digest)

    def check_room(self, graph_module: GraphModule, options: CompileOptions) -> None:
        _check(_assembled(graph_module, options)[1], options)

    def load(
        self, program: BuiltProgram, options: CompileOptions, progress: Progress
    ) -> Executable:
        from tilewright.compiler.devices import describe_cpu
        from tilewright.compiler.targets.cpu.native.executable import NativeExecutable
        from tilewright.compiler.targets.cpu.native.program.bundle import digest_of, read_packed
        from tilewright.compiler.targets.cpu.native.program.mapping import map_weights

        packed = read_packed(program.folder)
        options = _check(packed, options)
        sizes = [each.num_bytes for each in packed.tensors]
        mapped = map_weights(sizes, digest_of(packed), program.folder)
        num_threads = options.num_threads or describe_cpu().num_cores
        options = dataclasses.replace(options, num_threads=num_threads)
        kind = NativeExecutable
        if options.parallel.tensor > 1:
            from tilewright.compiler.targets.cpu.native.ranks import NativeRank

            kind = NativeRank
        return kind(packed, mapped, options, program.contract)


def _check(program: Assembly | Packed, options: CompileOptions) -> CompileOptions:
    """Check the environment and the memory. Return the options with the largest fitting batch."""
    from tilewright.compiler.targets.cpu.native.memory import (
        batch_that_fits,
        check_room,
        memory_bytes,
        windows_of,
    )
    from tilewright.compiler.targets.cpu.native.settings import check_settings

    check_settings()
    memory, windows = memory_bytes(), windows_of(program, options.max_context)
    batch = batch_that_fits(program.states, options, memory, windows)
    check_room(program.states, batch, options.max_context, memory, windows)
    return dataclasses.replace(options, max_batch=batch)


def _assembled(
    graph_module: GraphModule, options: CompileOptions
) -> tuple[KernelProgram, Assembly]:
    """Return a lowered graph's program, and its assembled instructions.

    Raises:
        CompileError: An operator has no kernel.
    """
    from tilewright.compiler.targets.cpu.native.program.assemble import assemble, rounded_products
    from tilewright.compiler.targets.program.instructions import Needs
    from tilewright.compiler.targets.program.lowering import lower_to_program

    others = "cpu --backend onnxruntime"
    needs = Needs(target="cpu", others=others, deals_experts=False, has_cross_layers=True)
    plan, exact = lower_to_program(graph_module, needs), options.compute == "exact"
    rounded = () if exact else rounded_products(graph_module)
    return plan, assemble(plan, exact=exact, rounded=rounded)
