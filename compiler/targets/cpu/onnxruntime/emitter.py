"""The target of all emitters: an ONNX model's nodes, constants, caches and states.

It is independent of the graph's ops. The graph's tokens ``[T]`` are ``[B, S]`` here: B windows with
S tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch.fx import Node

from tilewright.compiler.ir.info import CONSTANT, STATE, WEIGHT, info
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.targets.cpu.onnxruntime.weights import WeightFile

CONTRIB = "com.microsoft"
"""Domain of ONNX Runtime's own operators."""

HIDDEN = "hidden"
"""Output with final hidden states of all tokens. A call may omit it."""
KEY_SUFFIX, VALUE_SUFFIX, STATE_SUFFIX = ".key", ".value", ".state"
_OPSET, _CONTRIB_OPSET, _IR_VERSION = 21, 1, 10


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """A layer's cache in the session: ``[B, G, L, D]`` twice, bound by pointer."""

    name: str
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class SequenceState:
    """A constant-size state in the session: ``[B, *shape]``, bound by pointer. Outputs replace
    inputs.
    """

    name: str
    shape: tuple[int, ...]


class Emitter:
    """Collects ONNX nodes. Values have the names of the graph's nodes."""

    def __init__(
        self,
        weights: WeightFile,
        *,
        exact: bool,
        max_context: int,
        vocab_size: int,
    ) -> None:
        self.weights = weights
        self.exact = exact
        self.max_context = max_context
        self.vocab_size = vocab_size
        self.hidden_size = 0
        self.caches: list[CacheSpec] = []
        self.states: list[SequenceState] = []
        self._nodes: list[onnx.NodeProto] = []
        self._constants: dict[str, onnx.TensorProto] = {}
        self._emitted: set[str] = set()
        self._rotary: dict[tuple[WeightRecipe, float], tuple[str, str]] = {}

    def add(
        self,
        op_type: str,
        inputs: list[str],
        outputs: list[str],
        domain: str = "",
        **attributes: Any,
    ) -> None:
        """Append an ONNX node."""
        name = f"{op_type}_{len(self._nodes)}"
        self._nodes.append(
            helper.make_node(op_type, inputs, outputs, name, domain=domain, **attributes)
        )

    def constant(self, name: str, array: np.ndarray) -> str:
        """Return a small initializer inside the model. Equal names are equal constants."""
        if name not in self._constants:
            self._constants[name] = numpy_helper.from_array(array, name)
        return name

    def integers(self, *values: int) -> str:
        """Return a small integer initializer: axes, sizes or a shape."""
        name = "integers_" + "_".join(map(str, values))
        return self.constant(name, np.array(values, dtype=np.int64))

    def reshape(self, x: str, sizes: list[int], result: str) -> None:
        """Reshape each token's data in ``[B, S, ...]``."""
        self.add("Reshape", [x, self.integers(0, 0, *sizes)], [result])

    def state(self, node: Node, shape: tuple[int, ...]) -> str:
        """Return the input for a sequence's state with this shape. The output's name has the suffix
        ``.out``.
        """
        facts = info(node)
        assert facts.role == STATE and facts.state is not None
        self.states.append(SequenceState(facts.state.name, shape))
        return f"{facts.state.name}{STATE_SUFFIX}"

    def once(self, name: str, emit: Callable[[Emitter, str], None]) -> str:
        """Emit a shared value on first use. Return its name."""
        if name not in self._emitted:
            self._emitted.add(name)
            emit(self, name)
        return name

    def recipe(self, node: Node) -> WeightRecipe:
        """Return the recipe of a weight or constant input."""
        facts = info(node)
        assert facts.role in (WEIGHT, CONSTANT) and facts.recipe is not None
        return facts.recipe

    def rotary_tables(self, inv_freq: WeightRecipe, factor: float) -> tuple[str, str]:
        """Return cos and sin times ``factor`` for every position, ``[max_context + 1, R]``, from
        float64.

        The last row is for idle rows after a full context.
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

    def model(self, logits: str) -> onnx.ModelProto:
        """Return all nodes as a model with the result ``logits``. Weights are in their own file."""
        inputs = [
            helper.make_tensor_value_info("tokens", TensorProto.INT64, ["B", "S"]),
            helper.make_tensor_value_info("last_positions", TensorProto.INT32, ["B"]),
            helper.make_tensor_value_info("total_length", TensorProto.INT32, []),
            helper.make_tensor_value_info("logit_rows", TensorProto.INT64, ["R"]),
        ]
        self.add("Identity", [logits], ["logits"])
        rows: list[str | int | None] = ["R", self.vocab_size]
        outputs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, rows)]
        if self.hidden_size:
            states: list[str | int | None] = ["T", self.hidden_size]
            outputs.append(helper.make_tensor_value_info(HIDDEN, TensorProto.FLOAT, states))
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
