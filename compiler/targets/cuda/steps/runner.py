"""Runs a program's instructions. Decode uses kernels with a single weight read, prefill uses large
matmuls.

Legend: B decode rows, T prompt tokens, R rows with logits.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.collectives.group import RankGroup
from tilewright.compiler.targets.cuda.kernels.attention.attention import ArrangedOutput
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.table import EXACT, FAST, STRICT, Gpu
from tilewright.compiler.targets.cuda.kernels.elementwise.embedding import embed
from tilewright.compiler.targets.cuda.kernels.elementwise.swiglu import swiglu_apart
from tilewright.compiler.targets.cuda.kernels.matmul import gemv
from tilewright.compiler.targets.cuda.kernels.matmul.coded_rows import decode_rows
from tilewright.compiler.targets.cuda.outputs.pooled_states import pool_rows
from tilewright.compiler.targets.cuda.state.final_states import FinalStates
from tilewright.compiler.targets.cuda.state.tables import PagedState
from tilewright.compiler.targets.cuda.state.token_batch import (
    SINGLE_CHUNK,
    ChunkLayout,
    TokenBatch,
)
from tilewright.compiler.targets.cuda.steps.attention import AttentionRunner
from tilewright.compiler.targets.cuda.steps.buffers import Buffers, padded
from tilewright.compiler.targets.cuda.steps.cross_layers import CrossLayers
from tilewright.compiler.targets.cuda.steps.cublas import apply_function
from tilewright.compiler.targets.cuda.steps.last_mixer import LastMixer, last_mixer_of
from tilewright.compiler.targets.cuda.steps.matmul import MatmulOps
from tilewright.compiler.targets.cuda.steps.mixers import Mixers
from tilewright.compiler.targets.cuda.steps.norms import Norms
from tilewright.compiler.targets.cuda.steps.overlap import SideStream
from tilewright.compiler.targets.cuda.weights.coded_tiles import CODED_TILES
from tilewright.compiler.targets.cuda.weights.copies import NO_COPIES, DequantizedCopies, Kinds
from tilewright.compiler.targets.cuda.weights.stream import Weights
from tilewright.compiler.targets.program.instructions import (
    LOGITS,
    OPERAND,
    AddGatedOp,
    AllReduceAdd,
    AllReduceOp,
    AttentionOp,
    BufferView,
    Convolve,
    CrossAttentionOp,
    DeltaRuleOp,
    Elementwise,
    EmbedOp,
    GatherOp,
    KernelProgram,
    LinearOp,
    Mixer,
    NormHeads,
    NormOp,
    Plain,
    ReadHiddenOp,
    SwiGLUOp,
    TopKRouteOp,
)


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Kernels for strict (batch-invariant) or fast arithmetic."""

    products: MatmulOps
    norms: Norms
    attention: AttentionRunner
    is_strict: bool

    def arranged_for(self, op: AttentionOp, num_rows: int) -> ArrangedOutput | None:
        """Return the output of a decode step's attention as the next matmul's x, where possible."""
        return self.products.arranged_for(op, num_rows) if self.attention.arranges(op) else None


