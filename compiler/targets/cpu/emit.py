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

from tilewright.compiler import ops
from tilewright.compiler.errors import CompileError
from tilewright.compiler.ir.info import CONSTANT, STATE, WEIGHT, info
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.text import operator_name
from tilewright.compiler.targets.cpu.emit_delta_rule import DELTA_EMITTERS
from tilewright.compiler.targets.cpu.emit_elementwise import CONTRIB, ELEMENTWISE_EMITTERS, add_norm
from tilewright.compiler.targets.cpu.emit_experts import emit_experts
from tilewright.compiler.targets.cpu.numerics import INT8_LEVEL, is_bfloat16_table, is_native
from tilewright.compiler.targets.cpu.weights import WeightFile

KEY_SUFFIX, VALUE_SUFFIX, STATE_SUFFIX = ".key", ".value", ".state"
HEAD_DIM_MULTIPLE = 16
"""What GroupQueryAttention asks of head sizes when it rotates inside."""

PAIRS_MULTIPLE = 8
"""And of the pairs that turn."""

_OPSET, _CONTRIB_OPSET, _IR_VERSION = 21, 1, 10

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """One layer's cache as the session sees it: ``[B, G, L, D]`` twice, bound by pointer."""

    name: str
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class SequenceState:
    """One piece of state that does not grow, as the session sees it: ``[B, *shape]``, bound by
    pointer; what comes out takes the place of what went in.
    """

    name: str
    shape: tuple[int, ...]


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
        self.states: list[SequenceState] = []
        self._on_node = on_node
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._emitted: set[str] = set()
        self._rotary: dict[tuple[WeightRecipe, float], tuple[str, str]] = {}

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

    def integers(self, *values: int) -> str:
        """Such a constant: axes, sizes or a shape."""
        name = "integers_" + "_".join(map(str, values))
        return self.constant(name, np.array(values, dtype=np.int64))

    def reshape(self, x: str, sizes: list[int], result: str) -> None:
        """Another shape for what each token of ``[B, S, ...]`` has."""
        self.add("Reshape", [x, self.integers(0, 0, *sizes)], [result])

    def state(self, node: Node, shape: tuple[int, ...]) -> str:
        """The input that holds a sequence's state, in this shape; ``.out`` is added to its name
        where it comes out.
        """
        facts = info(node)
        assert facts.role == STATE and facts.state is not None
        self.states.append(SequenceState(facts.state.name, shape))
        return f"{facts.state.name}{STATE_SUFFIX}"

    def once(self, name: str, emit: Callable[[Emitter, str], None]) -> str:
        """A value that several nodes read: emitted where it is asked for first."""
        if name not in self._emitted:
            self._emitted.add(name)
            emit(self, name)
        return name

    def recipe(self, node: Node) -> WeightRecipe:
        """The recipe of a weight or constant input."""
        facts = info(node)
        assert facts.role in (WEIGHT, CONSTANT) and facts.recipe is not None
        return facts.recipe

    def rotary_tables(self, inv_freq: WeightRecipe, factor: float) -> tuple[str, str]:
        """cos and sin of every position times ``factor``, ``[max_context + 1, R]``, from float64.

        The last is that of a row that is not stepped, behind a sequence that fills the context.
        """
        key = inv_freq, factor
        if key not in self._rotary:
            frequencies = self.weights.values(inv_freq).double().numpy()
            angles = np.outer(np.arange(self.max_context + 1, dtype=np.float64), frequencies)
            index = len(self._rotary)
            cos, sin = factor * np.cos(angles), factor * np.sin(angles)
            self._rotary[key] = (
                self.weights.table(f"rotary_cos_{index}", cos.astype(np.float32)),
                self.weights.table(f"rotary_sin_{index}", sin.astype(np.float32)),
            )
        return self._rotary[key]

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
        for state in self.states:
            name = f"{state.name}{STATE_SUFFIX}"
            sizes: list[str | int | None] = ["B", *state.shape]
            inputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, sizes))
            outputs.append(helper.make_tensor_value_info(f"{name}.out", TensorProto.FLOAT, sizes))
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


def _emit_getitem(emitter: Emitter, node: Node) -> None:
    source, index = node.args
    assert isinstance(source, Node)
    emitter.add("Identity", [f"{source.name}.{index}"], [node.name])


def _emit_split(emitter: Emitter, node: Node) -> None:
    x, sizes, _ = node.args
    assert isinstance(x, Node) and isinstance(sizes, list | tuple)
    _split(emitter, x.name, list(sizes), node.name)


def _split(emitter: Emitter, x: str, sizes: list[Any], result: str) -> list[str]:
    """Columns of ``x``, as ``result.0`` and so on."""
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
    """q, k and v apart, with every head of q and k normed: the operator does not do it itself."""
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
    emitter.add("Reshape", [x.name, shape], [f"{node.name}_flat"])
    emitter.add("Gather", [f"{node.name}_flat", "logit_rows"], [node.name])


_EMITTERS: dict[Any, Callable[[Emitter, Node], None]] = {
    ops.embedding.overload: _emit_embedding,
    ops.linear.overload: _emit_linear,
    ops.rope_attention_step.overload: _emit_attention,
    aten.split_with_sizes.default: _emit_split,
    ops.experts.overload: emit_experts,
    aten.index_select.default: _emit_index_select,
    operator.getitem: _emit_getitem,
    **ELEMENTWISE_EMITTERS,
    **DELTA_EMITTERS,
}
