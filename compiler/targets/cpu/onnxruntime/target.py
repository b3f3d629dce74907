"""CPU target with fused operators of ONNX Runtime: a model, a session and contiguous caches."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from torch import Tensor
from torch.fx import GraphModule

from tilewright.compiler.ir.info import NodeInfo
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.state import StateSpec
from tilewright.compiler.passes.fuse_add_rms_norm import fuse_add_rms_norm
from tilewright.compiler.passes.fuse_experts import fuse_experts
from tilewright.compiler.passes.fuse_rope_attention import fuse_rope_attention
from tilewright.compiler.passes.fuse_swiglu_packed import fuse_swiglu_packed
from tilewright.compiler.passes.merge_parallel_linears import merge_parallel_linears
from tilewright.compiler.targets.contract.build import build_contract
from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.cpu.onnxruntime.numerics import (
    check_fidelities,
    meanings,
    weight_storage,
)
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


class CpuTarget(Target):
    """Target with the fusions of ONNX Runtime."""

    name = "cpu"
    is_cached = True
    emits = ("program", "onnx")

    def stages(self) -> tuple[Stage, ...]:
        return (
            MATCH,
            PRECISION,
            fuse(fuse_experts, merge_parallel_linears, fuse_swiglu_packed, fuse_add_rms_norm),
            lower(fuse_rope_attention),
        )

    def contract(self, graph_module: GraphModule, options: CompileOptions) -> NumericContract:
        return build_contract(graph_module, meanings(options.compute == "exact"))

    def weight_storage(
        self,
        recipe: WeightRecipe,
        facts: NodeInfo,
        *,
        compute: str,
        block: Sequence[tuple[WeightRecipe, NodeInfo]] = (),
    ) -> WeightStorage:
        """Return blocks for matmuls with int8 activations, bfloat16 for tables, else float32."""
        return weight_storage(recipe, facts, exact=compute == "exact", block=block)

    def state_storage(self, spec: StateSpec, *, compute: str) -> WeightStorage:
        """Return the state storage. ONNX Runtime stores floats only."""
        return WeightStorage("float32", 4 * math.prod(spec.shape))

    def build(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        folder: Path,
        options: CompileOptions,
        progress: Progress,
    ) -> None:
        from tilewright.compiler.targets.cpu.onnxruntime.model_file import write_model

        check_fidelities(graph_module, exact=options.compute == "exact")
        write_model(graph_module, get_weight, folder, options, progress)

    def emit(self, kind: str, emission: Emission) -> None:
        """Write kind ``onnx``: the program, and a script that only needs onnxruntime."""
        self.check_emits(kind)
        assert kind == "onnx"
        from tilewright.compiler.targets.cpu.onnxruntime import generate

        graph_module = emission.lower(self.stages())
        given = emission.get_weight, emission.folder, emission.options, emission.progress
        self.build(graph_module, *given)
        emission.write("generate.py", Path(generate.__file__).read_bytes())

    def load(
        self, program: BuiltProgram, options: CompileOptions, progress: Progress
    ) -> Executable:
        from tilewright.compiler.targets.cpu.onnxruntime.executable import CpuExecutable
        from tilewright.compiler.targets.cpu.onnxruntime.model_file import open_model

        progress("session", 0, 1)
        model = open_model(program.folder, options)
        progress("session", 1, 1)
        return CpuExecutable(model, options, program.contract)
