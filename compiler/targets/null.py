"""Logits of zeros and no weights: for tests of pipelines, engines and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.fx import GraphModule

from tilewright.compiler.ir.info import NodeInfo
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.state import StateSpec
from tilewright.compiler.targets.base import (
    Capabilities,
    CompileOptions,
    Executable,
    Holding,
    MemoryUse,
    Program,
    Progress,
    Seat,
    Stage,
    Step,
    StepOutput,
    Target,
    vocab_size,
)
from tilewright.compiler.targets.contract import (
    NOT_HONOURED,
    Meaning,
    Meanings,
    NumericContract,
    build_contract,
)
from tilewright.compiler.targets.host import Batch, HostExecutable
from tilewright.compiler.targets.pipeline import MATCH, PRECISION, lower

_ZERO = Meaning(NOT_HONOURED, "zeros")
_MEANINGS = Meanings(
    weight=lambda name, axis: _ZERO,
    fidelity=lambda name, axis, fidelity, phase: _ZERO,
    attention=lambda fidelity, phase: _ZERO,
    kv_cache=lambda name: _ZERO,
    activation=lambda name: _ZERO,
)


class NullTarget(Target):
    """Runs every pass and computes nothing."""

    name = "null"

    def stages(self) -> tuple[Stage, ...]:
        return (MATCH, PRECISION, lower())

    def contract(self, graph_module: GraphModule, options: CompileOptions) -> NumericContract:
        return build_contract(graph_module, _MEANINGS)

    def holding(
        self,
        recipe: WeightRecipe,
        facts: NodeInfo,
        *,
        compute: str,
        block: Sequence[tuple[WeightRecipe, NodeInfo]] = (),
    ) -> Holding:
        """This target holds nothing of any weight."""
        return Holding("nothing", 0)

    def state_holding(self, spec: StateSpec, *, compute: str) -> Holding:
        """This target holds nothing of any state."""
        return Holding("nothing", 0)

    def build(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        folder: Path,
        options: CompileOptions,
        progress: Progress,
    ) -> None:
        """Write nothing: the graph says all there is to know."""

    def load(self, program: Program, options: CompileOptions, progress: Progress) -> Executable:
        return NullExecutable(vocab_size(program.graph()), options, program.contract)


class NullExecutable(HostExecutable):
    """Counts the steps that compute something, and answers zeros."""

    def __init__(self, vocab_size: int, options: CompileOptions, contract: NumericContract) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.contract = contract
        self.capabilities = Capabilities(
            max_seats=options.max_batch, max_context=options.max_context, max_prompts=1 << 16
        )
        self.num_steps = 0

    def step(self, step: Step) -> StepOutput:
        self.num_steps += bool(step.decode or step.prompts)
        return super().step(step)

    def forward(self, batch: Batch) -> Tensor:
        return torch.zeros(1, 1).expand(len(batch.logit_rows), self.vocab_size)

    def copy_state(self, source: Seat, target: Seat, num_positions: int) -> None:
        """There is none."""

    def memory(self) -> MemoryUse:
        return MemoryUse(0, 0)

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        return 0
