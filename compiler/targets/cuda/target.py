"""NVIDIA GPU target: fused kernels over paged caches, with one CUDA graph for a decode step.

Tests run the same kernels on a CPU in Triton's interpreter, with the fixes in
tests/targets/interpreter.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor
from torch.fx import GraphModule

from tilewright.compiler.ir.info import NodeInfo, info
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.state import PER_TOKEN, StateSpec
from tilewright.compiler.passes.assign_precision import assign_target_formats
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
from tilewright.compiler.targets.contract.build import build_contract
from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.cuda.numerics import (
    cache_kind,
    meanings,
    target_format,
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
from tilewright.distributed.parallel import ParallelConfig
from tilewright.errors import CompileError, allowed
from tilewright.utils.removed_variables import check_environment

if TYPE_CHECKING:
    from pathlib import Path

    import torch

    from tilewright.compiler.targets.cuda.executable import CudaExecutable
    from tilewright.compiler.targets.cuda.kernels.common.table import Gpu
    from tilewright.compiler.targets.cuda.weights.stream import Weights
    from tilewright.compiler.targets.program.instructions import KernelProgram


TARGET_PRECISION = replace(PRECISION, passes=(assign_target_formats(target_format),))


class CudaTarget(Target):
    """The CUDA target. Its fusions match the kernels."""

    name = "cuda"
    emits = ("program", "engine")
    has_images = True
    has_cross_layers = True
    has_bidirectional_images = True

    def tower_device(self) -> str:
        """Return the current GPU. With Triton's interpreter, return the CPU."""
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"

    def stages(self) -> tuple[Stage, ...]:
        return (
            MATCH,
            TARGET_PRECISION,
            fuse(
                merge_parallel_linears,
                merge_delta_gates,
                fuse_swiglu_packed,
                fuse_linear_swiglu,
                fuse_linear_residual,
                merge_expert_linears,
                fuse_expert_sum,
            ),
            lower(
                fuse_delta_norm,
                fuse_rope_attention,
                fuse_all_reduce_add,
                gather_before_norm,
                fuse_norm_linear,
            ),
        )

    def settled(self, options: CompileOptions) -> ParallelConfig:
        """See `Target`. Sums over ranks are sent as fp32 or bf16.

        Raises:
            CompileError: The kernels do not support the message format.
        """
        from tilewright.compiler.targets.cuda.collectives.all_reduce import WIRES

        parallel = super().settled(options)
        if parallel.tensor > 1 and parallel.wire not in WIRES:
            raise CompileError(f"wire {parallel.wire} on target cuda; {allowed(WIRES)}")
        return parallel

    def contract(self, graph_module: GraphModule, options: CompileOptions) -> NumericContract:
        from tilewright.compiler.targets.cuda.weights.copies import kinds_for
        from tilewright.compiler.targets.cuda.weights.e4m3 import least_lofi

        states = [info(node).state for node in graph_module.graph.nodes]
        has_bfp8 = any(each is not None and each.format == "bfp8" for each in states)
        kinds = kinds_for(options)
        answers = meanings(
            exact=options.compute == "exact",
            e4m3_rows=least_lofi(has_cpp=_has_cpp()) if kinds.codes else 0,
            rounded=kinds.rounded,
            bfp8_pages=has_bfp8,
        )
        return build_contract(graph_module, answers)

    def weight_storage(
        self,
        recipe: WeightRecipe,
        facts: NodeInfo,
        *,
        compute: str,
        block: Sequence[tuple[WeightRecipe, NodeInfo]] = (),
    ) -> WeightStorage:
        """Return a weight's storage: whole tiles of 16 rows x 128 columns, in blocks or
        bfloat16.
        """
        return weight_storage(recipe, facts.tensor_group)

    def state_storage(self, spec: StateSpec, *, compute: str) -> WeightStorage:
        """Return a state's storage.

        Keys and values have the requested format if a kernel supports it. Per-sequence state is
        float32.
        """
        if spec.kind == PER_TOKEN:
            kind = cache_kind(spec.format, exact=compute == "exact")
            return super().state_storage(
                replace(spec, format=kind, value_format=""), compute=compute
            )
        return WeightStorage("fp32", 4 * math.prod(spec.shape))

    def build(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        folder: Path,
        options: CompileOptions,
        progress: Progress,
    ) -> None:
        from tilewright.compiler.targets.cuda.lowering import lower_to_program
        from tilewright.compiler.targets.cuda.weights.stream import write_weights

        write_weights(lower_to_program(graph_module), get_weight, folder, progress)

    def emit(self, kind: str, emission: Emission) -> None:
        """Write ``engine``: a Python file that runs the model with torch and Triton only."""
        self.check_emits(kind)
        assert kind == "engine"
        from tilewright.compiler.targets.cuda.engine_generator.emit import emit_engine
        from tilewright.compiler.targets.cuda.lowering import lower_to_program

        emit_engine(lower_to_program(emission.lower(self.stages())), emission)

    def load(
        self, program: BuiltProgram, options: CompileOptions, progress: Progress
    ) -> Executable:
        from tilewright.compiler.targets.cuda.weights.stream import read_weights

        graph_module, folder = program.sketch(), program.folder
        return _place(
            graph_module,
            lambda plan, device: read_weights(plan, folder, device, progress),
            options,
            self.contract,
            progress,
        )

    def compile(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        options: CompileOptions,
        progress: Progress,
    ) -> Executable:
        """Convert all tensors on the device, without a directory."""
        from tilewright.compiler.targets.cuda.weights.stream import load_weights

        return _place(
            graph_module,
            lambda plan, device: load_weights(plan, get_weight, device, progress),
            options,
            self.contract,
            progress,
        )


