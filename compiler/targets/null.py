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
    Stage,
    StateHandle,
    StepInput,
    StepOutput,
    Target,
    finish_step,
    vocab_size,
)
from tilewright.compiler.targets.contract import (
    NOT_HONOURED,
    Meaning,
    Meanings,
    NumericContract,
    build_contract,
)
from tilewright.compiler.targets.pipeline import MATCH, PRECISION, lower
from tilewright.compiler.targets.slots import SlotPool

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


class NullExecutable(Executable):
    """Counts its steps; every state is a length, checked against the positions it is given."""

    def __init__(self, vocab_size: int, options: CompileOptions, contract: NumericContract) -> None:
        self.vocab_size = vocab_size
        self.contract = contract
        self.capabilities = Capabilities(
            max_batch=options.max_batch,
            max_context=options.max_context,
            max_prefill_sequences=options.max_batch,
            mixed_steps=True,
        )
        self.num_steps = 0
        self._slots = SlotPool(options.max_batch, options.max_context)
        self._lengths: dict[StateHandle, int] = {}

    def step(self, inputs: StepInput) -> StepOutput:
        self.num_steps += 1
        bounds = inputs.cu_seqlens.tolist()
        for index, handle in enumerate(inputs.states):
            expected = list(
                range(
                    self._lengths[handle], self._lengths[handle] + bounds[index + 1] - bounds[index]
                )
            )
            positions = inputs.positions[bounds[index] : bounds[index + 1]].tolist()
            assert positions == expected, f"positions {positions}, state expects {expected}"
            self._lengths[handle] += len(positions)
        return finish_step(torch.zeros(len(inputs.logit_rows), self.vocab_size), inputs)

    def reserve(self, num_positions: int) -> StateHandle:
        handle = self._slots.reserve(num_positions)
        self._lengths[handle] = 0
        return handle

    def free(self, handle: StateHandle) -> None:
        self._slots.free(handle)
        del self._lengths[handle]

    def copy(self, handle: StateHandle, num_positions: int) -> StateHandle:
        fresh = self.reserve(max(1, num_positions))
        self._lengths[fresh] = num_positions
        return fresh

    def num_free(self) -> int:
        return self._slots.num_free()

    def memory(self) -> MemoryUse:
        return MemoryUse(0, 0)

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        return 0
