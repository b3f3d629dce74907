"""Lowering from a graph to device instructions for a phase and a mesh.

Placements come from `Placements`. Formats and fidelities come from the graph. A collective follows
every matmul with partial sums.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.devices import get_device
from tilewright.compiler.ir.info import Sharding, info
from tilewright.compiler.ir.text import operator_name
from tilewright.compiler.mesh import ROWS, Mesh
from tilewright.compiler.targets.tenstorrent.lower.attention import lower_attention
from tilewright.compiler.targets.tenstorrent.lower.context import (
    SMALL,
    LoweringContext,
    share_of,
    whose,
)
from tilewright.compiler.targets.tenstorrent.lower.mixers import (
    lower_conv,
    lower_delta_rule,
    lower_experts,
    lower_router,
)
from tilewright.compiler.targets.tenstorrent.program import placement
from tilewright.compiler.targets.tenstorrent.program.instructions import (
    DECODE,
    PREFILL,
    Add,
    AllGather,
    ComputeConfig,
    DeviceProgram,
    Gated,
    Matmul,
    Memory,
    ReduceScatter,
    RmsNorm,
    Scale,
    SelectRows,
    Tanh,
    TtAllReduce,
    TtEmbedding,
    TtSwiGLU,
    TtValue,
    TtWeight,
)
from tilewright.compiler.targets.tenstorrent.program.memory_plan import bytes_on_a_core
from tilewright.compiler.targets.tenstorrent.program.placements import IN, OUT, recipe_of
from tilewright.errors import CompileError

aten = torch.ops.aten

# Maximum size in bytes of a gathered logit shard in a core's L1. Larger logits are in DRAM.
_LARGEST_SHARD = 700_000


def lower_program(
    graph_module: GraphModule,
    *,
    device: str,
    mesh: Mesh,
    phase: str,
    batch: int,
    length: int,
    context: int,
) -> DeviceProgram:
    """Return the program for one step with ``batch`` users and ``length`` tokens for every user.

    In decode, ``length`` is 1. In prefill, ``batch`` is 1.

    Args:
        context: Cache capacity for every user in positions.

    Raises:
        CompileError: An operator has no instruction, or the mesh cannot split the heads.
    """
    assert (phase == DECODE and length == 1) or (phase == PREFILL and batch == 1)
    ctx = LoweringContext(
        graph_module,
        get_device(device),
        mesh,
        phase=phase,
        batch=batch,
        length=length,
        context=context,
    )
    vocab_size = 0
    for node in graph_module.graph.nodes:
        if node.op == "call_function":
            _lower(ctx, node)
        elif node.op == "output":
            logits: Any = node.args[0]
            vocab_size = int(logits.meta["val"].shape[-1])
    return DeviceProgram(
        device=ctx.device,
        mesh=mesh,
        phase=phase,
        batch=batch,
        length=length,
        context=context,
        vocab_size=vocab_size,
        inputs=(ctx.tokens, ctx.positions),
        instructions=tuple(ctx.instructions),
    )


def _lower(ctx: LoweringContext, node: Node) -> None:
    target: Any = node.target
    if target is ops.embedding.overload:
        _embedding(ctx, node)
    elif target is ops.rms_norm.overload:
        _norm(ctx, node)
    elif target is ops.linear.overload:
        _linear(ctx, node)
    elif target is ops.rope_attention_step.overload:
        lower_attention(ctx, node)
    elif target in (ops.swiglu.overload, ops.clamped_swiglu.overload):
        gate, up = ctx.operands(node)
        out = ctx.like(node, gate, ctx.format(node, "swiglu"))
        bounds: Any = node.args[2:]
        ctx.put(node, TtSwiGLU(out, *whose(node), gate, up, *map(float, bounds)))
    elif target is aten.add.Tensor:
        x, y = ctx.operands(node)
        out = ctx.like(node, x, ctx.format(node, "residual_add"))
        ctx.put(node, Add(out, *whose(node), x, y))
    elif target is aten.index_select.default:
        (x,) = ctx.operands(node)
        rows = ctx.batch if ctx.phase == DECODE else 1
        out = ctx.value(node, rows, x.columns, x.format, x.placement)
        ctx.put(node, SelectRows(out, *whose(node), x))
    elif target in _LOWERINGS:
        _LOWERINGS[target](ctx, node)
    elif target is not operator.getitem or node not in ctx:
        raise _without_instruction(ctx, node)


def _without_instruction(ctx: LoweringContext, node: Node) -> CompileError:
    return CompileError(
        f"{info(node).fqn or node.name}: {operator_name(node)} has no instruction on target "
        f"{ctx.device.lower()}; allowed: --target reference, cpu or cuda"
    )


def _embedding(ctx: LoweringContext, node: Node) -> None:
    recipe = recipe_of(node.args[1])
    if recipe.format != "bf16":
        raise CompileError(
            f"embedding in {recipe.format}: rows are looked up untiled, which block formats "
            "are not; allowed on Tenstorrent boards: bf16"
        )
    place = ctx.place_of(node.args[1])
    lookup = TtWeight(
        name=f"{info(node).fqn}.weight",
        recipe=recipe,
        rows=recipe.shape[0],
        columns=share_of(place, OUT, recipe.shape[1]),
        format="bf16",
        memory=Memory(),
        placement=place,
        transposed=False,
    )
    rows = ctx.batch * ctx.length
    out = ctx.value(node, rows, lookup.columns, "bf16", ctx.places.made[node])
    ctx.put(node, TtEmbedding(out, *whose(node), ctx.tokens, lookup))


def _norm(ctx: LoweringContext, node: Node) -> None:
    x = ctx.value_of(node.args[0])
    recipe = recipe_of(node.args[1])
    weight = ctx.vector(f"{info(node).fqn}.weight", node.args[1])
    out = ctx.like(node, x, ctx.format(node, "rms_norm"))
    eps: Any = node.args[2]
    heads = x.columns // recipe.shape[0] if node.meta["val"].ndim == 3 else 0
    norm = RmsNorm(out, *whose(node), x, weight, float(eps), recipe.shape[0], SMALL, heads)
    ctx.put(node, norm)


def _gelu(ctx: LoweringContext, node: Node) -> None:
    """Defer GELU to its reader, a multiplication, whose kernel applies GELU."""
    readers = list(node.users)
    if node.args[1:] != ("tanh",) or [each.target for each in readers] != [aten.mul.Tensor]:
        raise _without_instruction(ctx, node)
    ctx.alias(node, ctx.value_of(node.args[0]))


def _multiply(ctx: LoweringContext, node: Node) -> None:
    """Append a multiplication by a number or by an activated gate."""
    x, y = node.args
    if not isinstance(y, Node):
        _scale(ctx, node, float(y))  # type: ignore[arg-type]
        return
    gate = next((each for each in (x, y) if _is(each, ops.gelu.overload)), None)
    if gate is None:
        raise _without_instruction(ctx, node)
    other = y if gate is x else x
    _put_gated(ctx, node, ctx.value_of(gate), ctx.value_of(other), "gelu_tanh", "swiglu")


def _is(argument: Any, target: Any) -> bool:
    return isinstance(argument, Node) and argument.target is target


def _sigmoid_gate(ctx: LoweringContext, node: Node) -> None:
    x, gate = (ctx.value_of(each) for each in node.args)
    _put_gated(ctx, node, gate, x, "sigmoid", "residual_add")


def _put_gated(
    ctx: LoweringContext, node: Node, gate: TtValue, x: TtValue, activation: str, op: str
) -> None:
    out = ctx.like(node, x, ctx.format(node, op))
    ctx.put(node, Gated(out, *whose(node), gate, x, activation))


def _scale(ctx: LoweringContext, node: Node, factor: float) -> None:
    x = ctx.value_of(node.args[0])
    ctx.put(node, Scale(_same_memory(ctx, node, x), *whose(node), x, factor))


def _same_memory(ctx: LoweringContext, node: Node, x: TtValue) -> TtValue:
    return dataclasses.replace(ctx.like(node, x, "bf16"), memory=x.memory)


def _divide(ctx: LoweringContext, node: Node) -> None:
    divisor: Any = node.args[1]
    _scale(ctx, node, 1.0 / float(divisor))


def _tanh(ctx: LoweringContext, node: Node) -> None:
    x = ctx.value_of(node.args[0])
    ctx.put(node, Tanh(_same_memory(ctx, node, x), *whose(node), x))


def _same(ctx: LoweringContext, node: Node) -> None:
    """Alias the operand. Heads are columns on the device: a split or a join changes nothing."""
    ctx.alias(node, ctx.value_of(node.args[0]))


def _experts(ctx: LoweringContext, node: Node) -> None:
    out = lower_experts(ctx, node)
    if len(node.args) > 3 and node.args[3] is not None:
        _finish_product(ctx, node, out, info(node).tensor_group or "")


_LOWERINGS: Mapping[Any, Callable[[LoweringContext, Node], None]] = {
    ops.gelu.overload: _gelu,
    aten.mul.Tensor: _multiply,
    aten.div.Tensor: _divide,
    aten.tanh.default: _tanh,
    ops.sigmoid_gate.overload: _sigmoid_gate,
    aten.unflatten.int: _same,
    aten.flatten.using_ints: _same,
    ops.router.overload: lower_router,
    ops.expert_linear.overload: _experts,
    ops.causal_conv1d_step.overload: lower_conv,
    ops.gated_delta_rule_step.overload: lower_delta_rule,
}
"""Lowering functions by operator, for rare architectures."""


def _linear(ctx: LoweringContext, node: Node) -> None:
    facts = info(node)
    x = ctx.value_of(node.args[0])
    weight = _weight(ctx, node, x)
    bias_node = node.args[2] if len(node.args) > 2 else None
    bias = None
    if bias_node is not None:
        if x.over and ctx.mesh.columns > 1:
            raise CompileError(
                f"{facts.fqn}: a bias after a matmul with inputs sharded over "
                f"{ctx.mesh}; allowed: a mesh of one axis, or --target cuda"
            )
        bias = ctx.vector(f"{facts.fqn}.bias", bias_node)
    format_, place = ctx.format(node, facts.op_group or ""), ctx.places.made[node]
    group = facts.tensor_group or ""
    if place.partial and group == "delta_out" and ctx.phase == PREFILL:
        format_ = "fp32"  # as in the vendor's demo: in bf16, the errors grow over the layers
    out = ctx.value(node, x.rows, weight.columns, format_, place)
    assert facts.compute is not None
    cores, k_block = placement.matmul_blocks(x, weight, ctx.phase)
    compute = ComputeConfig(getattr(facts.compute, ctx.phase))
    ctx.put(node, Matmul(out, *whose(node), x, weight, bias, compute, k_block, cores, group))
    _finish_product(ctx, node, out, group)


def _finish_product(ctx: LoweringContext, node: Node, out: TtValue, group: str) -> None:
    """Append the collectives after a matmul: sums of partial values and a gather for logits."""
    # Logits are not activations: they have the LM head's output format.
    format_ = out.format if group == "lm_head" else ctx.format(node, "collective")
    if out.format == "fp32":
        format_ = "bf16"
    if out.partial and ctx.mesh.columns == 1 and out.tiles[1] % ctx.mesh.rows == 0:
        share = ctx.places.over(ROWS, out.columns)
        columns = share_of(share, OUT, out.columns)
        scattered = ctx.value(node, out.rows, columns, format_, share, suffix="scattered")
        ctx.put(node, ReduceScatter(scattered, *whose(node), out, ROWS))
        whole = ctx.value(node, out.rows, out.columns, format_, suffix="gathered")
        ctx.put(node, AllGather(whole, *whose(node), scattered, ROWS))
    elif out.partial:
        summed = Sharding(out.placement.sharded)
        reduced = ctx.value(node, out.rows, out.columns, format_, summed, suffix="reduced")
        ctx.put(node, TtAllReduce(reduced, *whose(node), out, out.partial))
    if group == "lm_head" and out.over:
        current = ctx.value_of(node)
        columns = out.columns * ctx.mesh.size(out.over)
        logits = ctx.value(node, out.rows, columns, current.format, suffix="logits")
        if bytes_on_a_core(logits) > _LARGEST_SHARD:
            logits = dataclasses.replace(logits, memory=Memory())
        ctx.put(node, AllGather(logits, *whose(node), current, out.over))


def _weight(ctx: LoweringContext, node: Node, x: TtValue) -> TtWeight:
    fqn, recipe, place = info(node).fqn, recipe_of(node.args[1]), ctx.place_of(node.args[1])
    placement.check_weight_format(fqn, recipe.format)
    assert x.columns == share_of(place, IN, recipe.shape[1])
    return TtWeight(
        name=f"{fqn}.weight",
        recipe=recipe,
        rows=x.columns,
        columns=share_of(place, OUT, recipe.shape[0]),
        format=str(recipe.format),
        memory=placement.weight_memory(ctx.num_banks),
        placement=place,
    )
