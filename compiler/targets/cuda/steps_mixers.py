"""Runs a plan's instructions for experts and for linear attention, in decode steps and in prompts.
In Triton throughout; float32 operands make it float32 arithmetic.

Legend: T tokens, K experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from compiler.targets.cuda.buffers import Buffers
from compiler.targets.cuda.instructions import (
    Convolve,
    DeltaRule,
    ExpertLinear,
    ExpertSum,
    Mixer,
    Plan,
    Route,
    SigmoidGate,
)
from compiler.targets.cuda.kernels.causal_conv1d import causal_conv1d_prompt, causal_conv1d_step
from compiler.targets.cuda.kernels.delta_rule import DeltaInputs, delta_rule_step, gated_norm
from compiler.targets.cuda.kernels.delta_rule_prompt import delta_rule_prompt, scratch_bytes
from compiler.targets.cuda.kernels.expert_linear import (
    FEW_PAIRS,
    expert_linear,
    sum_experts,
    tile_size,
)
from compiler.targets.cuda.kernels.route import Groups, group, route
from compiler.targets.cuda.kernels.sigmoid_gate import sigmoid_gate
from compiler.targets.cuda.state import PagedState
from compiler.targets.cuda.weights import Weights, product_of, vector_of

EXPERT_TOKENS = 8192
"""Tokens of a prompt whose experts run together: what their products take is bounded."""


def mixer_bytes(plan: Plan, num_tokens: int) -> int:
    """Bytes that a prompt's mixers take beside the plan's buffers: the largest of them."""
    sizes = [0]
    for each in plan.instructions:
        if isinstance(each, ExpertSum):
            _, num_rows, num_columns = each.weight.shape
            top_k = each.x.width // num_columns
            sizes.append(4 * min(num_tokens, EXPERT_TOKENS) * top_k * num_rows)
        elif isinstance(each, DeltaRule):
            own = 4 * num_tokens * each.out.width
            sizes.append(own + scratch_bytes(num_tokens, each.a.width))
    return max(sizes)


@dataclass(frozen=True, slots=True)
class _Routing:
    """``weights`` and ``experts [T, K]``; the latter grouped for runs of tokens."""

    weights: Tensor
    experts: Tensor
    groups: tuple[Groups, ...]

    @property
    def top_k(self) -> int:
        return self.experts.shape[1]

    def parts(self) -> Iterator[tuple[slice, Groups]]:
        """The runs of tokens, each with its groups."""
        for index, groups in enumerate(self.groups):
            yield slice(index * EXPERT_TOKENS, (index + 1) * EXPERT_TOKENS), groups


class Mixers:
    """A plan's mixers with their weights and state. Capturable in a CUDA graph.

    ``positions`` and ``slots`` are those of a step's tokens: one of each sequence in a decode step,
    all of one sequence in a prompt.
    """

    def __init__(self, weights: Weights, state: PagedState, *, exact: bool) -> None:
        self._weights, self._state, self._exact = weights, state, exact
        self._routing: _Routing | None = None  # the last `Route`'s
        self._watched: list[Tensor] | None = None

    def watch(self, run: Callable[[], object]) -> list[Tensor]:
        """The experts ``[T, K]`` that each `Route` chooses while something runs."""
        self._watched = []
        run()
        found, self._watched = self._watched, None
        return found

    def run(
        self, each: Mixer, step: Buffers, positions: Tensor, slots: Tensor, *, decodes: bool
    ) -> None:
        """One instruction."""
        if isinstance(each, Route):
            self._routing = self._route(each, step.view(each.logits), positions, decodes)
            if self._watched is not None:
                self._watched.append(self._routing.experts)
        elif isinstance(each, ExpertLinear):
            self._products(each, step.view(each.out), step.view(each.x), swiglu=each.swiglu)
        elif isinstance(each, ExpertSum):
            self._sum(each, step)
        elif isinstance(each, SigmoidGate):
            sigmoid_gate(step.view(each.out), step.view(each.x), step.view(each.gate))
        elif isinstance(each, Convolve):
            weight = self._weights.vector(vector_of(each.weight)).flatten(1)
            convolve = causal_conv1d_step if decodes else causal_conv1d_prompt
            convolve(
                step.view(each.out),
                step.view(each.x),
                weight,
                window=self._state.sequences[each.state.name],
                positions=positions,
                slots=slots,
            )
        else:
            self._delta_rule(each, step, positions, slots, decodes)

    def _route(self, each: Route, logits: Tensor, positions: Tensor, decodes: bool) -> _Routing:
        num_tokens, num_experts = logits.shape
        weights = logits.new_empty(num_tokens, each.top_k)
        experts = torch.empty_like(weights, dtype=torch.int32)
        parts = []
        for first in range(0, num_tokens, EXPERT_TOKENS):
            num_pairs = min(EXPERT_TOKENS, num_tokens - first) * each.top_k
            # A row's arithmetic must not depend on how many a decode step has; in float32 there are
            # no registers for large tiles.
            is_small = decodes or self._exact
            size = FEW_PAIRS if is_small else tile_size(num_pairs, num_experts)
            parts.append(Groups.empty(num_pairs, num_experts, size, logits.device))
        alone = parts[0] if num_tokens == 1 else None
        renormalise = each.renormalise
        route(weights, experts, logits, positions, renormalise=renormalise, groups=alone)
        routing = _Routing(weights, experts, tuple(parts))
        if alone is None:
            for part, groups in routing.parts():
                group(groups, experts[part])
        return routing

    def _products(
        self, each: ExpertLinear | ExpertSum, out: Tensor, x: Tensor, *, swiglu: bool
    ) -> None:
        routing = self._routing
        assert routing is not None
        held = self._weights.held(product_of(each))
        for part, groups in routing.parts():
            expert_linear(out[part], x[part], held, groups, top_k=routing.top_k, swiglu=swiglu)

    def _sum(self, each: ExpertSum, step: Buffers) -> None:
        routing = self._routing
        assert routing is not None
        held = self._weights.held(product_of(each))
        out, x = step.view(each.out), step.view(each.x)
        shared = None if each.shared is None else [step.view(place) for place in each.shared]
        most = min(EXPERT_TOKENS, len(out))
        products = out.new_empty(most, routing.top_k * held.num_rows)
        for part, groups in routing.parts():
            few = products[: len(x[part])]
            expert_linear(few, x[part], held, groups, top_k=routing.top_k)
            sum_experts(
                out[part],
                few,
                routing.weights[part],
                routing.experts[part],
                residual=each.residual,
                shared=None if shared is None else (shared[0][part], shared[1][part]),
            )

    def _delta_rule(
        self, each: DeltaRule, step: Buffers, positions: Tensor, slots: Tensor, decodes: bool
    ) -> None:
        inputs = DeltaInputs(
            step.view(each.qkv),
            step.view(each.a),
            step.view(each.b),
            self._weights.vector(vector_of(each.a_log)),
            self._weights.vector(vector_of(each.dt_bias)),
            each.num_key_heads,
            each.key_dim,
        )
        out, z = step.view(each.out), step.view(each.z)
        weight = self._weights.vector(vector_of(each.norm))
        where = {
            "state": self._state.sequences[each.state.name],
            "positions": positions,
            "slots": slots,
        }
        if decodes:
            delta_rule_step(out, inputs, z, (weight, each.eps), **where)
            return
        heads = z.new_empty(z.shape)
        delta_rule_prompt(heads, inputs, **where)
        gated_norm(out, heads, z, weight, eps=each.eps)
