"""Qwen3.5's text model and draft layer (Qwen Team, 2026): three Gated DeltaNet layers, then a gated
attention layer. Files store norm weights minus one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.gated_delta_net import TENSOR_GROUPS as DELTA_GROUPS
from tilewright.models.architectures.gated_delta_net import GatedDeltaNet
from tilewright.models.architectures.layers import MLP, Attention, Linear, RMSNorm
from tilewright.models.architectures.llama import LlamaForCausalLM, LlamaModel
from tilewright.models.architectures.rope import inverse_frequencies
from tilewright.models.checkpoints.spelling.delta import gguf_delta, hf_delta
from tilewright.models.config import HybridConfig
from tilewright.models.sources import Sources, TensorSource, cut_rows


class GatedAttention(Attention):
    """Attention whose result is weighed, channel by channel, by a further product of its input."""

    def __init__(self, config: HybridConfig) -> None:
        super().__init__(config)
        width = config.num_heads * config.head_dim
        self.gate_proj = Linear(config.hidden_size, width, bias=config.attention_bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attended = self.attend(x, cos, sin)
        return self.o_proj(attended * torch.sigmoid(self.gate_proj(x)))


class HybridLayer(nn.Module):
    """Pre-norm attention of either kind and feed-forward, each added to the residual stream."""

    def __init__(self, config: HybridConfig, layer: int, mlp: nn.Module) -> None:
        super().__init__()
        sizes = config.hidden_size, config.norm_eps
        self.input_layernorm = RMSNorm(*sizes)
        self.is_linear = config.linear_layers[layer]
        if self.is_linear:
            self.linear_attn = GatedDeltaNet(config.hidden_size, config.delta, config.norm_eps)
        else:
            self.self_attn = GatedAttention(config)
        self.post_attention_layernorm = RMSNorm(*sizes)
        self.mlp = mlp

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        normed = self.input_layernorm(x)
        x = x + (self.linear_attn(normed) if self.is_linear else self.self_attn(normed, cos, sin))
        return x + self.mlp(self.post_attention_layernorm(x))


class HybridModel(LlamaModel):
    """Llama's embedding and norm around layers of two kinds, attention and Gated DeltaNet."""

    @staticmethod
    def make_layer(config: HybridConfig, layer: int) -> HybridLayer:
        return HybridLayer(config, layer, MLP(config))


class Qwen35ForCausalLM(LlamaForCausalLM):
    """Qwen3.5 with its head; checkpoints have a query's rows above its gate's, head by head."""

    config: HybridConfig
    model_class = HybridModel
    tensor_groups: Mapping[str, str] = {
        **LlamaForCausalLM.tensor_groups,
        "model.layers.*.self_attn.gate_proj": "wqkv",
        **DELTA_GROUPS,
    }

    def sources(self) -> Sources:
        config, found = self.config, {}
        for name, _ in self.named_parameters():
            if name.endswith("norm.weight") and "linear_attn" not in name:
                found[name] = (TensorSource(name, offset=1.0),)
        for layer, is_linear in enumerate(config.linear_layers):
            if not is_linear:
                found |= _query_and_gate(f"model.layers.{layer}.self_attn", config)
        return found


