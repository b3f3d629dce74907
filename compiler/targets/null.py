"""Logits of zeros and no weights: for tests of pipelines, engines and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from torch import Tensor
from torch.fx import GraphModule

from tilewright.compiler.ir.info import NodeInfo
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.state import StateSpec
from tilewright.compiler.targets.contract.build import build_contract
from tilewright.compiler.targets.contract.record import (
    NOT_HONOURED,
    Meaning,
    Meanings,
    NumericContract,
)
from tilewright.compiler.targets.host.batch import Batch
from tilewright.compiler.targets.host.executable import HostExecutable
from tilewright.compiler.targets.interface.base import (
    BuiltProgram,
    Capabilities,
    CompileOptions,
    Executable,
    MemoryUse,
    Progress,
    Slot,
    Stage,
    Step,
    StepOutput,
    Target,
    WeightStorage,
)
from tilewright.compiler.targets.interface.capabilities import MAX_DRAFTS
from tilewright.compiler.targets.interface.step import (
    END_TOKEN,
    GOES_ON,
    SampledTokens,
    SamplerOutput,
)
from tilewright.compiler.targets.pipeline import MATCH, PRECISION, hidden_size, lower, vocab_size

_ZERO = Meaning(NOT_HONOURED, "zeros")
_MEANINGS = Meanings(
    weight=lambda name, axis: _ZERO,
    fidelity=lambda name, axis, fidelity, phase: _ZERO,
    attention=lambda fidelity, phase: _ZERO,
    kv_cache=lambda name: _ZERO,
    activation=lambda name: _ZERO,
)


class NullTarget(Target):
    """A target that runs every pass and computes nothing: for tests of scheduling and serving."""

    name = "null"

    def stages(self) -> tuple[Stage, ...]:
        return (MATCH, PRECISION, lower())

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
        """Return an empty storage: this target stores no weights."""
        return WeightStorage("nothing", 0)

    def state_storage(self, spec: StateSpec, *, compute: str) -> WeightStorage:
        """Return an empty storage: this target stores no state."""
        return WeightStorage("nothing", 0)

    def build(
        self,
        graph_module: GraphModule,
        get_weight: Callable[[str], Tensor],
        folder: Path,
        options: CompileOptions,
        progress: Progress,
    ) -> None:
        """Write nothing: the graph is sufficient."""

    def load(
        self, program: BuiltProgram, options: CompileOptions, progress: Progress
    ) -> Executable:
        graph_module = program.sketch()
        width = hidden_size(graph_module)
        return NullExecutable(
            vocab_size(graph_module), options, program.contract, hidden_size=width
        )


class NullExecutable(HostExecutable):
    """Counts computing steps, and returns zeros."""

    def __init__(
        self,
        vocab_size: int,
        options: CompileOptions,
        contract: NumericContract,
        *,
        hidden_size: int = 0,
    ) -> None:
        super().__init__()
        self.vocab_size = vocab_size
        self.contract = contract
        self.capabilities = Capabilities(
            max_num_seqs=options.max_batch,
            max_context=options.max_context,
            max_prompts=1 << 16,
            hidden_size=hidden_size,
            max_drafts=MAX_DRAFTS,
        )
        self.num_steps = 0
        self._last: tuple[tuple[Slot, ...], SampledTokens | None] = (), None

    def step(self, step: Step) -> StepOutput:
        self.num_steps += bool(step.decode or step.prompts)
        if step.edits:
            self._last = (), None
        return super().step(step)

    def _run_decode(self, step: Step) -> list[SamplerOutput]:
        """Select token 0 for plain rows without creating logits."""
        slots, chosen = self._last
        if slots is not step.decode:
            chosen = self._zeros(step.decode)
            self._last = step.decode, chosen
        is_plain = not (step.forced or step.drafts or step.masked or step.want_logits)
        is_plain &= step.logprobs is None
        if chosen is None or not is_plain:
            return super()._run_decode(step)
        for slot in step.decode:
            slot_state = self._slot_states[slot]
            slot_state.length += 1
            slot_state.token = 0
        found = chosen
        return [SamplerOutput(step.decode, lambda: found)]

    def _zeros(self, slots: Sequence[Slot]) -> SampledTokens | None:
        """Return the tokens for greedy slots without changed logits. None: other slots exist."""
        chosen = [self._slot_states[slot].sampling for slot in slots]
        if not all(each.is_greedy and not each.changes_logits for each in chosen):
            return None
        why = [END_TOKEN if 0 in each.stop_token_ids else GOES_ON for each in chosen]
        return SampledTokens([0] * len(why), why)

    def forward(self, batch: Batch) -> np.ndarray:
        return np.broadcast_to(np.float32(0), (len(batch.logit_rows), self.vocab_size))

    def hidden(self, batch: Batch) -> np.ndarray:
        return np.zeros((len(batch.tokens), self.capabilities.hidden_size), np.float32)

    def copy_state(self, source: Slot, target: Slot, num_positions: int) -> None:
        """Do nothing: this target has no state."""

    def memory(self) -> MemoryUse:
        return MemoryUse(0, 0)

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        return 0
