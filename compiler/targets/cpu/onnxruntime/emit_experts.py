"""A block of experts as one operator: MoE on float32 weights, QMoE on blocks.

Legend: B windows of S tokens, E experts, C channels, I inner channels.
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
"""The order of gate's and up's rows that both operators take: one of each in turn."""

_UNPACKED = 0


def emit_experts(emitter: Emitter, node: Node) -> None:
    """Both choose experts themselves, of the logits. What a token gets is what it gets alone, to
    the last bits of float sums. Of equal logits they take the later ones, and a router the earlier:
    so the experts stand in reverse.

    Raises:
        CompileError: for channels that are not whole blocks, where there are blocks.
    """
    x, logits, gate, up, down, top_k, renormalise = node.args
    weights = [each for each in (gate, up, down) if isinstance(each, Node)]
    assert isinstance(x, Node) and isinstance(logits, Node) and len(weights) == 3
    assert isinstance(top_k, int)
    layout = expert_layout([info(each) for each in weights], exact=emitter.exact)
    recipes = [emitter.recipe(each) for each in weights]
    num_experts, _, num_channels = recipes[0].shape
    _check(node, num_channels, layout)
    held = emitter.weights.experts(recipes[0], recipes[1], recipes[2], layout)
    # apart from the windows' shape: in one of equal shape MoE's result may take x's own memory,
    # which it writes to before it has read all of it
    flat = f"{node.name}_x"
    emitter.add("Reshape", [x.name, emitter.integers(-1, num_channels)], [flat])
    given, rows = f"{node.name}_given", f"{node.name}_logits"
    emitter.add("Reshape", [logits.name, emitter.integers(-1, num_experts)], [given])
    order = np.arange(num_experts)[::-1].copy()
    last_first = emitter.constant(f"last_of_{num_experts}_first", order)
    emitter.add("Gather", [given, last_first], [rows], axis=1)
    result = f"{node.name}_flat"
    _add_block(emitter, (flat, rows, result), held, layout, k=top_k, share=bool(renormalise))
    emitter.add("Shape", [x.name], [f"{node.name}_shape"])
    emitter.add("Reshape", [result, f"{node.name}_shape"], [node.name])


def _add_block(
    emitter: Emitter,
    names: tuple[str, str, str],
    held: ExpertWeights,
    layout: ExpertLayout | None,
    *,
    k: int,
    share: bool,
) -> None:
    """The operator; ``names``: of its input, its logits and its result, all with a row a token."""
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
            "MoE", [x, logits, held.into, "", held.out, ""], [result], CONTRIB, **attributes
        )
        return
    # without them QMoE takes probabilities over the chosen experts alone
    shares = f"{result}_shares"
    emitter.add("Softmax", [logits], [shares], axis=-1)
    parts = [held.into, held.into_scales, "", held.out, held.out_scales]
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
