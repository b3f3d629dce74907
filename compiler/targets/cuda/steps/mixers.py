"""Runs linear attention, gates and experts in decode steps and in prefill. float32 operands select
float32 arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.table import EXACT, Gpu
from tilewright.compiler.targets.cuda.kernels.delta_rule import delta_rows as native_rows
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
from tilewright.compiler.targets.cuda.kernels.delta_rule.rows_triton import (
    DraftInputs,
    causal_conv1d_rows,
    linear_attention_rows,
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
from tilewright.compiler.targets.cuda.state.token_batch import TokenBatch
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
    """Return a prefill mixer's largest scratch size in bytes, without the program's
    buffers.
    """
    sizes = [experts_bytes(plan, num_tokens)]
    for instruction in plan.instructions:
        if isinstance(instruction, DeltaRuleOp):
            num_heads, key_dim, value_dim = instruction.state.shape
            heads = {"num_heads": num_heads, "num_key_heads": instruction.num_key_heads}
            dims = {"key_dim": key_dim, "value_dim": value_dim}
            sizes.append(scratch_bytes(num_tokens, **heads, **dims))
    return max(sizes)


@dataclass(frozen=True, slots=True)
class _BoundRule:
    """Delta-rule kernels, for decode steps and for the linear systems in prefill chunks."""

    step: str
    solve: str


def draft_input_bytes(program: KernelProgram) -> int:
    """Return the stored bytes of a draft's inputs per slot."""
    return 4 * sum(map(sum, _draft_widths(program).values()))


def _draft_widths(program: KernelProgram) -> dict[int, tuple[int, int]]:
    """Return the widths of a draft's inputs by instruction: channels and gates."""
    widths: dict[int, tuple[int, int]] = {}
    for op in program.instructions:
        if isinstance(op, Convolve):
            widths[id(op)] = op.state.shape[0], 0
        elif isinstance(op, DeltaRuleOp) and op.convolve is not None:
            widths[id(op)] = op.convolve.state.shape[0], 2 * op.state.shape[0]
    return widths


