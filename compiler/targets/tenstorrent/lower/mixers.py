"""Lowering of routers, experts and Gated DeltaNet."""

from __future__ import annotations

import operator
from typing import Any

from torch.fx import Node

from tilewright.compiler.ir.info import NodeInfo, info
from tilewright.compiler.ir.state import StateSpec
from tilewright.compiler.targets.tenstorrent.lower.context import (
    LoweringContext,
    share_of,
    whose,
)
from tilewright.compiler.targets.tenstorrent.program import placement
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    EXPERTS,
    CausalConv,
    ComputeConfig,
    ExpertMatmul,
    Memory,
    Route,
    TtDeltaRule,
    TtSequenceState,
    TtValue,
    TtWeight,
)
from tilewright.compiler.targets.tenstorrent.program.placements import OUT, as_node, recipe_of
from tilewright.errors import CompileError


def lower_router(ctx: LoweringContext, node: Node) -> None:
    """Append the selection of experts. Its outputs are weights and indices.

    Raises:
        CompileError: The router has sigmoids.
    """
    args: Any = node.args
    if len(args) > 3:
        raise CompileError(
            f"{info(node).fqn}: a sigmoid router: no instruction on Tenstorrent boards; "
            "allowed: --target reference, cpu or cuda"
        )
    x = ctx.value_of(args[0])
    top_k = int(args[1])
    out = ctx.value(node, x.rows, top_k, ctx.format(node, "router"))
    experts = TtValue(f"{node.name}.experts", x.rows, top_k, "int32", out.memory)
    ctx.put(node, Route(out, *whose(node), x, experts, top_k, bool(args[2])))
    for user in node.users:
        assert user.target is operator.getitem
        ctx.alias(user, experts if user.args[1] else out)


def lower_experts(ctx: LoweringContext, node: Node) -> TtValue:
    """Append the products with selected experts. Return their value."""
    args: Any = node.args
    facts = info(node)
    x, experts = ctx.value_of(args[0]), ctx.value_of(args[2])
    weights = ctx.value_of(args[3]) if len(args) > 3 and args[3] is not None else None
    weight = _expert_weight(ctx, node, facts, node.args[1], "weight")
    bias = None
    if len(args) > 4 and args[4] is not None:
        bias = _expert_weight(ctx, node, facts, args[4], "bias")
    top_k = experts.columns
    columns = weight.columns * (1 if weights is not None else top_k)
    group = facts.tensor_group or ""
    format_ = ctx.format(node, facts.op_group or "experts")
    out = ctx.value(node, x.rows, columns, format_, ctx.places.made[node])
    assert facts.compute is not None
    cores = placement.shard_cores(-(-weight.columns // 32))
    instruction = ExpertMatmul(
        out,
        *whose(node),
        x=x,
        weight=weight,
        experts=experts,
        weights=weights,
        compute=ComputeConfig(getattr(facts.compute, ctx.phase)),
        top_k=top_k,
        num_experts=int(recipe_of(args[1]).shape[0]),
        is_expanded=args[0].meta["val"].ndim == 3,
        cores=cores,
        group=group,
        bias=bias,
    )
    ctx.put(node, instruction)
    return out


def _expert_weight(
    ctx: LoweringContext, node: Node, facts: NodeInfo, argument: Any, suffix: str
) -> TtWeight:
    """Return the weights or the biases of all experts. Biases are bfloat16 vectors."""
    recipe, location = recipe_of(argument), ctx.place_of(argument)
    format_ = "bf16"
    if suffix == "weight":
        format_ = str(recipe.format)
        placement.check_weight_format(facts.fqn, format_)
    num_experts, columns, rows = recipe.shape
    return TtWeight(
        name=f"{facts.fqn}.{suffix}",
        recipe=recipe,
        rows=rows,
        columns=columns,
        format=format_,
        memory=Memory(),
        placement=location,
        num_experts=share_of(location, EXPERTS, num_experts),
    )


def lower_conv(ctx: LoweringContext, node: Node) -> None:
    """Append a causal convolution and its window.

    Raises:
        CompileError: The convolution has no SiLU.
    """
    args: Any = node.args
    if not (*args, True)[6]:
        raise CompileError(
            f"{info(node).fqn}: a convolution without SiLU: no instruction on Tenstorrent boards; "
            "allowed: --target reference, cpu or cuda"
        )
    x, recipe, location = ctx.value_of(args[0]), recipe_of(args[1]), ctx.place_of(args[1])
    weight = TtWeight(
        name=f"{info(node).fqn}.weight",
        recipe=recipe,
        rows=recipe.shape[2],
        columns=x.columns,
        format="bf16",
        memory=Memory(),
        placement=location,
    )
    state = _state_of(args[2])
    window = TtSequenceState(
        state.name, state, (x.columns, state.shape[1]), ctx.batch, location.over(OUT)
    )
    out = ctx.like(node, x, ctx.format(node, "causal_conv1d"))
    ctx.put(node, CausalConv(out, *whose(node), x, weight, window, ctx.positions))


def lower_delta_rule(ctx: LoweringContext, node: Node) -> None:
    """Append a gated delta rule and its state."""
    args: Any = node.args
    x, a, b = (ctx.value_of(item) for item in args[:3])
    num_key_heads, key_dim, state = int(args[5]), int(args[6]), _state_of(args[7])
    num_chips = ctx.mesh.rows
    num_value_heads, _, value_dim = state.shape
    of_chip = num_value_heads // num_chips
    location = ctx.place_of(args[7])
    memory = TtSequenceState(
        state.name, state, (of_chip, key_dim, value_dim), ctx.batch, location.over(OUT)
    )
    columns = of_chip * value_dim
    format_ = ctx.format(node, "gated_delta_rule")
    out = ctx.value(node, x.rows, columns, format_, ctx.places.made[node])
    fqn = info(node).fqn
    instruction = TtDeltaRule(
        out,
        *whose(node),
        x=x,
        a=a,
        b=b,
        a_log=ctx.vector(f"{fqn}.A_log", args[3]),
        dt_bias=ctx.vector(f"{fqn}.dt_bias", args[4]),
        memory=memory,
        positions=ctx.positions,
        num_key_heads=num_key_heads // num_chips,
        key_dim=key_dim,
        num_value_heads=of_chip,
    )
    ctx.put(node, instruction)


def _state_of(argument: Any) -> StateSpec:
    state = info(as_node(argument)).state
    assert state is not None
    return state
