"""Converts a lowered graph to an ONNX model with fused operators.

A function per operator writes to an `Emitter`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto
from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import STATE, info
from tilewright.compiler.ir.text import operator_name
from tilewright.compiler.targets.cpu.onnxruntime.emit_delta_rule import DELTA_EMITTERS
from tilewright.compiler.targets.cpu.onnxruntime.emit_elementwise import (
    ELEMENTWISE_EMITTERS,
    add_norm,
)
from tilewright.compiler.targets.cpu.onnxruntime.emit_experts import emit_experts, refuse_router
from tilewright.compiler.targets.cpu.onnxruntime.emitter import (
    CONTRIB,
    HIDDEN,
    KEY_SUFFIX,
    VALUE_SUFFIX,
    CacheSpec,
    Emitter,
)
from tilewright.compiler.targets.cpu.onnxruntime.numerics import (
    INT8_LEVEL,
    is_bfloat16_table,
    is_native,
)
from tilewright.errors import CompileError

HEAD_DIM_MULTIPLE = 16
"""Required multiple for head sizes, if GroupQueryAttention rotates."""

PAIRS_MULTIPLE = 8
"""Required multiple for rotated pairs in GroupQueryAttention."""

aten = torch.ops.aten


def emit_model(
    graph_module: GraphModule,
    emitter: Emitter,
    on_node: Callable[[int, int], None] = lambda done, total: None,
) -> onnx.ModelProto:
    """Express a graph in ONNX. ``on_node`` receives the numbers of emitted nodes and all nodes.

    Raises:
        CompileError: ONNX Runtime has no operator for a node.
    """
    nodes = list(graph_module.graph.nodes)
    logits = ""
    for done, node in enumerate(nodes):
        if node.op == "call_function":
            emit = _EMITTERS.get(node.target)
            if emit is None:
                raise CompileError(
                    f"{info(node).fqn}: the cpu target has no operator for {operator_name(node)}"
                )
            emit(emitter, node)
        elif node.op == "output":
            logits = node.args[0].name
        on_node(done + 1, len(nodes))
    return emitter.model(logits)


def _emit_embedding(emitter: Emitter, node: Node) -> None:
    tokens, weight = node.args
    assert isinstance(weight, Node) and isinstance(tokens, Node) and tokens.target == "tokens"
    recipe = emitter.recipe(weight)
    assert recipe.format is not None
    if is_bfloat16_table(recipe.format):
        table = emitter.weights.bfloat16(recipe)
        emitter.add("Gather", [table, "tokens"], [f"{node.name}_bf16"])
        emitter.add("Cast", [f"{node.name}_bf16"], [node.name], to=TensorProto.FLOAT)
        return
    emitter.add("Gather", [emitter.weights.dense(recipe), "tokens"], [node.name])


def _emit_linear(emitter: Emitter, node: Node) -> None:
    x, weight, *rest = node.args
    assert isinstance(x, Node) and isinstance(weight, Node)
    recipe = emitter.recipe(weight)
    assert recipe.format is not None
    bias = rest[0] if rest and isinstance(rest[0], Node) else None
    product = node.name if bias is None else f"{node.name}_product"
    compute = info(node).compute
    assert compute is not None
    if is_native(recipe.format, recipe.block_axis, compute.decode, exact=emitter.exact):
        blocks = emitter.weights.blocks(recipe)
        emitter.add(
            "MatMulNBits",
            [x.name, blocks.codes, blocks.scales],
            [product],
            CONTRIB,
            K=blocks.num_columns,
            N=blocks.num_rows,
            bits=blocks.bits,
            block_size=blocks.block,
            accuracy_level=INT8_LEVEL,
        )
    else:
        dense = emitter.weights.dense(recipe, transposed=True)
        emitter.add("MatMul", [x.name, dense], [product])
    if bias is not None:
        emitter.add("Add", [product, emitter.weights.dense(emitter.recipe(bias))], [node.name])


def _emit_getitem(emitter: Emitter, node: Node) -> None:
    source, index = node.args
    assert isinstance(source, Node)
    emitter.add("Identity", [f"{source.name}.{index}"], [node.name])


def _emit_split(emitter: Emitter, node: Node) -> None:
    x, sizes, _ = node.args
    assert isinstance(x, Node) and isinstance(sizes, list | tuple)
    _split(emitter, x.name, list(sizes), node.name)


def _split(emitter: Emitter, x: str, sizes: list[Any], result: str) -> list[str]:
    """Split the columns of ``x`` into ``result.0`` and so on."""
    lengths = emitter.constant(
        "split_" + "_".join(map(str, sizes)), np.array(sizes, dtype=np.int64)
    )
    outputs = [f"{result}.{index}" for index in range(len(sizes))]
    emitter.add("Split", [x, lengths], outputs, axis=-1)
    return outputs


def _emit_attention(emitter: Emitter, node: Node) -> None:
    given = ops.RopeAttentionArguments.of(node.args)
    facts = info(given.kv_cache)
    assert facts.role == STATE and facts.state is not None
    _, num_kv_heads, head_dim = facts.state.shape
    num_pairs = emitter.recipe(given.inv_freq).shape[0]
    for what, number, multiple in (
        ("head_dim", head_dim, HEAD_DIM_MULTIPLE),
        ("rotations of pairs", num_pairs, PAIRS_MULTIPLE),
    ):
        if number % multiple:
            raise CompileError(
                f"{facts.fqn}: the cpu target does not run {what} {number}; "
                f"allowed: multiples of {multiple}"
            )
    if given.sinks is not None:
        raise CompileError(f"{facts.fqn}: sinks; allowed: --backend native")
    emitter.caches.append(CacheSpec(facts.state.name, num_kv_heads, head_dim))
    names = [f"{facts.state.name}{suffix}" for suffix in (KEY_SUFFIX, VALUE_SUFFIX)]
    parts = [part.name if part is not None else "" for part in given[:3]]
    if given.q_norm is not None:
        parts = _normed_heads(emitter, node, given, parts, num_kv_heads)
    cos, sin = emitter.rotary_tables(emitter.recipe(given.inv_freq), given.factor)
    emitter.add(
        "GroupQueryAttention",
        [*parts, *names, "last_positions", "total_length", cos, sin],
        [node.name, *[f"{name}.out" for name in names]],
        CONTRIB,
        num_heads=given.num_heads,
        kv_num_heads=num_kv_heads,
        scale=given.scale,
        softcap=given.soft_cap,
        do_rotary=1,
        rotary_interleaved=int(given.interleaved),
        local_window_size=given.window if given.window else -1,
    )


def _normed_heads(
    emitter: Emitter,
    node: Node,
    given: ops.RopeAttentionArguments,
    parts: list[str],
    num_kv_heads: int,
) -> list[str]:
    """Separate q, k and v, and normalize the heads of q and k, because the operator does not."""
    head_dim = emitter.recipe(given.q_norm).shape[0]
    counts = [given.num_heads, num_kv_heads, num_kv_heads]
    if not parts[1]:
        sizes = [count * head_dim for count in counts]
        parts = _split(emitter, parts[0], sizes, f"{node.name}_parts")
    normed: list[str] = []
    for part, count, weight in zip(
        parts[:2], counts[:2], (given.q_norm, given.k_norm), strict=True
    ):
        name = f"{node.name}_{'qk'[len(normed)]}"
        emitter.reshape(part, [count, head_dim], f"{name}_heads")
        add_norm(emitter, f"{name}_heads", weight, given.norm_eps, f"{name}_normed")
        emitter.reshape(f"{name}_normed", [count * head_dim], name)
        normed.append(name)
    return [*normed, parts[2]]


def _emit_index_select(emitter: Emitter, node: Node) -> None:
    x, axis, rows = node.args
    assert isinstance(x, Node) and isinstance(rows, Node)
    assert axis == 0 and rows.target == "logit_rows"
    width = int(x.meta["val"].shape[-1])
    shape = emitter.constant(f"flat_{width}", np.array([-1, width], dtype=np.int64))
    emitter.hidden_size = width
    emitter.add("Reshape", [x.name, shape], [HIDDEN])
    emitter.add("Gather", [HIDDEN, "logit_rows"], [node.name])


_EMITTERS: dict[Any, Callable[[Emitter, Node], None]] = {
    ops.embedding.overload: _emit_embedding,
    ops.linear.overload: _emit_linear,
    ops.rope_attention_step.overload: _emit_attention,
    aten.split_with_sizes.default: _emit_split,
    ops.experts.overload: emit_experts,
    ops.router.overload: refuse_router,
    aten.index_select.default: _emit_index_select,
    operator.getitem: _emit_getitem,
    **ELEMENTWISE_EMITTERS,
    **DELTA_EMITTERS,
}
