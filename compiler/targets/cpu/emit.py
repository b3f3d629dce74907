"""The lowered graph as one ONNX model of ONNX Runtime's fused operators.

Tokens ``[T]`` of the graph are ``[B, S]`` here: B windows of S tokens each. One emitter an op.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper
from torch.fx import GraphModule, Node

from compiler import ops
from compiler.errors import CompileError
from compiler.ir.info import CONSTANT, STATE, WEIGHT, info
from compiler.ir.recipe import WeightRecipe
from compiler.ir.text import operator_name
from compiler.targets.cpu.numerics import INT8_LEVEL, is_bfloat16_table, is_native
from compiler.targets.cpu.weights import WeightFile

CONTRIB = "com.microsoft"
KEY_SUFFIX, VALUE_SUFFIX = ".key", ".value"
HEAD_DIM_MULTIPLE = 16
"""What GroupQueryAttention asks of head sizes when it rotates inside."""

_OPSET, _CONTRIB_OPSET, _IR_VERSION = 21, 1, 10

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One layer's cache as the session sees it: ``[B, G, L, D]`` twice, bound by pointer."""

    name: str
    num_kv_heads: int
    head_dim: int


class Emitter:
    """Turns nodes into ONNX nodes; values keep the names of the graph's nodes."""

    def __init__(
        self,
        weights: WeightFile,
        *,
        exact: bool,
        max_context: int,
        vocab_size: int,
        on_node: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        self.weights = weights
        self.exact = exact
        self.max_context = max_context
        self.vocab_size = vocab_size
        self.caches: list[CacheSpec] = []
        self._on_node = on_node
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._rotary: dict[WeightRecipe, tuple[str, str]] = {}

    def emit(self, graph_module: GraphModule) -> onnx.ModelProto:
        """The whole graph; the weights are outside, in the file they were streamed to.

        Raises:
            CompileError: for a node that ONNX Runtime's operators cannot express.
        """
        nodes = list(graph_module.graph.nodes)
        logits = ""
        for done, node in enumerate(nodes):
            if node.op == "call_function":
                emitter = _EMITTERS.get(node.target)
                if emitter is None:
                    raise CompileError(
                        f"{info(node).fqn}: the cpu target has no operator for "
                        f"{operator_name(node)}"
                    )
                emitter(self, node)
            elif node.op == "output":
                logits = node.args[0].name
            self._on_node(done + 1, len(nodes))
        return self._model(logits)

    def add(
        self,
        op_type: str,
        inputs: list[str],
        outputs: list[str],
        domain: str = "",
        **attributes: Any,
    ) -> None:
        """Append one ONNX node."""
        name = f"{op_type}_{len(self._nodes)}"
        self._nodes.append(
            helper.make_node(op_type, inputs, outputs, name, domain=domain, **attributes)
        )

    def constant(self, name: str, array: np.ndarray) -> str:
        """A small initializer inside the model; equal names are equal constants."""
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(array, name)
        return name

    def recipe(self, node: Node) -> WeightRecipe:
        """The recipe of a weight or constant input."""
        facts = info(node)
        assert facts.role in (WEIGHT, CONSTANT) and facts.recipe is not None
        return facts.recipe

    def rotary_tables(self, inv_freq: WeightRecipe) -> tuple[str, str]:
        """cos and sin of every position, ``[max_context + 1, R]``, computed in float64.

        The last is that of a row that is not stepped, behind a sequence that fills the context.
        """
        if inv_freq not in self._rotary:
            frequencies = self.weights.values(inv_freq).double().numpy()
            angles = np.outer(np.arange(self.max_context + 1, dtype=np.float64), frequencies)
            index = len(self._rotary)
            self._rotary[inv_freq] = (
                self.weights.table(f"rotary_cos_{index}", np.cos(angles).astype(np.float32)),
                self.weights.table(f"rotary_sin_{index}", np.sin(angles).astype(np.float32)),
            )
        return self._rotary[inv_freq]

    def _model(self, logits: str) -> onnx.ModelProto:
        inputs = [
            helper.make_tensor_value_info("tokens", TensorProto.INT64, ["B", "S"]),
            helper.make_tensor_value_info("last_positions", TensorProto.INT32, ["B"]),
            helper.make_tensor_value_info("total_length", TensorProto.INT32, []),
            helper.make_tensor_value_info("logit_rows", TensorProto.INT64, ["R"]),
        ]
        self.add("Identity", [logits], ["logits"])
        rows: list[str | int | None] = ["R", self.vocab_size]
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, rows)]
        for cache in self.caches:
            shape: list[str | int | None] = ["B", cache.num_kv_heads, "L", cache.head_dim]
            for suffix in (KEY_SUFFIX, VALUE_SUFFIX):
                name = f"{cache.name}{suffix}"
                inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, shape))
                outputs.append(
                    helper.make_tensor_value_info(f"{name}.out", TensorProto.FLOAT, shape)
                )
        initializers = [*self._constants.values(), *self.weights.initializers]
        graph = helper.make_graph(self._nodes, "tilewright", inputs, outputs, initializers)
        return helper.make_model(
            graph,
            producer_name="tilewright",
            ir_version=_IR_VERSION,
            opset_imports=[
                helper.make_opsetid("", _OPSET),
                helper.make_opsetid(CONTRIB, _CONTRIB_OPSET),
            ],
        )


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


