"""An expert block's emission as a single operator: MoE for float32 weights, QMoE for blocks.

Legend: B windows with S tokens, E experts, C channels, I inner channels.
"""

from __future__ import annotations

import numpy as np
from torch.fx import Node

from tilewright.compiler.ir.info import info
from tilewright.compiler.targets.cpu.onnxruntime.emitter import CONTRIB, Emitter
from tilewright.compiler.targets.cpu.onnxruntime.numerics import (
    INT8_LEVEL,
    ExpertLayout,
    expert_layout,
)
from tilewright.compiler.targets.cpu.onnxruntime.weights import ExpertWeights
from tilewright.errors import CompileError

_INTERLEAVED = 1
"""Row order of gate and up in both operators: alternating."""

_UNPACKED = 0


def emit_experts(emitter: Emitter, node: Node) -> None:
    """Emit an expert block. Both operators select experts from the logits themselves.

    A token's result is independent of the batch, up to the last bits of float sums. For equal
    logits the operators select later experts, but a router selects earlier experts. Therefore
    experts are stored in reverse order.

    Raises:
        CompileError: Channels are not whole blocks in a block format.
    """
    x, logits, gate, up, down, top_k, renormalise = node.args
    weights = [each for each in (gate, up, down) if isinstance(each, Node)]
    assert isinstance(x, Node) and isinstance(logits, Node) and len(weights) == 3
    assert isinstance(top_k, int)
    layout = expert_layout([info(each) for each in weights], exact=emitter.exact)
    recipes = [emitter.recipe(each) for each in weights]
    num_experts, _, num_channels = recipes[0].shape
    _check(node, num_channels, layout)
    stored = emitter.weights.experts(recipes[0], recipes[1], recipes[2], layout)
    # Separate from the windows' shape. With equal shapes, MoE's result may share x's memory, and
    # MoE writes before it has read all of x.
    flat = f"{node.name}_x"
    emitter.add("Reshape", [x.name, emitter.integers(-1, num_channels)], [flat])
    given, rows = f"{node.name}_given", f"{node.name}_logits"
    emitter.add("Reshape", [logits.name, emitter.integers(-1, num_experts)], [given])
    order = np.arange(num_experts)[::-1].copy()
    last_first = emitter.constant(f"last_of_{num_experts}_first", order)
    emitter.add("Gather", [given, last_first], [rows], axis=1)
    result = f"{node.name}_flat"
    _add_block(emitter, (flat, rows, result), stored, layout, k=top_k, share=bool(renormalise))
    emitter.add("Shape", [x.name], [f"{node.name}_shape"])
    emitter.add("Reshape", [result, f"{node.name}_shape"], [node.name])


def refuse_router(emitter: Emitter, node: Node) -> None:
    """Refuse a router outside of an expert block.

    Raises:
        CompileError: Always.
    """
    what = "a sigmoid router" if len(node.args) > 3 else "a router without plain experts"
    raise CompileError(f"{info(node).fqn}: {what}; allowed: --backend native")


def _add_block(
    emitter: Emitter,
    names: tuple[str, str, str],
    stored: ExpertWeights,
    layout: ExpertLayout | None,
    *,
    k: int,
    share: bool,
) -> None:
    """Emit the operator. ``names`` are its input, logits and result, with tokens on the first
    axis.
    """
    x, logits, result = names
    attributes = {
        "k": k,
        "normalize_routing_weights": int(share),
        "activation_type": "swiglu",
        "activation_alpha": 1.0,
        "activation_beta": 0.0,
        "swiglu_fusion": _INTERLEAVED,
    }
    if layout is None:
        emitter.add(
            "MoE", [x, logits, stored.into, "", stored.out, ""], [result], CONTRIB, **attributes
        )
        return
    # Without them QMoE computes probabilities over the selected experts only.
    shares = f"{result}_shares"
    emitter.add("Softmax", [logits], [shares], axis=-1)
    parts = [stored.into, stored.into_scales, "", stored.out, stored.out_scales]
    emitter.add(
        "QMoE",
        [x, logits, *parts, *[""] * 7, shares],
        [result],
        CONTRIB,
        **attributes,
        expert_weight_bits=layout.bits,
        block_size=layout.block,
        accuracy_level=INT8_LEVEL,
        weights_prepacked=_UNPACKED,
    )


def _check(node: Node, num_channels: int, layout: ExpertLayout | None) -> None:
    if layout is not None and num_channels % layout.block:
        raise CompileError(
            f"{info(node).fqn}: the cpu target does not run experts of {num_channels} channels in "
            f"blocks; allowed: multiples of {layout.block}, or float arithmetic (hifi3, hifi4)"
        )