class StepRunner:
    """A program with its weights and state. CUDA graphs can capture every method.

    Args:
        exact: Use float32 arithmetic only, through cuBLAS.
        strict_rows: Maximum rows in a strict decode step. In strict steps, bits do not depend on
            the batch. Nonzero also makes prefill strict: bits do not depend on chunk sizes. Mixed
            batches are strict only if all steps are.
        prompt_wire: Link format for partial sums in prefill. None: as in decode steps.
    """

    def __init__(
        self,
        plan: KernelProgram,
        weights: Weights,
        state: PagedState,
        *,
        max_rows: int,
        exact: bool,
        strict_rows: int = 0,
        prompt_wire: str | None = None,
        copies: Kinds = NO_COPIES,
        gpu: Gpu | None = None,
        max_drafts: int = 0,
    ) -> None:
        """``gpu``: a GPU with the same kernels. None: the state's GPU. ``max_drafts``: per slot."""
        self.group: RankGroup | None = None  # set when ranks connect
        self.final_states: FinalStates | None = None  # set for a draft layer
        self.device = state.tables.device
        self.exact, self._strict_rows = exact, strict_rows
        self._gpu = gpu = gpu or nvrtc.gpu_of(self.device)
        self.is_native = gpu.has_cpp and not exact
        self._plan, self._weights, self._state = plan, weights, state
        self._prompt_wire = prompt_wire
        is_strict = strict_rows >= max_rows
        how: dict[str, Any] = {"max_rows": max_rows, "max_drafts": max_drafts}
        self._mixers = Mixers(
            plan, weights, state, gpu=gpu, arithmetic=self._arithmetic(is_strict), **how
        )
        self._beside, self._last_mixer = SideStream(self.device), last_mixer_of(plan)
        self._cross = CrossLayers(plan, weights)
        self._operand = torch.float32 if exact else torch.bfloat16
        self._num_rows = rows = gemv.room_for(max_rows) if self.is_native else max_rows
        self.copies = DequantizedCopies(plan, weights, copies)
        make = self._make_kernels
        self._small = make(min(max_rows, strict_rows), is_strict=True) if strict_rows else None
        is_only = self._small is not None and strict_rows == sys.maxsize
        self._large = None if is_only else make(max_rows, is_strict=False)
        self.attention = self._kernels(is_strict=self._small is not None).attention
        self._flat = [
            torch.zeros(
                rows * padded(buffer.width), dtype=self._type(buffer.role), device=self.device
            )
            for buffer in plan.buffers
        ]

    def _make_kernels(self, max_rows: int, *, is_strict: bool) -> _Kernels:
        weights, arithmetic = self._weights, self._arithmetic(is_strict)
        how: dict[str, Any] = {"gpu": self._gpu, "arithmetic": arithmetic}
        products = MatmulOps(
            self._plan, weights, self.device, max_rows=max_rows, copies=self.copies, **how
        )
        return _Kernels(
            products,
            Norms(self._plan, weights, products, **how),
            AttentionRunner(self._plan, weights, self._state, max_rows=max_rows, **how),
            is_strict,
        )

    def _arithmetic(self, is_strict: bool) -> str:
        return EXACT if self.exact else STRICT if is_strict else FAST

    def _kernels(self, *, is_strict: bool) -> _Kernels:
        kernels = self._small if is_strict or self._large is None else self._large
        assert kernels is not None
        return kernels

    @property
    def why_slower(self) -> str:
        """Return the reason against CUDA C++ on a GPU with these kernels. Empty: none."""
        is_made_for = self._gpu.capability[0] == 9 and not self.exact
        return self._gpu.why_no_cpp if is_made_for else ""

    def kernels(self) -> str:
        """Return a note on the kernels, with the reason against the fast kernels."""
        if self.exact:
            return "the library in float32"
        instructions = self._plan.instructions
        has_experts = any(isinstance(each, TopKRouteOp) for each in instructions)
        experts = self._mixers.experts
        found = {
            "products in Triton": self._gpu.why_no_cpp,
            "attention in Triton": self.attention.why_not_native,
            f"experts in {experts.prompt_kernel}": experts.why_not_native if has_experts else "",
            "linear attention in Triton": self._mixers.why_not_native,
        }
        parts = [f"{what} ({reason})" for what, reason in found.items() if reason]
        return "CUDA C++ kernels" + (", but " + " and ".join(parts) if parts else "")

    def _type(self, role: str) -> torch.dtype:
        return self._operand if role == OPERAND else torch.float32

    def decode(
        self,
        rows: TokenBatch,
        *,
        reach: int | None = None,
        captured: bool = False,
        has_drafts: bool = False,
        has_logits: bool = True,
    ) -> Tensor:
        """Run a token for each of B sequences. Return logits ``[B, V]``, overwritten by the next
        step.

        Args:
            reach: Maximum pages per row, from :attr:`.steps_attention.Attention.reaches`. None: the
                largest.
            captured: No kernel in the captured chain writes ``rows``, tables, old pages or sequence
                state before the last kernel has read them.
            has_drafts: Rows may be consecutive tokens in a sequence, with attention to earlier
                rows. Not with ``captured``. Per-sequence state follows ``rows.by_slot``.
            has_logits: Run the head. Otherwise the logits are undefined.
        """
        assert not (has_drafts and captured), "kernels read pages of this step early"
        num_rows = len(rows.tokens)
        step = self._decode_buffers(num_rows)
        kernels = self._kernels(is_strict=num_rows <= self._strict_rows)
        for each in self._cross.instructions_of(rows):
            if isinstance(each, GatherOp):
                if self.final_states is not None:
                    self.final_states.keep(self._normed(step.view(each.x)), rows)
                if not has_logits:
                    break
                step.alias(each.out, each.x)
            elif isinstance(each, AttentionOp):
                kernels.attention.decode(
                    each,
                    step,
                    rows,
                    reach=reach,
                    captured=captured,
                    has_drafts=has_drafts,
                    arranged=kernels.arranged_for(each, num_rows),
                )
            elif isinstance(each, Mixer):
                self._mixers.run(each, step, rows, decodes=True, captured=captured)
            elif isinstance(each, LinearOp) and self._mixers.experts.runs_along(each, num_rows):
                continue
            elif not (
                isinstance(each, LinearOp) and kernels.norms.run_product(each, step, num_rows)
            ):
                self._run(each, step, rows, kernels, decodes=True)
        return step.logits

    def replay(self, rows: TokenBatch) -> None:
        """Apply the accepted drafts in ``rows.by_slot`` to per-sequence state."""
        step = self._decode_buffers(len(rows.tokens))
        for instruction in self._plan.instructions:
            if isinstance(instruction, Convolve | DeltaRuleOp):
                self._mixers.run(instruction, step, rows, decodes=True)

    def chosen_experts(self, rows: TokenBatch) -> list[int]:
        """Run a decode step and return the distinct selected expert count per layer."""
        chosen = self._mixers.experts.watch(lambda: self.decode(rows))
        return [len(each[each >= 0].unique()) for each in chosen]

    def prefill(
        self,
        rows: TokenBatch,
        *,
        logit_rows: Tensor | None,
        from_start: bool = False,
        layout: ChunkLayout = SINGLE_CHUNK,
    ) -> Tensor | None:
        """Run prefill chunks, and possibly decode rows. Return this rank's logits ``[R, V]``.

        Args:
            rows: T tokens, from the sequence in ``rows.slots[0]`` or from several sequences.
            logit_rows: Rows with logits.
            from_start: Whether the first token is at position 0. Padding is at the end only.
            layout: Chunks and decode rows.
        """
        logits = self._prefill(rows, logit_rows, layout, from_start=from_start)
        if self.group is not None:
            self.group.exchange.end_step()
        return logits

    def pool(self, rows: TokenBatch, *, from_start: bool) -> Tensor:
        """Run T prompt tokens as `prefill` does. Return `pool_rows` for their final hidden
        states.
        """
        pooled = self._prefill(rows, None, SINGLE_CHUNK, from_start=from_start, pools=True)
        if self.group is not None:
            self.group.exchange.end_step()
        assert pooled is not None, "the plan gathers no rows"
        return pooled

    def _normed(self, x: Tensor) -> Tensor:
        """Return final hidden states after the norm."""
        norm = self._plan.final_norm
        if norm is None:
            return x
        weight, eps = self._weights.constant(norm[0]), norm[1]
        return torch.nn.functional.rms_norm(x, (x.shape[-1],), weight, eps)

    def _pool_rows(self, x: Tensor) -> Tensor:
        norm = self._plan.final_norm
        return pool_rows(x, norm and (self._weights.constant(norm[0]), norm[1]))

    def _prefill(
        self,
        rows: TokenBatch,
        logit_rows: Tensor | None,
        layout: ChunkLayout,
        *,
        from_start: bool,
        pools: bool = False,
    ) -> Tensor | None:
        step = self._fresh_buffers(len(rows.tokens))
        is_single = layout.starts is None and not layout.is_mixed
        kernels = self._kernels(is_strict=is_single and self._small is not None)
        last = None if pools else self._mixer_before_selection(rows, logit_rows)
        for op in self._cross.instructions_of(rows):
            if isinstance(op, GatherOp):
                if last is not None:
                    step.alias(op.out, op.x)
                    continue
                if pools:
                    return self._pool_rows(step.view(op.x))
                if self.final_states is not None:
                    x = step.view(op.x)
                    self.final_states.keep_prompts(x, self._normed, rows, layout.decoding)
                if logit_rows is None:
                    return None
                x = step.view(op.x)
                is_small = len(logit_rows) <= self._num_rows
                step = (
                    self._decode_buffers(len(logit_rows))
                    if is_small
                    else self._fresh_buffers(len(logit_rows), with_logits=True)
                )
                torch.index_select(x, 0, logit_rows, out=step.view(op.out))
            elif isinstance(op, AttentionOp | DeltaRuleOp | Convolve) and layout.is_mixed:
                self._run_mixed(op, step, rows, layout, kernels)
            elif isinstance(op, AttentionOp):
                is_end = logit_rows is None and last is not None and op is last.instruction
                kernels.attention.prompt(
                    op, step, rows, from_start=from_start, layout=layout, only_stores=is_end
                )
            elif isinstance(op, DeltaRuleOp | Convolve):
                self._mixers.run(op, step, rows, decodes=False, starts=layout.starts)
            elif isinstance(op, Mixer):
                self._mixers.run(op, step, rows, decodes=False)
            else:
                self._run(op, step, rows, kernels, decodes=False)
            if last is not None and op is last.instruction:
                if logit_rows is None:
                    return None
                step = self._selected(step, logit_rows, last)
                rows = replace(rows, positions=rows.positions.index_select(0, logit_rows))
        return step.logits

    def _mixer_before_selection(
        self, rows: TokenBatch, logit_rows: Tensor | None
    ) -> LastMixer | None:
        """Return the mixer after which prefill selects the rows with logits. None: all rows remain.

        Exact arithmetic has equal sums for all rows. A draft layer reads all final hidden states.
        """
        is_small = logit_rows is None or len(logit_rows) <= self._num_rows
        is_excluded = self.exact or self.final_states is not None or rows.tiles is not None
        return self._last_mixer if is_small and not is_excluded else None

    def _selected(self, step: Buffers, logit_rows: Tensor, last: LastMixer) -> Buffers:
        """Return the values of the rows with logits after the last mixer."""
        selected = self._decode_buffers(len(logit_rows))
        for view in last.views:
            torch.index_select(step.view(view), 0, logit_rows, out=selected.view(view))
        return selected

    def _run_mixed(
        self,
        op: AttentionOp | DeltaRuleOp | Convolve,
        step: Buffers,
        rows: TokenBatch,
        layout: ChunkLayout,
        kernels: _Kernels,
    ) -> None:
        """Run a mixer for the chunks and the decode rows concurrently. Their slots differ."""
        first, second = (
            (step.part(part), rows.part(part))
            for part in (slice(0, layout.decoding.start), layout.decoding)
        )
        if isinstance(op, AttentionOp):
            prompts = partial(kernels.attention.prompt, op, *first, from_start=False, layout=layout)
            decode = partial(kernels.attention.decode, op, *second, reach=None, captured=False)
        else:
            prompts = partial(self._mixers.run, op, *first, decodes=False, starts=layout.starts)
            decode = partial(self._mixers.run, op, *second, decodes=True)
        self._beside.run(prompts, decode)

    def _run(
        self, each: Plain, step: Buffers, rows: TokenBatch, kernels: _Kernels, *, decodes: bool
    ) -> None:
        if isinstance(each, EmbedOp):
            weight, out = self._weights.weight_of(each), step.view(each.out)
            if weight.format in CODED_TILES:
                decode_rows(out, weight, rows.tokens)
            else:
                embed(out, rows.tokens, weight.data)
            if rows.image_rows is not None:
                out.index_copy_(0, *rows.image_rows)
        elif isinstance(each, ReadHiddenOp):
            assert rows.hidden is not None, "a draft layer has no hidden states"
            step.view(each.out).copy_(rows.hidden)
        elif isinstance(each, SwiGLUOp):
            swiglu_apart(step.view(each.out), step.view(each.gate), step.view(each.up))
        elif isinstance(each, NormHeads):
            kernels.norms.run_heads(each, step, decodes=decodes)
        elif isinstance(each, NormOp):
            kernels.norms.run(each, step, decodes=decodes)
        elif isinstance(each, Elementwise):
            inputs = [step.view(one) if isinstance(one, BufferView) else one for one in each.inputs]
            apply_function(each.function, step.view(each.out), inputs)
        elif isinstance(each, LinearOp):
            kernels.products.run(each, step.view(each.out), step.view(each.x), decodes=decodes)
        elif isinstance(each, CrossAttentionOp | AddGatedOp):
            self._cross.run(each, step, rows, decodes=decodes)
        elif isinstance(each, AllReduceOp | AllReduceAdd):
            self._reduce(each, step, keeps_wire=decodes or kernels.is_strict)

    def _reduce(self, each: AllReduceOp | AllReduceAdd, step: Buffers, *, keeps_wire: bool) -> None:
        assert self.group is not None, "this rank has not met the others"
        exchange = self.group.exchange
        out, x = step.view(each.out), step.view(each.x)
        wire = each.wire if keeps_wire else self._prompt_wire or each.wire
        if isinstance(each, AllReduceOp):
            exchange.all_reduce(out, x, wire=wire)
            return
        norm = None if each.norm is None else self._weights.constant(each.norm)
        normed = None if each.normed is None else step.view(each.normed)
        exchange.all_reduce_add(x, out, wire=wire, out=normed, norm=norm, eps=each.eps)

    def _decode_buffers(self, num_rows: int) -> Buffers:
        return Buffers(self._plan, self._flat, num_rows)

    def _fresh_buffers(self, num_rows: int, *, with_logits: bool = False) -> Buffers:
        """Return a buffer with zero padding: matmuls read the padding."""
        capacity = max(num_rows, self._num_rows)
        flat = [
            (torch.zeros if buffer.role == OPERAND else torch.empty)(
                capacity * padded(buffer.width) if with_logits or buffer.role != LOGITS else 0,
                dtype=self._type(buffer.role),
                device=self.device,
            )
            for buffer in self._plan.buffers
        ]
        return Buffers(self._plan, flat, num_rows)