class Mixers:
    """Mixers with their weights and state. CUDA graphs can capture them.

    Decode rows belong to different sequences. Prefill rows belong to a sequence or to several
    chunks, with snapshots at their marks.
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
        max_drafts: int = 0,
    ) -> None:
        """``max_drafts``: Maximum drafts per slot with stored inputs."""
        device = state.tables.device
        how: dict[str, Any] = {"gpu": gpu, "arithmetic": arithmetic}
        self.experts = ExpertsRunner(plan, weights, device, max_rows=max_rows, **how)
        self._weights, self._state, self._exact = weights, state, arithmetic == EXACT
        rules = [
            instruction for instruction in plan.instructions if isinstance(instruction, DeltaRuleOp)
        ]
        sites = [_site_of(instruction, plan, gpu, arithmetic) for instruction in rules]
        self.why_not_native = next(filter(None, map(why_no_step, sites)), "")
        self._rules = {
            id(instruction): _BoundRule(bind_step(site), bind_solve(site))
            for instruction, site in zip(rules, sites, strict=True)
        }
        for kernel, source in ((STEP, native_delta.SOURCE), (SOLVE, delta_solve.SOURCE)):
            if any(kernel in (rule.step, rule.solve) for rule in self._rules.values()):
                nvrtc.load(device, source)
        self._drafts: dict[int, DraftInputs] = {}
        if not max_drafts:
            return
        if any(rule.step == STEP for rule in self._rules.values()):
            nvrtc.load(device, native_rows.SOURCE)
        shape = len(state.tables), max_drafts
        for key, (channels, gates) in _draft_widths(plan).items():
            x, both = (torch.zeros(*shape, width, device=device) for width in (channels, gates))
            self._drafts[key] = DraftInputs(x, both.unflatten(2, (2, gates // 2)))

    def run(
        self,
        instruction: Mixer,
        step: Buffers,
        rows: TokenBatch,
        *,
        decodes: bool,
        captured: bool = False,
        starts: Tensor | None = None,
    ) -> None:
        """Run an instruction. See :meth:`.runner.StepRunner.decode` for ``captured`` and
        :meth:`.runner.StepRunner.prefill` for ``starts``.
        """
        if isinstance(instruction, TopKRouteOp | ExpertLinearOp | ExpertSum):
            self.experts.run(instruction, step, rows.positions, decodes=decodes)
        elif isinstance(instruction, SigmoidGate):
            sigmoid_gate(
                step.view(instruction.out), step.view(instruction.x), step.view(instruction.gate)
            )
        elif rows.by_slot is not None:
            self._by_slot(instruction, step, rows)
        elif isinstance(instruction, Convolve):
            self._convolve(instruction, step, rows, decodes, starts, captured)
        elif decodes and self._rules[id(instruction)].step == STEP:
            self._native_step(instruction, step, rows, captured=captured)
        else:
            if instruction.convolve is not None:
                self._convolve(instruction.convolve, step, rows, decodes, starts, captured)
            self._delta_rule(instruction, step, rows, decodes, starts, captured)

    def _by_slot(
        self, instruction: Convolve | DeltaRuleOp, step: Buffers, rows: TokenBatch
    ) -> None:
        """Run several rows per slot. Earlier steps have ended: the host has read them."""
        drafts, by_slot = self._drafts[id(instruction)], rows.by_slot
        assert by_slot is not None
        if isinstance(instruction, Convolve):
            weight = self._weights.constant(instruction.weight).flatten(1)
            window = self._state.sequences[instruction.state.name]
            out, x = step.view(instruction.out), step.view(instruction.x)
            causal_conv1d_rows(
                out,
                x.new_empty(len(x), *drafts.x.shape[1:]),
                x,
                weight,
                window=window,
                draft_x=drafts.x,
                rows=by_slot,
                silu=instruction.silu,
                **_where(rows),
            )
            return
        convolve = instruction.convolve
        assert convolve is not None
        out, x, z = map(step.view, (instruction.out, convolve.x, instruction.z))
        norm = self._weights.constant(instruction.norm), instruction.eps
        operands: dict[str, Any] = {
            "weight": self._weights.constant(convolve.weight).flatten(1),
            "window": self._state.sequences[convolve.state.name],
            "state": self._state.sequences[instruction.state.name],
            "rows": by_slot,
            "drafts": drafts,
            **_where(rows),
        }
        if self._rules[id(instruction)].step == STEP:
            inputs = self._inputs(instruction, step, convolve.x)
            native_rows.delta_rows(out, inputs, z, norm, early=True, **operands)
        else:
            inputs = self._inputs(instruction, step, instruction.qkv)
            linear_attention_rows(out, inputs, x, z, norm, **operands)

    def _native_step(
        self, instruction: DeltaRuleOp, step: Buffers, rows: TokenBatch, *, captured: bool
    ) -> None:
        """Run a decode step. ``captured``: no earlier kernel of this step writes the slot's
        state.
        """
        convolve = instruction.convolve
        assert convolve is not None
        native_delta.delta_step(
            step.view(instruction.out),
            self._inputs(instruction, step, convolve.x),
            step.view(instruction.z),
            (self._weights.constant(instruction.norm), instruction.eps),
            weight=self._weights.constant(convolve.weight).flatten(1),
            window=self._state.sequences[convolve.state.name],
            state=self._state.sequences[instruction.state.name],
            early=captured,
            **_where(rows),
        )

    def _convolve(
        self,
        instruction: Convolve,
        step: Buffers,
        rows: TokenBatch,
        decodes: bool,
        starts: Tensor | None,
        captured: bool,
    ) -> None:
        weight = self._weights.constant(instruction.weight).flatten(1)
        what = step.view(instruction.out), step.view(instruction.x), weight
        window, keeps = self._state.sequences[instruction.state.name], self._keeps(rows)
        where = {"window": window, "silu": instruction.silu, **_where(rows)}
        if decodes:
            causal_conv1d_step(*what, **where, is_early=captured)
            return
        causal_conv1d_prompt(*what, **where, keeps=keeps, starts=starts)

    def _keeps(self, rows: TokenBatch) -> Tensor | None:
        """Return the snapshot positions. None compiles kernels without snapshots."""
        return rows.keeps if self._state.num_marks else None

    def _inputs(self, instruction: DeltaRuleOp, step: Buffers, qkv: BufferView) -> DeltaInputs:
        return DeltaInputs(
            step.view(qkv),
            step.view(instruction.a),
            step.view(instruction.b),
            self._weights.constant(instruction.a_log),
            self._weights.constant(instruction.dt_bias),
            instruction.num_key_heads,
            instruction.key_dim,
        )

    def _delta_rule(
        self,
        instruction: DeltaRuleOp,
        step: Buffers,
        rows: TokenBatch,
        decodes: bool,
        starts: Tensor | None,
        captured: bool,
    ) -> None:
        inputs = self._inputs(instruction, step, instruction.qkv)
        out, z = step.view(instruction.out), step.view(instruction.z)
        norm = self._weights.constant(instruction.norm), instruction.eps
        where = {"state": self._state.sequences[instruction.state.name], **_where(rows)}
        if decodes:
            delta_rule_step(out, inputs, z, norm, **where, is_early=captured)
            return
        keeps, exact = self._keeps(rows), self._exact
        is_native = self._rules[id(instruction)].solve == SOLVE
        delta_rule_prompt(
            out,
            inputs,
            z,
            norm,
            keeps=keeps,
            starts=starts,
            exact=exact,
            is_native=is_native,
            **where,
        )


def _where(rows: TokenBatch) -> dict[str, Any]:
    return {"positions": rows.positions, "slots": rows.slots}


def _site_of(instruction: DeltaRuleOp, plan: KernelProgram, gpu: Gpu, arithmetic: str) -> DeltaSite:
    num_heads, key_dim, value_dim = instruction.state.shape
    return DeltaSite(
        arithmetic,
        gpu,
        num_heads=num_heads,
        num_key_heads=instruction.num_key_heads,
        key_dim=key_dim,
        value_dim=value_dim,
        width=0 if instruction.convolve is None else instruction.convolve.state.shape[-1] + 1,
        is_aligned=is_aligned(plan, instruction.qkv, 4),
    )