class DraftModules(nn.Module):
    """A draft layer: a token's embedding and a hidden state to a hidden state."""

    def __init__(self, config: HybridConfig, block: nn.Module) -> None:
        super().__init__()
        hidden, sizes = config.hidden_size, (config.hidden_size, config.norm_eps)
        self.pre_fc_norm_embedding = RMSNorm(*sizes)
        self.pre_fc_norm_hidden = RMSNorm(*sizes)
        self.fc_embedding = Linear(hidden, hidden, bias=False)
        self.fc_hidden = Linear(hidden, hidden, bias=False)
        self.block = block
        self.norm = RMSNorm(*sizes)

    def forward(self, embedding: Tensor, hidden: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = self.fc_embedding(self.pre_fc_norm_embedding(embedding))
        x = x + self.fc_hidden(self.pre_fc_norm_hidden(hidden))
        result: Tensor = self.norm(self.block(x, cos, sin))
        return result


class Qwen35DraftLayer(nn.Module):
    """Qwen3.5's draft layer with the model's embedding and head.

    Inputs at position t are token t + 1 and the model's final hidden state after the norm. Logits
    predict token t + 2.
    """

    model_class: ClassVar[type[Qwen35ForCausalLM]] = Qwen35ForCausalLM
    tensor_groups: Mapping[str, str] = {
        "embed_tokens": "embedding",
        "mtp.fc_*": "draft_fc",
        "mtp.block.self_attn.[qkv]_proj": "draft_wqkv",
        "mtp.block.self_attn.gate_proj": "draft_wqkv",
        "mtp.block.self_attn.o_proj": "draft_wo",
        "mtp.block.self_attn": "draft_kv_cache",
        "mtp.block.mlp.gate": "router",
        "mtp.block.mlp.shared_expert_gate": "router",
        "mtp.block.mlp.*gate_proj": "draft_ff1_3",
        "mtp.block.mlp.*up_proj": "draft_ff1_3",
        "mtp.block.mlp.*down_proj": "draft_ff2",
        "lm_head": "draft_lm_head",
    }

    def __init__(self, config: HybridConfig) -> None:
        """Take the configuration of a single layer with attention."""
        super().__init__()
        self.config = config
        whole = self.model_class(config)
        self._sources = dict(whole.sources())
        self.embed_tokens, self.rotary = whole.model.embed_tokens, whole.model.rotary
        self.mtp = DraftModules(config, whole.model.layers[0])
        self.lm_head = whole.lm_head

    def forward(self, tokens_T: Tensor, positions_T: Tensor, hidden: Tensor) -> Tensor:
        cos, sin = self.rotary(positions_T)
        logits: Tensor = self.lm_head(self.mtp(self.embed_tokens(tokens_T), hidden, cos, sin))
        return logits

    def trace_inputs(self) -> tuple[dict[str, Tensor], tuple[dict[int, Any], ...]]:
        """Return example inputs by name, and their dynamic sizes."""
        tokens, positions = torch.empty((2, 7), dtype=torch.int64, device="meta").clone()
        hidden = torch.empty(7, self.config.hidden_size, device="meta")
        length = torch.export.Dim("length", min=2, max=1 << 24)
        inputs = {"tokens": tokens, "positions": positions, "hidden": hidden}
        return inputs, ({0: length},) * len(inputs)

    def sources(self) -> Sources:
        """Return the sources in the draft layer's checkpoint. Its block is layer 0."""
        sources: dict[str, tuple[TensorSource, ...]] = {}
        for name, _ in self.named_parameters():
            stored = name.replace("mtp.block.", "model.layers.0.")
            stored = f"model.{stored}" if stored.startswith("embed_tokens") else stored
            offset = 1.0 if name.startswith("mtp.") and name.endswith("norm.weight") else 0.0
            offset = 1.0 if "pre_fc_norm" in name else offset
            sources[name] = self._sources.get(stored, (TensorSource(stored, offset=offset),))
        return sources

    def constants(self, max_context: int | None = None) -> dict[str, Tensor]:
        """Return rotation frequencies, as the model's."""
        longest = self.config.max_positions if max_context is None else max_context
        inv_freq = inverse_frequencies(self.config.rope, self.config.head_dim, longest)
        return {"rotary.inv_freq": torch.tensor(inv_freq, dtype=torch.float32)}


def _query_and_gate(path: str, config: HybridConfig) -> dict[str, Any]:
    head_dim, hidden = config.head_dim, config.hidden_size
    total = 2 * config.num_heads * head_dim
    found = {}
    for kind, *shape in [("weight", total, hidden)] + [("bias", total)] * config.attention_bias:
        for index, part in enumerate(("q_proj", "gate_proj")):
            firsts = range(index * head_dim, total, 2 * head_dim)
            rows = [(first, first + head_dim) for first in firsts]
            found[f"{path}.{part}.{kind}"] = cut_rows(f"{path}.q_proj.{kind}", rows, tuple(shape))
    return found


DEFAULTS = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "max_position_embeddings": 32768,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""The values that transformers takes for keys which config.json leaves out."""

GGUF_NAMES = {
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
"""Hugging Face's names, by GGUF's, of the tensors that a layer has besides Llama's."""

ARCHITECTURE = Architecture(
    Qwen35ForCausalLM,
    config=HybridConfig,
    fixed={"qk_norm": True, "mlp_bias": False},
    hf_defaults=DEFAULTS,
    read_hf=hf_delta,
    read_gguf=gguf_delta,
    has_partial_rotary=True,
    has_mrope=True,
    text_config=True,
    gguf_names=GGUF_NAMES,
    gguf_norm_offset=1.0,
    draft_layer=Qwen35DraftLayer,
    gguf_tiled_heads=True,
)
