"""The oracle: runs the graph's eager references in fp32, on the values its weight formats hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from compiler.ir.info import CONSTANT, INPUT, STATE, WEIGHT, info
from compiler.ir.recipe import WeightRecipe, load_values
from compiler.targets.base import (
    Capabilities,
    CompileOptions,
    Executable,
    MemoryUse,
    Progress,
    Stage,
    StateHandle,
    StepInput,
    StepOutput,
    Target,
    finish_step,
)
from compiler.targets.contract import (
    EMULATED,
    HONOURED,
    NOT_HONOURED,
    Meaning,
    Meanings,
    NumericContract,
    build_contract,
)
from compiler.targets.pipeline import MATCH, PRECISION, lower
from compiler.targets.slots import SlotPool

_FLOAT = Meaning(NOT_HONOURED, "fp32")

_MEANINGS = Meanings(
    weight=lambda name, axis: Meaning(
        HONOURED if name == "fp32" else EMULATED, f"{name} values in fp32, blocks along {axis}"
    ),
    fidelity=lambda name, axis, fidelity: _FLOAT,
    attention=lambda fidelity: _FLOAT,
    kv_cache=lambda name: _FLOAT,
    activation=lambda name: _FLOAT,
)


class ReferenceTarget(Target):
    """No fusions: what the passes made of the model is run as it stands."""

    name = "reference"

    def stages(self) -> tuple[Stage, ...]:
        return (MATCH, PRECISION, lower())

    def contract(self, graph_module: GraphModule, options: CompileOptions) -> NumericContract:
        return build_contract(graph_module, _MEANINGS)

    def compile(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        options: CompileOptions,
        progress: Progress,
    ) -> Executable:
        contract = self.contract(graph_module, options)
        return ReferenceExecutable(graph_module, get_weight, options, progress, contract)


class ReferenceExecutable(Executable):
    """Weights and caches as torch tensors; any mix of sequences in a step."""

    def __init__(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        options: CompileOptions,
        progress: Progress,
        contract: NumericContract,
    ) -> None:
        self.contract = contract
        self.capabilities = Capabilities(
            max_batch=options.max_batch,
            max_context=options.max_context,
            max_prefill_sequences=options.max_batch,
            mixed_steps=True,
        )
        self._slots = SlotPool(options.max_batch, options.max_context)
        self._graph_module = graph_module
        self._inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        self._values: dict[str, Tensor] = {}
        self._caches: list[Tensor] = []
        cache: dict[WeightRecipe, Tensor] = {}
        for done, node in enumerate(self._inputs):
            facts = info(node)
            if facts.role in (WEIGHT, CONSTANT):
                assert facts.recipe is not None
                if facts.recipe not in cache:
                    cache[facts.recipe] = load_values(facts.recipe, get_weight)
                self._values[node.name] = cache[facts.recipe]
            elif facts.role == STATE:
                assert facts.state is not None
                kind, *rest = facts.state.shape
                shape = (options.max_batch, kind, options.max_context, *rest)
                self._values[node.name] = torch.zeros(shape)
                self._caches.append(self._values[node.name])
            progress("weights", done + 1, len(self._inputs))
        self._weight_bytes = sum(tensor.nbytes for tensor in cache.values())
        output = next(node for node in graph_module.graph.nodes if node.op == "output")
        self.vocab_size = int(output.args[0].meta["val"].shape[-1])

    @torch.no_grad()
    def step(self, inputs: StepInput) -> StepOutput:
        step_values: dict[str, Any] = {
            "tokens": inputs.tokens,
            "positions": inputs.positions,
            "cu_seqlens": inputs.cu_seqlens,
            "slots": torch.tensor(inputs.states, dtype=torch.int64),
            "logit_rows": inputs.logit_rows,
        }
        arguments = [
            step_values[str(node.target)] if info(node).role == INPUT else self._values[node.name]
            for node in self._inputs
        ]
        return finish_step(self._graph_module(*arguments).float(), inputs)

    def reserve(self, num_positions: int) -> StateHandle:
        return self._slots.reserve(num_positions)

    def free(self, handle: StateHandle) -> None:
        self._slots.free(handle)

    def copy(self, handle: StateHandle, num_positions: int) -> StateHandle:
        fresh = self._slots.reserve(max(1, num_positions))
        for cache in self._caches:
            cache[fresh, :, :num_positions] = cache[handle, :, :num_positions]
        return fresh

    def num_free(self) -> int:
        return self._slots.num_free()

    def memory(self) -> MemoryUse:
        return MemoryUse(self._weight_bytes, sum(cache.nbytes for cache in self._caches))

    def state_bytes(self, num_positions: int) -> int:
        """The reference keeps every slot whole, whatever it holds."""
        return sum(cache.nbytes for cache in self._caches)