def _emit_rms_norm(emitter: Emitter, node: Node) -> None:
    x, weight, eps = node.args
    assert isinstance(x, Node) and isinstance(weight, Node)
    scale = emitter.weights.dense(emitter.recipe(weight))
    # a contrib operator that ONNX Runtime keeps in the default domain
    emitter.add(
        "SimplifiedLayerNormalization",
        [x.name, scale],
        [node.name],
        epsilon=eps,
        axis=-1,
        stash_type=1,
    )


def _emit_add_rms_norm(emitter: Emitter, node: Node) -> None:
    x, residual, weight, eps = node.args
    assert isinstance(x, Node) and isinstance(residual, Node) and isinstance(weight, Node)
    scale = emitter.weights.dense(emitter.recipe(weight))
    emitter.add(
        "SkipSimplifiedLayerNormalization",
        [x.name, residual.name, scale],
        [f"{node.name}.0", "", "", f"{node.name}.1"],
        CONTRIB,
        epsilon=eps,
    )


def _emit_getitem(emitter: Emitter, node: Node) -> None:
    source, index = node.args
    assert isinstance(source, Node)
    emitter.add("Identity", [f"{source.name}.{index}"], [node.name])


def _emit_split(emitter: Emitter, node: Node) -> None:
    x, sizes, _ = node.args
    assert isinstance(x, Node) and isinstance(sizes, list | tuple)
    lengths = emitter.constant(
        "split_" + "_".join(map(str, sizes)), np.array(sizes, dtype=np.int64)
    )
    outputs = [f"{node.name}.{index}" for index in range(len(sizes))]
    emitter.add("Split", [x.name, lengths], outputs, axis=-1)


def _silu_product(emitter: Emitter, gate: str, up: str, result: str) -> None:
    emitter.add("QuickGelu", [gate], [f"{result}_silu"], CONTRIB, alpha=1.0)
    emitter.add("Mul", [f"{result}_silu", up], [result])


def _emit_swiglu(emitter: Emitter, node: Node) -> None:
    gate, up = node.args
    assert isinstance(gate, Node) and isinstance(up, Node)
    _silu_product(emitter, gate.name, up.name, node.name)


def _emit_swiglu_packed(emitter: Emitter, node: Node) -> None:
    (packed,) = node.args
    assert isinstance(packed, Node)
    gate, up = f"{node.name}_gate", f"{node.name}_up"
    emitter.add("Split", [packed.name], [gate, up], axis=-1, num_outputs=2)
    _silu_product(emitter, gate, up, node.name)


def _emit_attention(emitter: Emitter, node: Node) -> None:
    q, key, value, cache, _, _, _, inv_freq, num_heads, scale, window, interleaved = node.args
    assert isinstance(q, Node) and isinstance(cache, Node) and isinstance(inv_freq, Node)
    facts = info(cache)
    assert facts.role == STATE and facts.state is not None
    _, num_kv_heads, head_dim = facts.state.shape
    if head_dim % HEAD_DIM_MULTIPLE:
        raise CompileError(
            f"{facts.fqn}: the cpu target does not run head_dim {head_dim}; "
            f"allowed: multiples of {HEAD_DIM_MULTIPLE}"
        )
    emitter.caches.append(CacheSpec(facts.state.name, num_kv_heads, head_dim))
    names = [f"{facts.state.name}{suffix}" for suffix in (KEY_SUFFIX, VALUE_SUFFIX)]
    separate = [part.name if isinstance(part, Node) else "" for part in (key, value)]
    cos, sin = emitter.rotary_tables(emitter.recipe(inv_freq))
    emitter.add(
        "GroupQueryAttention",
        [q.name, *separate, *names, "last_positions", "total_length", cos, sin],
        [node.name, *[f"{name}.out" for name in names]],
        CONTRIB,
        num_heads=num_heads,
        kv_num_heads=num_kv_heads,
        scale=scale,
        do_rotary=1,
        rotary_interleaved=int(bool(interleaved)),
        local_window_size=window if window else -1,
    )


def _emit_index_select(emitter: Emitter, node: Node) -> None:
    x, axis, rows = node.args
    assert isinstance(x, Node) and isinstance(rows, Node)
    assert axis == 0 and rows.target == "logit_rows"
    width = int(x.meta["val"].shape[-1])
    shape = emitter.constant(f"flat_{width}", np.array([-1, width], dtype=np.int64))
    emitter.add("Reshape", [x.name, shape], [f"{node.name}_flat"])
    emitter.add("Gather", [f"{node.name}_flat", "logit_rows"], [node.name])


def _emit_add(emitter: Emitter, node: Node) -> None:
    left, right = node.args
    assert isinstance(left, Node) and isinstance(right, Node)
    emitter.add("Add", [left.name, right.name], [node.name])


_EMITTERS: dict[Any, Callable[[Emitter, Node], None]] = {
    ops.embedding.overload: _emit_embedding,
    ops.linear.overload: _emit_linear,
    ops.rms_norm.overload: _emit_rms_norm,
    ops.add_rms_norm.overload: _emit_add_rms_norm,
    ops.swiglu.overload: _emit_swiglu,
    ops.swiglu_packed.overload: _emit_swiglu_packed,
    ops.rope_attention_step.overload: _emit_attention,
    aten.split_with_sizes.default: _emit_split,
    aten.index_select.default: _emit_index_select,
    aten.add.Tensor: _emit_add,
    operator.getitem: _emit_getitem,
}