def _place(
    graph_module: GraphModule,
    get_weights: Callable[[KernelProgram, torch.device], Weights],
    options: CompileOptions,
    contract: Callable[[GraphModule, CompileOptions], NumericContract],
    progress: Progress,
) -> Executable:
    """Return a graph's executable on this machine's GPU, with its contract.

    The batch size, mixed-batch sizes and weight copies are reduced to fit memory.
    """
    from tilewright.compiler.targets.cuda.batch_size import with_batch_that_fits
    from tilewright.compiler.targets.cuda.executable import CudaExecutable
    from tilewright.compiler.targets.cuda.invariance import can_promise, withhold_workspace
    from tilewright.compiler.targets.cuda.lowering import lower_to_program
    from tilewright.compiler.targets.cuda.memory_budget import (
        check_room,
        most_shared,
        open_device,
        weight_bytes,
        with_passes_that_fit,
    )
    from tilewright.compiler.targets.cuda.weights.copies import kinds_for
    from tilewright.compiler.targets.cuda.weights.stream import load_draft_weights

    check_environment()
    program, layer = lower_to_program(graph_module), options.draft_layer
    if layer is not None:
        program = replace(program, draft_layer=lower_to_program(layer.graph_module))
    weight_bytes(program)  # report an unsupported format before a missing GPU
    if can_promise(program, options):
        withhold_workspace()
    device = open_device(options)
    options = with_batch_that_fits(program, options, device)
    requested = most_shared(program, options)
    options = with_passes_that_fit(program, options, device)
    budget = check_room(program, options, device)
    kept = options
    if budget.copies != kinds_for(options):
        kept = replace(options, copies="codes" if budget.copies.codes else "none")
    weights = get_weights(program, device)
    drafting = None
    if layer is not None:
        drafting = load_draft_weights(program, weights, layer.get_weight, device, progress)
    promised = contract(graph_module, kept)
    make = partial(CudaExecutable, program, weights, options, promised, device)
    make = partial(make, num_pages=budget.num_pages, copies=budget.copies, draft_weights=drafting)
    executable = make()
    executable.remake, executable.notes = make, (*executable.notes, *budget.notes)
    found = most_shared(program, options)
    if found < requested:
        note = f"prompts share passes of up to {found:,} tokens: memory is short for {requested:,}"
        executable.notes = (*executable.notes, note)
    return executable


def _has_cpp() -> bool:
    """Return whether this GPU has CUDA C++ kernels. A machine without a GPU compiles for Hopper."""
    import torch

    from tilewright.compiler.targets.cuda.kernels.common.nvrtc import gpu_of

    return not torch.cuda.is_available() or gpu_of(torch.device("cuda")).has_cpp


def for_gpu(executable: CudaExecutable, gpu: Gpu) -> CudaExecutable:
    """Return an executable with the kernels of another GPU and the same weights.

    It runs on the executable's device. The executable is closed.
    """
    make = executable.remake
    executable.close()
    made = make(gpu=gpu)
    made.num_tokens, made.encoder, made.remake = executable.num_tokens, executable.encoder, make
    return made
