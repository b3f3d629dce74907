"""Lowering of expert and linear attention ops to instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch.fx import Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.state import StateSpec
from tilewright.compiler.targets.program.instructions import (
    OPERAND,
    PRODUCT,
    RESIDUAL,
    BufferView,
    Convolve,
    DeltaRuleOp,
    ExpertLinearOp,
    ExpertSum,
    Instruction,
    Needs,
    SigmoidGate,
    TopKRouteOp,
)
from tilewright.errors import CompileError

EXPERTS = (ops.expert_linear.overload, ops.fused_expert_linear.overload)
"""Overloads of expert matmuls."""

_LOCAL = ops.local_experts.overload


class LoweringState(Protocol):
    """The lowering state: instructions and the value columns.

    ``routed`` is the router for the current expert selection.
    """

    routed: Node | None
    needs: Needs

    def append(self, instruction: Instruction) -> None: ...
    def place(self, node: Node) -> BufferView: ...
    def take(self, node: Node, role: str) -> BufferView: ...
    def add_to(self, node: Node, residual: Node) -> BufferView: ...
    def role(self, node: Node) -> str: ...


def _route(lowering: LoweringState, node: Node) -> None:
    logits, top_k, renormalise, *more = node.args
    assert isinstance(logits, Node) and isinstance(top_k, int)
    own = [each for chosen in node.users for each in chosen.users if each.target is _LOCAL]
    first, count = (0, None) if not own else own[0].args[1:]
    if own and not lowering.needs.deals_experts:
        raise CompileError(
            f"{info(node).fqn}: whole experts on some of the ranks have no kernel on target "
            f"{lowering.needs.target}; allowed: --expert-parallel-size 1"
        )
    assert isinstance(first, int) and (count is None or isinstance(count, int))
    bias = more[0] if more else None
    scale = more[1] if len(more) > 1 else 1.0
    assert isinstance(scale, float)
    route = TopKRouteOp(
        lowering.place(logits),
        top_k,
        bool(renormalise),
        first,
        count,
        bias=None if bias is None else recipe_of(bias),
        scale=scale,
    )
    lowering.append(route)
    lowering.routed = node


def _local_experts(lowering: LoweringState, node: Node) -> None:
    """Emit nothing: the router's instruction includes it."""


def _expert_linear(lowering: LoweringState, node: Node) -> None:
    arguments = ops.FusedExpertArguments.of(node.args)
    for choice in (arguments.experts, arguments.weights):
        chosen = choice.args[0] if choice is not None and choice.target is _LOCAL else choice
        assert chosen is None or chosen.args[0] is lowering.routed, f"{node}: another's experts"  # type: ignore[union-attr]
    facts, x, weight = info(node), lowering.place(arguments.x), recipe_of(arguments.weight)
    group = facts.tensor_group or ""
    bias = None if arguments.bias is None else recipe_of(arguments.bias)
    if arguments.weights is None:
        out = lowering.take(node, OPERAND if arguments.swiglu else PRODUCT)
        product = ExpertLinearOp(
            *(facts.fqn, out, x, weight, arguments.swiglu, group, facts.compute),
            bias=bias,
            limit=arguments.limit,
            alpha=arguments.alpha,
        )
        lowering.append(product)
        return
    shared = None
    if arguments.shared is not None:
        shared = lowering.place(arguments.shared), lowering.place(arguments.shared_gate)
    if arguments.residual is not None:
        out = lowering.add_to(node, arguments.residual)
    else:
        out = lowering.take(node, RESIDUAL)
    has_residual = arguments.residual is not None
    total = ExpertSum(
        facts.fqn, out, x, weight, has_residual, shared, group, facts.compute, bias=bias
    )
    lowering.append(total)


def _sigmoid_gate(lowering: LoweringState, node: Node) -> None:
    x, gate = (lowering.place(each) for each in node.args)  # type: ignore[arg-type]
    lowering.append(SigmoidGate(lowering.take(node, lowering.role(node)), x, gate))


def values_read(node: Node) -> list[Node]:
    """Return the values a node's instruction reads.

    A delta rule's instruction also reads its convolution's inputs.
    """
    if _belongs_to_its_reader(node):
        return []
    convolution = _convolution_of(node)
    return node.all_input_nodes + ([] if convolution is None else convolution.all_input_nodes)


def _convolution_of(node: Node) -> Node | None:
    """Return a delta rule's convolution if no other node reads it, else None."""
    if node.target is not ops.delta_rule_norm_step.overload:
        return None
    qkv = ops.DeltaNormArguments(*node.args).qkv  # type: ignore[arg-type]
    is_own = qkv.target is ops.causal_conv1d_step.overload and len(qkv.users) == 1
    return qkv if is_own else None


def _belongs_to_its_reader(convolution: Node) -> bool:
    return any(_convolution_of(reader) is convolution for reader in convolution.users)


def _convolve(lowering: LoweringState, node: Node) -> None:
    if not _belongs_to_its_reader(node):
        lowering.append(_convolution(lowering, node))


def _convolution(lowering: LoweringState, node: Node) -> Convolve:
    x, weight, window = node.args[:3]
    assert isinstance(x, Node)
    columns, state = lowering.place(x), _state(window)
    silu = bool((*node.args, True)[6])
    return Convolve(lowering.take(node, PRODUCT), columns, recipe_of(weight), state, silu)


def _delta_rule(lowering: LoweringState, node: Node) -> None:
    arguments = ops.DeltaNormArguments(*node.args)  # type: ignore[arg-type]
    state = _state(arguments.state)
    most = lowering.needs.max_delta_dim
    if most is not None and max(state.shape[1:]) > most:
        raise CompileError(
            f"{info(node).fqn}: keys of {state.shape[1]} and values of {state.shape[2]} channels "
            f"on target {lowering.needs.target}; allowed: up to {most}, "
            f"or --target {lowering.needs.others}"
        )
    convolution = _convolution_of(node)
    convolve = None if convolution is None else _convolution(lowering, convolution)
    qkv, a, b, z = (
        lowering.place(each) for each in (arguments.qkv, arguments.a, arguments.b, arguments.z)
    )
    rule = DeltaRuleOp(
        out=lowering.take(node, OPERAND),
        qkv=qkv,
        a=a,
        b=b,
        z=z,
        a_log=recipe_of(arguments.a_log),
        dt_bias=recipe_of(arguments.dt_bias),
        norm=recipe_of(arguments.norm_weight),
        eps=arguments.eps,
        num_key_heads=arguments.num_key_heads,
        key_dim=arguments.key_dim,
        state=state,
        convolve=convolve,
    )
    lowering.append(rule)


MIXERS: dict[Any, Callable[[LoweringState, Node], None]] = {
    ops.router.overload: _route,
    _LOCAL: _local_experts,
    ops.expert_linear.overload: _expert_linear,
    ops.fused_expert_linear.overload: _expert_linear,
    ops.sigmoid_gate.overload: _sigmoid_gate,
    ops.causal_conv1d_step.overload: _convolve,
    ops.delta_rule_norm_step.overload: _delta_rule,
}
"""Lowering function by op."""


def recipe_of(node: Any) -> WeightRecipe:
    """Return a weight node's recipe."""
    found = info(node).recipe
    assert found is not None, f"{node} is no weight"
    return found


def _state(node: Any) -> StateSpec:
    found = info(node).state
    assert found is not None, f"{node} is no state"
    return found
