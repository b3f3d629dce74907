"""Tiny mixtures and hybrids in the form of llama.cpp's converter, independent of the reader.

Converts whole tensors, like the converter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

ARCHITECTURES = {
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "qwen3_5": gguf.MODEL_ARCH.QWEN35,
    "qwen3_5_moe": gguf.MODEL_ARCH.QWEN35MOE,
    "qwen3_next": gguf.MODEL_ARCH.QWEN3NEXT,
}


def write(
    model: SimpleNamespace,
    path: Path,
    *,
    kind: str = "F32",
    fused: bool = False,
    extra: Callable[[gguf.GGUFWriter], None] = lambda _: None,
    changed: Mapping[str, np.ndarray | None] | None = None,
) -> Path:
    """``kind``: the type for matrices with whole blocks.

    ``fused``: experts have gate and up in a single tensor. ``changed``: tensors by GGUF name, None
    to omit them.
    """
    config = model.config
    arch = ARCHITECTURES[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    _write_keys(writer, config)
    extra(writer)
    names = gguf.get_tensor_name_map(arch, config.num_layers)
    tensors: dict[str, np.ndarray] = {}
    for name, tensor in converted(model, fused=fused).items():
        theirs = names.get_name(name, (".weight", ".bias"))
        assert theirs is not None, name
        tensors[theirs] = np.ascontiguousarray(tensor.numpy())
    for name, values in (changed or {}).items():
        assert name in tensors or values is not None, name
        tensors.pop(name, None)
        if values is not None:
            tensors[name] = values
    for name, array in tensors.items():
        block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0]
        is_matrix = array.ndim > 1 and array.shape[-1] % block == 0 and "ffn_gate_inp" not in name
        own = gguf.GGMLQuantizationType[kind if is_matrix else "F32"]
        writer.add_tensor(name, gguf.quants.quantize(array, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_keys(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_vocab_size(config.vocab_size)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_positions)
    writer.add_embedding_length(config.hidden_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.norm_eps)
    writer.add_rope_freq_base(config.rope.theta)
    if config.model_type != "qwen3_5_moe":
        writer.add_feed_forward_length(config.intermediate_size)
    if config.model_type != "qwen3_5":
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.experts_per_token)
        writer.add_expert_feed_forward_length(config.expert_size)
    if config.model_type == "qwen3_moe":
        return
    if config.model_type != "qwen3_5":
        writer.add_expert_shared_feed_forward_length(config.shared_size)
    delta = config.delta
    writer.add_rope_dimension_count(config.rope.num_rotated)
    if config.model_type != "qwen3_next":
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    writer.add_ssm_conv_kernel(delta.conv_width)
    writer.add_ssm_state_size(delta.key_dim)
    writer.add_ssm_group_count(delta.num_key_heads)
    writer.add_ssm_time_step_rank(delta.num_value_heads)
    writer.add_ssm_inner_size(delta.num_value_heads * delta.value_dim)
    if list(config.linear_layers) == [(i + 1) % 4 != 0 for i in range(config.num_layers)]:
        writer.add_full_attention_interval(4)
    else:
        arch = gguf.MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]]
        writer.add_array(f"{arch}.attention.recurrent_layers", list(config.linear_layers))


def converted(model: SimpleNamespace, *, fused: bool = False) -> dict[str, Tensor]:
    """Return the converter's tensors with names from llama.cpp's map."""
    config, tensors = model.config, dict(model.checkpoint.tensors)
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if ".experts." not in name:
            found |= _changed(name, tensor, config)
    for layer in range(config.num_layers):
        block = f"model.layers.{layer}.mlp.experts"
        if any(name.startswith(block) for name in tensors):
            found |= _stacked(block, tensors, config, fused=fused)
    return found


def _stacked(
    block: str, tensors: Mapping[str, Tensor], config: Any, *, fused: bool
) -> dict[str, Tensor]:
    if f"{block}.gate_up_proj" in tensors:
        both, down = tensors[f"{block}.gate_up_proj"], tensors[f"{block}.down_proj"]
    else:
        gate, up, down = (
            torch.stack(
                [tensors[f"{block}.{e}.{part}_proj.weight"] for e in range(config.num_experts)]
            )
            for part in ("gate", "up", "down")
        )
        both = torch.cat((gate, up), dim=1)
    if fused:
        return {f"{block}.gate_up_proj.weight": both, f"{block}.down_proj.weight": down}
    gate, up = both.chunk(2, dim=1)
    return {
        f"{block}.gate_proj.weight": gate,
        f"{block}.up_proj.weight": up,
        f"{block}.down_proj.weight": down,
    }


def _changed(name: str, tensor: Tensor, config: Any) -> dict[str, Tensor]:
    is_own = name.endswith("linear_attn.norm.weight") or config.model_type == "qwen3_moe"
    if name.endswith("norm.weight") and not is_own:
        return {name: tensor + 1}
    if ".linear_attn." not in name:
        return {name: tensor}
    if name.endswith("in_proj_qkvz.weight"):
        return _split(name, tensor, config.delta)
    if config.model_type != "qwen3_next":
        tensor = _tiled(name, tensor, config.delta)
    if name.endswith("A_log"):
        return {name: -torch.exp(tensor)}
    if name.endswith("dt_bias"):
        return {name.replace("dt_bias", "dt_proj.bias"): tensor}
    return {name: tensor.squeeze(1) if "conv1d" in name else tensor}


def _split(name: str, tensor: Tensor, delta: Any) -> dict[str, Tensor]:
    """Split rows in key head order into q, k, v and z."""
    wide = delta.num_value_heads // delta.num_key_heads * delta.value_dim
    sizes = [delta.key_dim, delta.key_dim, wide, wide]
    by_head = tensor.view(delta.num_key_heads, sum(sizes), -1)
    q, k, v, z = (part.flatten(0, 1) for part in by_head.split(sizes, dim=1))
    return {
        name.replace("qkvz", "qkv"): torch.cat((q, k, v)),
        name.replace("qkvz", "z"): z,
    }


def _tiled(name: str, tensor: Tensor, delta: Any) -> Tensor:
    """Order value heads by their index within the key head."""

    def tile(rows: Tensor, width: int) -> Tensor:
        grouped = rows.reshape(delta.num_key_heads, -1, width, *rows.shape[1:])
        return grouped.transpose(0, 1).reshape(rows.shape)

    part = name.rpartition("linear_attn.")[2]
    if part in ("in_proj_qkv.weight", "conv1d.weight"):
        count = 2 * delta.num_key_heads * delta.key_dim
        return torch.cat((tensor[:count], tile(tensor[count:], delta.value_dim)))
    if part == "in_proj_z.weight":
        return tile(tensor, delta.value_dim)
    if part in ("in_proj_a.weight", "in_proj_b.weight", "A_log", "dt_bias"):
        return tile(tensor, 1)
    if part == "out_proj.weight":
        return tile(tensor.T, delta.value_dim).T
    return tensor
