"""Runs a plan's instructions for linear attention and gates, in decode steps and in prompts, and
hands those for experts on. float32 operands make it float32 arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.table import EXACT, Gpu
from tilewright.compiler.targets.cuda.kernels.delta_rule import delta_solve
from tilewright.compiler.targets.cuda.kernels.delta_rule import delta_step as native_delta
from tilewright.compiler.targets.cuda.kernels.delta_rule.causal_conv1d import (
    causal_conv1d_prompt,
    causal_conv1d_step,
)
from tilewright.compiler.targets.cuda.kernels.delta_rule.prompt_triton import (
    delta_rule_prompt,
    scratch_bytes,
)
from tilewright.compiler.targets.cuda.kernels.delta_rule.step_triton import (
    DeltaInputs,
    delta_rule_step,
)
from tilewright.compiler.targets.cuda.kernels.delta_rule.table import (
    SOLVE,
    STEP,
    DeltaSite,
    bind_solve,
    bind_step,
    why_no_step,
)
from tilewright.compiler.targets.cuda.kernels.elementwise.sigmoid_gate import sigmoid_gate
from tilewright.compiler.targets.cuda.state.tables import PagedState
from tilewright.compiler.targets.cuda.state.token_batch import DraftChain, TokenBatch
from tilewright.compiler.targets.cuda.steps.buffers import Buffers, is_aligned
from tilewright.compiler.targets.cuda.steps.experts import ExpertsRunner, experts_bytes
from tilewright.compiler.targets.cuda.weights.stream import Weights
from tilewright.compiler.targets.program.instructions import (
    BufferView,
    Convolve,
    DeltaRuleOp,
    ExpertLinearOp,
    ExpertSum,
    KernelProgram,
    Mixer,
    SigmoidGate,
    TopKRouteOp,
)


def mixer_bytes(plan: KernelProgram, num_tokens: int) -> int:
    """Bytes that a prompt's mixers take beside the plan's buffers: the largest of them."""
    sizes = [experts_bytes(plan, num_tokens)]
    for each in plan.instructions:
        if isinstance(each, DeltaRuleOp):
            num_heads, key_dim, value_dim = each.state.shape
            heads = {"num_heads": num_heads, "num_key_heads": each.num_key_heads}
            dims = {"key_dim": key_dim, "value_dim": value_dim}
            sizes.append(scratch_bytes(num_tokens, **heads, **dims))
    return max(sizes)


@dataclass(frozen=True, slots=True)
class _BoundRule:
    """The kernels of a delta rule: of decode steps, and of the systems of a prompt's chunks."""

    step: str
    solve: str


