"""Emulator for device programs: runs them chip by chip on this machine's CPU or GPU.

Matmuls equal the matrix unit bit for bit. Small operators are in ``arithmetic.py``. The emulator
does not predict time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from tilewright.compiler.devices import WORMHOLE, get_device
from tilewright.compiler.formats.block_float import TILE
from tilewright.compiler.targets.interface.threads import single_torch_thread
from tilewright.compiler.targets.tenstorrent.emulate import arithmetic, mixers
from tilewright.compiler.targets.tenstorrent.emulate.arithmetic import pack
from tilewright.compiler.targets.tenstorrent.emulate.matrix_unit import MatmulSettings, matmul
from tilewright.compiler.targets.tenstorrent.program.chips import Chip, PerChip, along, axes_of
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    Add,
    AllGather,
    CausalConv,
    ConcatHeads,
    CreateHeads,
    DeviceProgram,
    ExpertMatmul,
    Gated,
    Matmul,
    ReduceScatter,
    RmsNorm,
    Rotate,
    Route,
    Scale,
    SelectRows,
    Tanh,
    TtAllReduce,
    TtAttention,
    TtDeltaRule,
    TtEmbedding,
    TtInstruction,
    TtSwiGLU,
    TtValue,
    TtWeight,
    UpdateCache,
)

_SMALL_ROWS = 8


@dataclass(frozen=True, slots=True)
class EmulatorBatch:
    """A step's rows.

    Attributes:
        tokens, positions: Shape ``[T]``.
        first_positions: First position by sequence.
        logit_rows: Rows with logits ``[R]``.
        bounds: Sequence ``i`` has the rows ``bounds[i] : bounds[i + 1]``.
        slots: Slot in caches and states, by sequence.
    """

    tokens: Tensor
    positions: Tensor
    first_positions: tuple[int, ...]
    logit_rows: Tensor
    bounds: tuple[int, ...]
    slots: tuple[int, ...]


class Emulator:
    """Weights and caches on a mesh, and an interpreter for programs."""

    def __init__(self, weights: Mapping[str, PerChip], caches: Mapping[str, PerChip]) -> None:
        """Store weights and caches by name. A cache has ``[slots, positions, heads, head_dim]`` a
        chip.
        """
        self._weights, self._caches = weights, caches
        self._run_of: dict[type[TtInstruction], Callable[..., None]] = {
            TtEmbedding: self._embedding,
            RmsNorm: self._norm,
            Matmul: self._matmul,
            CreateHeads: self._create_heads,
            Rotate: self._rotate,
            UpdateCache: self._update_cache,
            TtAttention: self._attention,
            ConcatHeads: self._concat_heads,
            TtSwiGLU: self._swiglu,
            Gated: self._gated,
            Scale: self._scale,
            Tanh: self._tanh,
            Route: self._route,
            ExpertMatmul: self._expert_matmul,
            CausalConv: self._conv,
            TtDeltaRule: self._delta_rule,
            Add: self._add,
            SelectRows: self._select_rows,
            ReduceScatter: self._reduce,
            TtAllReduce: self._reduce,
            AllGather: self._gather,
        }

    @torch.no_grad()
    def run(self, program: DeviceProgram, work: EmulatorBatch) -> Tensor:
        """Run a step. Return float32 logits ``[R, vocab]`` for ``work.logit_rows``."""
        step = _StepValues(program, work)
        last = program.instructions[-1].out
        for instruction in program.instructions:
            self._run_of[type(instruction)](instruction, step)
        return step.get(last, (0, 0))[:, : program.vocab_size].float()

    def _embedding(self, op: TtEmbedding, step: _StepValues) -> None:
        lookup = self._weight(op.table)
        for chip in step.chips(op.out):
            step.put(op.out, chip, lookup[chip][step.work.tokens])

    def _norm(self, op: RmsNorm, step: _StepValues) -> None:
        weight = self._weight(op.weight)
        if op.num_heads:
            self._norm_heads(op, weight, step)
            return
        for chip in step.chips(op.out):
            line = along(step.mesh, op.x.over, chip) if op.x.over else [chip]
            parts = [arithmetic.sum_of_squares(step.get(op.x, other)) for other in line]
            if len(parts) > 1:  # Chips send bfloat16
                parts = [part.bfloat16().float() for part in parts]
            mean_square = torch.stack(parts).sum(0) / op.width
            x, out = step.get(op.x, chip), op.out
            normed = arithmetic.rms_norm(x, weight[chip], mean_square, op.eps, out.format)
            step.put(out, chip, normed)

    def _norm_heads(self, op: RmsNorm, weight: PerChip, step: _StepValues) -> None:
        for chip in step.chips(op.out):
            x = step.get(op.x, chip).unflatten(-1, (op.num_heads, -1))
            mean_square = arithmetic.sum_of_squares(x) / op.width
            format_ = op.out.format
            normed = arithmetic.rms_norm(x, weight[chip], mean_square, op.eps, "bf16").flatten(-2)
            step.put(op.out, chip, normed if format_ == "bf16" else pack(normed, format_))

    def _matmul(self, op: Matmul, step: _StepValues) -> None:
        weight, out = self._weight(op.weight), op.out
        format_ = out.format
        if op.bias is not None:  # the bias is added before the result is packed
            format_ = "fp32" if op.compute.fp32_dst else "bf16"
        settings = MatmulSettings.of(
            op.compute.name,
            k_block=op.k_block * TILE,
            out_format=format_,
            sign_error=step.sign_error,
        )
        for chip in step.chips(out):
            product = matmul(step.get(op.x, chip), weight[chip], settings)
            if op.bias is not None:
                product = product + self._weight(op.bias)[chip].float()
            step.put(out, chip, _written(product, out.format, settings.out_format))

    def _create_heads(self, op: CreateHeads, step: _StepValues) -> None:
        sizes = [count * op.head_dim for count in (op.num_heads, *[op.num_kv_heads] * 2)]
        for chip in step.chips(op.out):
            parts = step.get(op.x, chip).split(sizes, dim=-1)
            for value, part in zip((op.out, op.k, op.v), parts, strict=True):
                step.put(value, chip, part)

    def _rotate(self, op: Rotate, step: _StepValues) -> None:
        frequencies = self._weight(op.frequencies)
        for chip in step.chips(op.out):
            x = step.get(op.x, chip).unflatten(-1, (op.num_heads, op.head_dim))
            turned = arithmetic.rotate(
                x,
                step.work.positions,
                frequencies[chip],
                interleaved=op.interleaved,
                format_=op.out.format,
                factor=op.factor,
            )
            step.put(op.out, chip, turned.flatten(-2))

    def _update_cache(self, op: UpdateCache, step: _StepValues) -> None:
        cache, sizes = self._caches[op.cache.name], (op.cache.num_heads, op.cache.head_dim)
        for chip in step.chips(op.x):
            rows = pack(step.get(op.x, chip).unflatten(-1, sizes).float(), op.cache.format)
            for slot, start, first, last in step.sequences():
                cache[chip][slot, start : start + last - first] = rows[first:last]

    def _attention(self, op: TtAttention, step: _StepValues) -> None:
        keys, values = self._caches[op.keys.name], self._caches[op.values.name]
        sinks = None if op.sinks is None else self._weight(op.sinks)
        for chip in step.chips(op.out):
            q = step.get(op.q, chip).unflatten(-1, (op.num_heads, op.head_dim))
            parts = []
            for slot, start, first, last in step.sequences():
                stored = (slot, slice(start + last - first))
                here = q[first:last], keys[chip][stored], values[chip][stored]
                how = {
                    "sign_error": step.sign_error,
                    "accurate": step.has_accurate_attention and op.compute.fp32_dst,
                    "sinks": None if sinks is None else sinks[chip],
                }
                # A few rows run faster on a single thread.
                with single_torch_thread() if last - first < _SMALL_ROWS else nullcontext():
                    parts.append(arithmetic.attend(*here, start, op, **how))  # type: ignore[arg-type]
            step.put(op.out, chip, torch.cat(parts).flatten(-2))

    def _concat_heads(self, op: ConcatHeads, step: _StepValues) -> None:
        for chip in step.chips(op.out):
            step.put(op.out, chip, step.get(op.x, chip))

    def _swiglu(self, op: TtSwiGLU, step: _StepValues) -> None:
        for chip in step.chips(op.out):
            gate, up = step.get(op.gate, chip), step.get(op.up, chip)
            gated = arithmetic.swiglu(gate, up, op.out.format, limit=op.limit, alpha=op.alpha)
            step.put(op.out, chip, gated)

    def _gated(self, op: Gated, step: _StepValues) -> None:
        for chip in step.chips(op.out):
            gate, x = step.get(op.gate, chip), step.get(op.x, chip)
            step.put(op.out, chip, arithmetic.gated(gate, x, op.activation, op.out.format))

    def _scale(self, op: Scale, step: _StepValues) -> None:
        for chip in step.chips(op.out):
            x = step.get(op.x, chip)
            step.put(op.out, chip, arithmetic.scale(x, op.factor, op.out.format))

    def _tanh(self, op: Tanh, step: _StepValues) -> None:
        for chip in step.chips(op.out):
            step.put(op.out, chip, pack(step.get(op.x, chip).float().tanh(), op.out.format))

    def _route(self, op: Route, step: _StepValues) -> None:
        for chip in step.chips(op.out):
            weights, experts = mixers.route(step.get(op.x, chip), op)
            step.put(op.out, chip, weights)
            step.put(op.experts, chip, experts)

    def _expert_matmul(self, op: ExpertMatmul, step: _StepValues) -> None:
        weight = self._weight(op.weight)
        for chip in step.chips(op.out):
            weights = None if op.weights is None else step.get(op.weights, chip)
            bias = None if op.bias is None else self._weight(op.bias)[chip]
            products = mixers.expert_products(
                step.get(op.x, chip),
                weight[chip],
                step.get(op.experts, chip),
                weights,
                op,
                first=chip[0] * op.weight.num_experts if op.weight.expert_over else 0,
                sign_error=step.sign_error,
                bias=bias,
            )
            step.put(op.out, chip, products)

    def _conv(self, op: CausalConv, step: _StepValues) -> None:
        weight, windows = self._weight(op.weight), self._caches[op.window.name]
        for chip in step.chips(op.out):
            x, parts = step.get(op.x, chip), []
            for slot, start, first, last in step.sequences():
                window = _begin(windows[chip][slot], start)
                parts.append(mixers.convolve(x[first:last], weight[chip], window, op))
            step.put(op.out, chip, torch.cat(parts))

    def _delta_rule(self, op: TtDeltaRule, step: _StepValues) -> None:
        memories = self._caches[op.memory.name]
        a_log, dt_bias = self._weight(op.a_log), self._weight(op.dt_bias)
        for chip in step.chips(op.out):
            parts = []
            for slot, start, first, last in step.sequences():
                memory = _begin(memories[chip][slot], start)
                x, a, b = (step.get(value, chip)[first:last] for value in (op.x, op.a, op.b))
                vectors = a_log[chip], dt_bias[chip]
                parts.append(mixers.delta_rule(x, a, b, vectors, memory, op))
            step.put(op.out, chip, torch.cat(parts))

    def _add(self, op: Add, step: _StepValues) -> None:
        for chip in step.chips(op.out):
            total = step.get(op.x, chip).float() + step.get(op.y, chip).float()
            step.put(op.out, chip, pack(total, op.out.format))

    def _select_rows(self, op: SelectRows, step: _StepValues) -> None:
        for chip in step.chips(op.out):
            step.put(op.out, chip, step.get(op.x, chip)[step.work.logit_rows])

    def _reduce(self, op: ReduceScatter | TtAllReduce, step: _StepValues) -> None:
        """Cast the values to the sum's format and add them on a ring.

        After a scatter, a chip stores its shard. A float32 sum is rounded to even.
        """
        out = op.out
        format_ = "fp32" if op.x.format == "fp32" else out.format
        for chip in step.chips(op.x, without=op.axis):
            line = along(step.mesh, op.axis, chip)
            parts = [arithmetic.cast(step.get(op.x, peer), format_) for peer in line]
            total = arithmetic.ring_sum(parts, format_).bfloat16()
            if isinstance(op, TtAllReduce):
                step.put(out, chip, total)
                continue
            assert out.split is not None
            for rank, peer in enumerate(line):
                step.put(out, peer, out.split.take(total, 1, rank))

    def _gather(self, op: AllGather, step: _StepValues) -> None:
        for chip in step.chips(op.out):
            line = along(step.mesh, op.axis, chip)
            whole = torch.cat([step.get(op.x, peer) for peer in line], -1)
            step.put(op.out, chip, whole[:, : op.out.columns])

    def _weight(self, weight: TtWeight) -> PerChip:
        return self._weights[weight.name]


class _StepValues:
    """Values in a running step."""

    def __init__(self, program: DeviceProgram, work: EmulatorBatch) -> None:
        self.mesh, self.work = program.mesh, work
        self.sign_error = get_device(program.device).architecture == WORMHOLE
        # Blackhole's kernel for prompts. Steps have another operator.
        self.has_accurate_attention = not self.sign_error and program.phase == "prefill"
        self._values: dict[str, PerChip] = {}

    def chips(self, value: TtValue, *, without: str = "") -> list[Chip]:
        """Return one chip for every distinct shard of ``value``, or for every line along
        ``without``.
        """
        axes = axes_of(value).replace(without, "") if without else axes_of(value)
        return list(PerChip(self.mesh, axes).chips())

    def get(self, value: TtValue, chip: Chip) -> Tensor:
        return self._values[value.name][chip]

    def put(self, value: TtValue, chip: Chip, part: Tensor) -> None:
        stored = self._values.setdefault(value.name, PerChip(self.mesh, axes_of(value)))
        stored[chip] = part

    def sequences(self) -> list[tuple[int, int, int, int]]:
        """Return slot, first position, first row and end row of every sequence."""
        work = self.work
        starts, bounds = work.first_positions, pairwise(work.bounds)
        return [(slot, at, *b) for slot, at, b in zip(work.slots, starts, bounds, strict=True)]


def _begin(state: Tensor, start: int) -> Tensor:
    """Return a sequence's state. Clear it at the sequence's start."""
    return state.zero_() if start == 0 else state


def _written(product: Tensor, format_: str, done: str) -> Tensor:
    """Return a matmul result in its value's format. The matrix unit has packed it to ``done``."""
    if format_ == "fp32":
        return product
    return product.bfloat16() if done == format_ else pack(product, format_)
