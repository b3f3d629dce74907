"""CPUs, through a library of our own: packed panels, one parallel region a step.

A row's bits depend neither on the batch it is in nor on how its prompt was cut.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from torch.fx import GraphModule

from tilewright.compiler.ir.info import NodeInfo
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.state import PER_TOKEN, StateSpec
from tilewright.compiler.passes.fuse_all_reduce_add import fuse_all_reduce_add
from tilewright.compiler.passes.fuse_delta_norm import fuse_delta_norm
from tilewright.compiler.passes.fuse_expert_sum import fuse_expert_sum
from tilewright.compiler.passes.fuse_linear_residual import fuse_linear_residual
from tilewright.compiler.passes.fuse_linear_swiglu import fuse_linear_swiglu
from tilewright.compiler.passes.fuse_norm_linear import fuse_norm_linear
from tilewright.compiler.passes.fuse_rope_attention import fuse_rope_attention
from tilewright.compiler.passes.fuse_swiglu_packed import fuse_swiglu_packed
from tilewright.compiler.passes.gather_before_norm import gather_before_norm
from tilewright.compiler.passes.merge_delta_gates import merge_delta_gates
from tilewright.compiler.passes.merge_expert_linears import merge_expert_linears
from tilewright.compiler.passes.merge_parallel_linears import merge_parallel_linears
from tilewright.compiler.targets.base import (
    CompileOptions,
    Executable,
    Holding,
    Program,
    Progress,
    Stage,
    Target,
)
from tilewright.compiler.targets.contract import NumericContract, build_contract
from tilewright.compiler.targets.cpu.native.numerics import (
    BLOCK_KINDS,
    FP32,
    VECTOR,
    cache_kind,
    held_kind,
    meanings,
)
from tilewright.compiler.targets.pipeline import MATCH, PRECISION, fuse, lower

if TYPE_CHECKING:
    from tilewright.compiler.targets.program.instructions import Plan


class NativeTarget(Target):
    """Fusions after what the kernels do in one instruction."""

    name = "cpu-native"
    is_cached = True
    wire = "bf16"

    def stages(self) -> tuple[Stage, ...]:
        return (
            MATCH,
            PRECISION,
            fuse(
                merge_parallel_linears,
                merge_delta_gates,
                fuse_swiglu_packed,
                fuse_linear_swiglu,
                fuse_all_reduce_add,
                fuse_linear_residual,
                merge_expert_linears,
                fuse_expert_sum,
            ),
            lower(fuse_delta_norm, fuse_rope_attention, gather_before_norm, fuse_norm_linear),
        )

    def contract(self, graph_module: GraphModule, options: CompileOptions) -> NumericContract:
        return build_contract(graph_module, meanings(exact=options.compute == "exact"))

    def holding(
        self,
        recipe: WeightRecipe,
        facts: NodeInfo,
        *,
        compute: str,
        block: Sequence[tuple[WeightRecipe, NodeInfo]] = (),
    ) -> Holding:
        """Whole panels of 16 rows, in the format's blocks, bfloat16 or float32."""
        from tilewright.compiler.targets.cpu.native.weights import tensor_bytes

        if facts.tensor_group is None:
            return Holding("float32", tensor_bytes(recipe, VECTOR))
        kind = held_kind(recipe)
        shown = (
            f"{kind} blocks" if kind in BLOCK_KINDS else {"bf16": "bfloat16"}.get(kind, "float32")
        )
        return Holding(shown, tensor_bytes(recipe, kind))

    def state_holding(self, spec: StateSpec, *, compute: str) -> Holding:
        """Keys and values as they are held: bfloat16, blocks of bfp8, or float32."""
        held, _ = cache_kind(spec.format, exact=compute == "exact")
        if spec.kind == PER_TOKEN and held != FP32:
            return super().state_holding(dataclasses.replace(spec, format=held), compute=compute)
        return Holding("float32", 4 * math.prod(spec.shape))

    def build(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        folder: Path,
        options: CompileOptions,
        progress: Progress,
    ) -> None:
        from tilewright.compiler.targets.cpu.native.assemble import assemble
        from tilewright.compiler.targets.cpu.native.weights import write_weights
        from tilewright.compiler.targets.threads import single_torch_thread

        assembly = assemble(_plan(graph_module), exact=options.compute == "exact")
        with single_torch_thread():
            write_weights(list(assembly.wanted), get_weight, folder, progress)

    def load(self, program: Program, options: CompileOptions, progress: Progress) -> Executable:
        from tilewright.compiler.devices import describe_cpu
        from tilewright.compiler.targets.cpu.native.assemble import assemble
        from tilewright.compiler.targets.cpu.native.executable import NativeExecutable
        from tilewright.compiler.targets.cpu.native.room import check_room, memory_bytes
        from tilewright.compiler.targets.cpu.native.weights import map_weights

        plan = _plan(program.sketch())
        assembly = assemble(plan, exact=options.compute == "exact")
        check_room(assembly.states, options.max_batch, options.max_context, memory_bytes())
        mapped = map_weights(list(assembly.wanted), program.folder)
        num_threads = options.num_threads or describe_cpu().num_cores
        options = dataclasses.replace(options, num_threads=num_threads)
        kind = NativeExecutable
        if options.parallel.tensor > 1:
            from tilewright.compiler.targets.cpu.native.ranks import NativeRank

            kind = NativeRank
        return kind(plan, assembly, mapped, options, program.contract)


def _plan(graph_module: GraphModule) -> Plan:
    """The plan of a graph of this target's last stage.

    Raises:
        CompileError: for an operator that has no kernel here.
    """
    from tilewright.compiler.targets.program.instructions import Needs
    from tilewright.compiler.targets.program.plan import make_plan

    needs = Needs(target="cpu", others="cpu --backend onnxruntime", deals_experts=False)
    return make_plan(graph_module, needs)
