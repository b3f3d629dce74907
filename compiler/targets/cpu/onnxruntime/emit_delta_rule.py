"""Emitters for Gated DeltaNet's two stateful ops, with ONNX Runtime's own operators.

Legend: B windows with S tokens, C channels, W convolution width, H value heads, G key heads, K key
size, V value size. If a window starts at position 0, the previous state is ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import TensorProto
from torch.fx import Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.targets.cpu.onnxruntime.emitter import CONTRIB, Emitter

_UNIT_EPS = 1e-6
"""Epsilon for the sum of squares of queries and keys, as in the op's reference."""


def _emit_first_positions(emitter: Emitter, result: str) -> None:
    """Emit the position of each window's first token: ``[B]`` int64."""
    one = emitter.integers(1)
    emitter.add("Cast", ["last_positions"], [f"{result}_last"], to=TensorProto.INT64)
    emitter.add("Shape", ["tokens"], [f"{result}_length"], start=1, end=2)
    emitter.add("Sub", [f"{result}_last", f"{result}_length"], [f"{result}_before"])
    emitter.add("Add", [f"{result}_before", one], [result])


def _emit_is_fresh(emitter: Emitter, result: str) -> None:
    """Emit whether each window begins its sequence: ``[B, 1, 1]`` bool."""
    first = emitter.once("first_positions", _emit_first_positions)
    emitter.add("Equal", [first, emitter.integers(0)], [f"{result}_flat"])
    emitter.add("Unsqueeze", [f"{result}_flat", emitter.integers(1, 2)], [result])


def _emit_forgetting(emitter: Emitter, result: str) -> None:
    """Emit an addend ``[B, S, 1]`` for the log decay: minus infinity at position 0, else 0.

    This clears a state without a copy.
    """
    first = emitter.once("first_positions", _emit_first_positions)
    zero = emitter.constant("index_0", np.array(0, dtype=np.int64))
    one = emitter.constant("index_1", np.array(1, dtype=np.int64))
    emitter.add("Squeeze", [f"{first}_length"], [f"{result}_length"])
    emitter.add("Range", [zero, f"{result}_length", one], [f"{result}_at"])
    emitter.add("Unsqueeze", [first, emitter.integers(1)], [f"{result}_first"])
    emitter.add("Add", [f"{result}_first", f"{result}_at"], [f"{result}_positions"])
    emitter.add("Equal", [f"{result}_positions", emitter.integers(0)], [f"{result}_flat"])
    emitter.add("Unsqueeze", [f"{result}_flat", emitter.integers(2)], [f"{result}_is_start"])
    nothing, all_of_it = (
        emitter.constant(f"number_{value!r}", np.array(value, dtype=np.float32))
        for value in (0.0, -np.inf)
    )
    emitter.add("Where", [f"{result}_is_start", all_of_it, nothing], [result])


def _emit_convolution(emitter: Emitter, node: Node) -> None:
    x, weight, window = node.args[:3]
    assert isinstance(x, Node) and isinstance(weight, Node) and isinstance(window, Node)
    recipe = emitter.recipe(weight)
    num_channels, _, width = recipe.shape
    state_name = emitter.state(window, (width - 1, num_channels))
    fresh = emitter.once("is_fresh", _emit_is_fresh)
    zero = emitter.constant("number_0.0", np.array(0.0, dtype=np.float32))
    emitter.add("Where", [fresh, zero, state_name], [f"{node.name}_before"])
    emitter.add(
        "CausalConvWithState",
        [x.name, emitter.weights.dense(recipe), "", f"{node.name}_before"],
        [node.name, f"{state_name}.out"],
        CONTRIB,
        activation="silu" if (*node.args, True)[6] else "none",
        ndim=1,
        channels_last=1,
    )


def _emit_delta_rule(emitter: Emitter, node: Node) -> None:
    b, num_key_heads, key_dim, memory = node.args[2], *node.args[5:8]
    assert isinstance(memory, Node) and isinstance(b, Node)
    state = info(memory).state
    assert state is not None and isinstance(num_key_heads, int) and isinstance(key_dim, int)
    num_heads, _, value_dim = state.shape
    state_name = emitter.state(memory, state.shape)
    q, k, v = _heads(emitter, node, num_key_heads, key_dim, num_heads * value_dim)
    decay, beta = _decay(emitter, node), f"{node.name}_beta"
    emitter.add("Sigmoid", [b.name], [beta])
    # The kernel copies the state to its output and updates it there. Both may share memory.
    emitter.add(
        "LinearAttention",
        [q, k, v, state_name, decay, beta],
        [f"{node.name}_flat", f"{state_name}.out"],
        CONTRIB,
        update_rule="gated_delta",
        q_num_heads=num_key_heads,
        kv_num_heads=num_heads,
        scale=key_dim**-0.5,
    )
    emitter.reshape(f"{node.name}_flat", [num_heads, value_dim], node.name)


def _heads(
    emitter: Emitter, node: Node, num_key_heads: int, key_dim: int, value_width: int
) -> list[str]:
    """Emit queries and keys ``[B, S, G K]`` with normalized heads, and values ``[B, S, H V]``."""
    qkv = node.args[0]
    assert isinstance(qkv, Node)
    width, name = num_key_heads * key_dim, node.name
    parts, both, values = f"{name}_parts", f"{name}_qk", f"{name}_v"
    emitter.add(
        "Split", [qkv.name, emitter.integers(2 * width, value_width)], [parts, values], axis=-1
    )
    emitter.reshape(parts, [2 * num_key_heads, key_dim], f"{both}_heads")
    # Converts a norm by the mean of squares to a norm by their sum.
    scale = emitter.constant(f"unit_{key_dim}", np.full(key_dim, key_dim**-0.5, dtype=np.float32))
    emitter.add(
        "SimplifiedLayerNormalization",
        [f"{both}_heads", scale],
        [f"{both}_unit"],
        epsilon=_UNIT_EPS / key_dim,
        axis=-1,
        stash_type=1,
    )
    emitter.reshape(f"{both}_unit", [2 * width], both)
    emitter.add(
        "Split", [both, emitter.integers(width, width)], [f"{name}_q", f"{name}_k"], axis=-1
    )
    return [f"{name}_q", f"{name}_k", values]


def _decay(emitter: Emitter, node: Node) -> str:
    """Emit the log decay per token, ``[B, S, H]``."""
    a, a_log, dt_bias = node.args[1], node.args[3], node.args[4]
    assert isinstance(a, Node) and isinstance(a_log, Node) and isinstance(dt_bias, Node)
    name = f"{node.name}_decay"
    bias, rate = (emitter.weights.dense(emitter.recipe(each)) for each in (dt_bias, a_log))
    emitter.add("Exp", [rate], [f"{name}_rate"])
    emitter.add("Neg", [f"{name}_rate"], [f"{name}_negative"])
    emitter.add("Add", [a.name, bias], [f"{name}_biased"])
    emitter.add("Softplus", [f"{name}_biased"], [f"{name}_soft"])
    emitter.add("Mul", [f"{name}_soft", f"{name}_negative"], [f"{name}_own"])
    emitter.add("Add", [f"{name}_own", emitter.once("forgetting", _emit_forgetting)], [name])
    return name


DELTA_EMITTERS: dict[Any, Callable[[Emitter, Node], None]] = {
    ops.causal_conv1d_step.overload: _emit_convolution,
    ops.gated_delta_rule_step.overload: _emit_delta_rule,
}
"""Emitter by operator."""
