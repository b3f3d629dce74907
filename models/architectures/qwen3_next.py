"""Qwen3-Next (Qwen Team, 2025): Qwen3.5's mixtures of experts with different tensor storage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.models.architectures.moe import sources_by_expert
from tilewright.models.architectures.qwen3_5_moe import ARCHITECTURE as QWEN35_MOE
from tilewright.models.architectures.qwen3_5_moe import (
    DEFAULTS_MOE,
    Qwen35MoeForCausalLM,
    read_gguf_sparse,
    read_hf_sparse,
)
from tilewright.models.checkpoints.base import check_shape
from tilewright.models.checkpoints.pieces import TensorSlice, View
from tilewright.models.config import DeltaShape, HybridConfig
from tilewright.models.sources import Sources, cut_rows


class Qwen3NextForCausalLM(Qwen35MoeForCausalLM):
    """Qwen3-Next with its head.

    Checkpoints have a tensor per matmul and expert. Shared Gated DeltaNet tensors are ordered by
    key head.
    """

    def sources(self) -> Sources:
        found: dict[str, Any] = {**super().sources(), **sources_by_expert(self.config)}
        for layer, is_linear in enumerate(self.config.linear_layers):
            if is_linear:
                found |= _by_key_head(f"model.layers.{layer}.linear_attn", self.config)
        return found


def _by_key_head(path: str, config: HybridConfig) -> dict[str, Any]:
    """Return the sources in tensors ordered by key head: q, k, v and z rows, or b and a rows."""
    delta, hidden = config.delta, config.hidden_size
    ratio = delta.num_value_heads // delta.num_key_heads
    wide = ratio * delta.value_dim
    qkvz = _parts(delta, (delta.key_dim, delta.key_dim, wide, wide))
    gates = _parts(delta, (ratio, ratio))
    shapes = {
        "qkvz": (delta.qkv_width + delta.value_width, hidden),
        "ba": (2 * delta.num_value_heads, hidden),
    }
    found = {}
    for part, name, rows in (
        ("qkv", "qkvz", [*qkvz[0], *qkvz[1], *qkvz[2]]),
        ("z", "qkvz", qkvz[3]),
        ("b", "ba", gates[0]),
        ("a", "ba", gates[1]),
    ):
        tensor = f"{path}.in_proj_{name}.weight"
        found[f"{path}.in_proj_{part}.weight"] = cut_rows(tensor, rows, shapes[name])
    return found


def gguf_views(
    config: HybridConfig, stored: Mapping[str, tuple[int, ...]], path: Path
) -> dict[str, View]:
    """Build tensors ordered by key head from a file with separate q, k, v and z.

    Raises:
        CheckpointError: A tensor is missing. The message has ``path``.
    """
    delta, hidden = config.delta, config.hidden_size
    found = {}
    for layer, is_linear in enumerate(config.linear_layers):
        block = f"model.layers.{layer}.linear_attn"
        qkv, z, whole = (f"{block}.in_proj_{name}.weight" for name in ("qkv", "z", "qkvz"))
        if not is_linear or whole in stored:
            continue
        check_shape(path, qkv, stored.get(qkv), (delta.qkv_width, hidden))
        check_shape(path, z, stored.get(z), (delta.value_width, hidden))
        wide = delta.value_width // delta.num_key_heads
        pieces = []
        for head in range(delta.num_key_heads):
            for tensor, start, size in (
                (qkv, 0, delta.key_dim),
                (qkv, delta.key_width, delta.key_dim),
                (qkv, 2 * delta.key_width, wide),
                (z, 0, wide),
            ):
                first = start + head * size
                pieces.append(TensorSlice(tensor, first, first + size))
        found[whole] = View((delta.qkv_width + delta.value_width, hidden), tuple(pieces))
    return found


def _parts(delta: DeltaShape, sizes: tuple[int, ...]) -> list[list[tuple[int, int]]]:
    """Return each component's rows, over all key heads."""
    total = sum(sizes)
    firsts = [sum(sizes[:index]) for index in range(len(sizes))]
    return [
        [(head * total + first, head * total + first + size) for head in range(delta.num_key_heads)]
        for first, size in zip(firsts, sizes, strict=True)
    ]


ARCHITECTURE = dataclasses.replace(
    QWEN35_MOE,
    model=Qwen3NextForCausalLM,
    hf_defaults={**DEFAULTS_MOE, "num_experts_per_tok": 10, "num_experts": 512},
    read_hf=read_hf_sparse,
    read_gguf=read_gguf_sparse,
    has_mrope=False,
    text_config=False,
    intermediate_key="intermediate_size",
    experts="apart",
    gguf_intermediate_key="feed_forward_length",
    gguf_names={
        **QWEN35_MOE.gguf_names,
        "ssm_in": "linear_attn.in_proj_qkvz",
        "ssm_ba": "linear_attn.in_proj_ba",
    },
    gguf_views=gguf_views,
    gguf_tiled_heads=False,
)
