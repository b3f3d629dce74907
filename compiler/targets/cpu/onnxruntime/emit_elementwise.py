"""Norms, activations, gates, arithmetic and changes of shape as operators of ONNX Runtime.

Excludes weight formats, attention and caches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.fx import Node

from tilewright.compiler import ops
from tilewright.compiler.targets.cpu.onnxruntime.emitter import CONTRIB, Emitter

aten = torch.ops.aten


def _emit_rms_norm(emitter: Emitter, node: Node) -> None:
    x, weight, eps = node.args
    assert isinstance(x, Node) and isinstance(weight, Node) and isinstance(eps, float)
    add_norm(emitter, x.name, weight, eps, node.name)


def add_norm(emitter: Emitter, x: str, weight: Node, eps: float, result: str) -> None:
    """Emit the norm of value ``x`` over its last dimension as value ``result``."""
    scale = emitter.weights.dense(emitter.recipe(weight))
    # a contributed operator, in ONNX Runtime's default domain
    emitter.add(
        "SimplifiedLayerNormalization",
        [x, scale],
        [result],
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


def _emit_gelu(emitter: Emitter, node: Node) -> None:
    x, approximate = node.args
    assert isinstance(x, Node)
    emitter.add("Gelu", [x.name], [node.name], approximate=approximate)


def _emit_sigmoid_gate(emitter: Emitter, node: Node) -> None:
    x, gate = node.args
    assert isinstance(x, Node) and isinstance(gate, Node)
    emitter.add("Sigmoid", [gate.name], [f"{node.name}_share"])
    emitter.add("Mul", [x.name, f"{node.name}_share"], [node.name])


def _emit_reshape(emitter: Emitter, node: Node) -> None:
    """Emit a reshape per token. The axes for windows and tokens are unchanged."""
    x = node.args[0]
    assert isinstance(x, Node)
    emitter.reshape(x.name, [int(size) for size in node.meta["val"].shape[1:]], node.name)


def _emit_tanh(emitter: Emitter, node: Node) -> None:
    (x,) = node.args
    assert isinstance(x, Node)
    emitter.add("Tanh", [x.name], [node.name])


def _arithmetic(op_type: str) -> Callable[[Emitter, Node], None]:
    """Return the emitter of an operator for two values, or for a value and a number."""

    def emit(emitter: Emitter, node: Node) -> None:
        names = []
        for argument in node.args:
            if isinstance(argument, Node):
                names.append(argument.name)
            else:
                assert isinstance(argument, int | float)
                number = np.array(argument, dtype=np.float32)
                names.append(emitter.constant(f"number_{float(argument)!r}", number))
        emitter.add(op_type, names, [node.name])

    return emit


ELEMENTWISE_EMITTERS: dict[Any, Callable[[Emitter, Node], None]] = {
    ops.rms_norm.overload: _emit_rms_norm,
    ops.add_rms_norm.overload: _emit_add_rms_norm,
    ops.swiglu.overload: _emit_swiglu,
    ops.swiglu_packed.overload: _emit_swiglu_packed,
    ops.gelu.overload: _emit_gelu,
    ops.sigmoid_gate.overload: _emit_sigmoid_gate,
    aten.unflatten.int: _emit_reshape,
    aten.flatten.using_ints: _emit_reshape,
    aten.tanh.default: _emit_tanh,
    aten.add.Tensor: _arithmetic("Add"),
    aten.mul.Tensor: _arithmetic("Mul"),
    aten.div.Tensor: _arithmetic("Div"),
}
"""Emitter by operator."""