class Mixers:
    """A plan's mixers with their weights and state. Capturable in a CUDA graph.

    Their rows are a step's tokens: one of each sequence in a decode step; in a prompt all of one
    sequence, or of a few in pieces, whose states are kept at their marks on the way.
    """

    def __init__(
        self,
        plan: KernelProgram,
        weights: Weights,
        state: PagedState,
        *,
        gpu: Gpu,
        arithmetic: str,
        max_rows: int,
    ) -> None:
        device = state.tables.device
        how: dict[str, Any] = {"gpu": gpu, "arithmetic": arithmetic}
        self.experts = ExpertsRunner(plan, weights, device, max_rows=max_rows, **how)
        self._weights, self._state, self._exact = weights, state, arithmetic == EXACT
        rules = [each for each in plan.instructions if isinstance(each, DeltaRuleOp)]
        sites = [_site_of(each, plan, gpu, arithmetic) for each in rules]
        self.why_not_native = next(filter(None, map(why_no_step, sites)), "")
        self._rules = {
            id(each): _BoundRule(bind_step(site), bind_solve(site))
            for each, site in zip(rules, sites, strict=True)
        }
        for kernel, source in ((STEP, native_delta.SOURCE), (SOLVE, delta_solve.SOURCE)):
            if any(kernel in (each.step, each.solve) for each in self._rules.values()):
                nvrtc.load(device, source)

    def run(
        self,
        each: Mixer,
        step: Buffers,
        rows: TokenBatch,
        *,
        decodes: bool,
        captured: bool = False,
        starts: Tensor | None = None,
    ) -> None:
        """Run one instruction; ``captured`` as :meth:`.steps.Steps.decode` has it, ``starts`` as
        :meth:`.steps.Steps.prefill`.
        """
        if isinstance(each, TopKRouteOp | ExpertLinearOp | ExpertSum):
            self.experts.run(each, step, rows.positions, decodes=decodes)
        elif isinstance(each, SigmoidGate):
            sigmoid_gate(step.view(each.out), step.view(each.x), step.view(each.gate))
        elif rows.chain is not None:
            self._run_waves(each, step, rows.chain)
        elif isinstance(each, Convolve):
            self._convolve(each, step, rows, decodes, starts)
        elif decodes and self._rules[id(each)].step == STEP:
            self._native_step(each, step, _where(rows), captured=captured)
        else:
            if each.convolve is not None:
                self._convolve(each.convolve, step, rows, decodes, starts)
            self._delta_rule(each, step, rows, decodes, starts)

    def _run_waves(self, each: Convolve | DeltaRuleOp, step: Buffers, chain: DraftChain) -> None:
        """Run a decode step for row 0 of all slots, then for row 1, and so on."""
        for positions in chain.positions:
            where = {"positions": positions, "slots": chain.sources, "targets": chain.targets}
            if isinstance(each, Convolve):
                self._convolve_step(each, step, where)
            elif self._rules[id(each)].step == STEP:
                self._native_step(each, step, where)
            else:
                if each.convolve is not None:
                    self._convolve_step(each.convolve, step, where)
                self._delta_step(each, step, where)

    def _native_step(
        self,
        each: DeltaRuleOp,
        step: Buffers,
        where: dict[str, Tensor],
        *,
        captured: bool = False,
    ) -> None:
        """``captured``: a slot's window and state are those that the step before left."""
        convolve = each.convolve
        assert convolve is not None
        native_delta.delta_step(
            step.view(each.out),
            self._inputs(each, step, convolve.x),
            step.view(each.z),
            (self._weights.constant(each.norm), each.eps),
            weight=self._weights.constant(convolve.weight).flatten(1),
            window=self._state.sequences[convolve.state.name],
            state=self._state.sequences[each.state.name],
            early=captured,
            **where,
        )

    def _convolve_step(self, each: Convolve, step: Buffers, where: dict[str, Tensor]) -> None:
        weight = self._weights.constant(each.weight).flatten(1)
        window = self._state.sequences[each.state.name]
        causal_conv1d_step(step.view(each.out), step.view(each.x), weight, window=window, **where)

    def _delta_step(self, each: DeltaRuleOp, step: Buffers, where: dict[str, Tensor]) -> None:
        inputs = self._inputs(each, step, each.qkv)
        norm = self._weights.constant(each.norm), each.eps
        state = self._state.sequences[each.state.name]
        delta_rule_step(step.view(each.out), inputs, step.view(each.z), norm, state=state, **where)

    def _convolve(
        self, each: Convolve, step: Buffers, rows: TokenBatch, decodes: bool, starts: Tensor | None
    ) -> None:
        if decodes:
            self._convolve_step(each, step, _where(rows))
            return
        weight = self._weights.constant(each.weight).flatten(1)
        what = step.view(each.out), step.view(each.x), weight
        window, keeps = self._state.sequences[each.state.name], self._keeps(rows)
        causal_conv1d_prompt(*what, window=window, **_where(rows), keeps=keeps, starts=starts)

    def _keeps(self, rows: TokenBatch) -> Tensor | None:
        """None where nothing is ever kept on the way: kernels are then made without it."""
        return rows.keeps if self._state.num_marks else None

    def _inputs(self, each: DeltaRuleOp, step: Buffers, qkv: BufferView) -> DeltaInputs:
        return DeltaInputs(
            step.view(qkv),
            step.view(each.a),
            step.view(each.b),
            self._weights.constant(each.a_log),
            self._weights.constant(each.dt_bias),
            each.num_key_heads,
            each.key_dim,
        )

    def _delta_rule(
        self,
        each: DeltaRuleOp,
        step: Buffers,
        rows: TokenBatch,
        decodes: bool,
        starts: Tensor | None,
    ) -> None:
        if decodes:
            self._delta_step(each, step, _where(rows))
            return
        inputs = self._inputs(each, step, each.qkv)
        out, z = step.view(each.out), step.view(each.z)
        weight = self._weights.constant(each.norm)
        where = {"state": self._state.sequences[each.state.name], **_where(rows)}
        keeps, norm, exact = self._keeps(rows), (weight, each.eps), self._exact
        is_native = self._rules[id(each)].solve == SOLVE
        delta_rule_prompt(
            out, inputs, z, norm, keeps=keeps, starts=starts, exact=exact, is_native=is_native,
            **where,
        )  # fmt: skip


def _where(rows: TokenBatch) -> dict[str, Tensor]:
    return {"positions": rows.positions, "slots": rows.slots}


def _site_of(each: DeltaRuleOp, plan: KernelProgram, gpu: Gpu, arithmetic: str) -> DeltaSite:
    num_heads, key_dim, value_dim = each.state.shape
    return DeltaSite(
        arithmetic,
        gpu,
        num_heads=num_heads,
        num_key_heads=each.num_key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        width=0 if each.convolve is None else each.convolve.state.shape[-1] + 1,
        is_aligned=is_aligned(plan, each.qkv, 4),
    )
