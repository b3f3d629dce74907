"""GLM-4-0414 (Z.ai, 2025): norms around blocks, and a rotation of half a head."""

from __future__ import annotations

from torch import Tensor, nn

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.layers import MLP, Attention, RMSNorm
from tilewright.models.architectures.llama import LlamaForCausalLM, LlamaModel
from tilewright.models.config import ModelConfig
from tilewright.models.sources import Sources, TensorSource


class Glm4Layer(nn.Module):
    """Attention and feed-forward with norms before and after, added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes = config.hidden_size, config.norm_eps
        self.input_layernorm = RMSNorm(*sizes)
        self.self_attn = Attention(config)
        self.post_self_attn_layernorm = RMSNorm(*sizes)
        self.post_attention_layernorm = RMSNorm(*sizes)
        self.mlp = MLP(config)
        self.post_mlp_layernorm = RMSNorm(*sizes)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), cos, sin)
        x = x + self.post_self_attn_layernorm(attended)
        return x + self.post_mlp_layernorm(self.mlp(self.post_attention_layernorm(x)))


class Glm4Model(LlamaModel):
    """Llama's embedding and norm with GLM-4's layers."""

    @staticmethod
    def make_layer(config: ModelConfig, layer: int) -> Glm4Layer:
        return Glm4Layer(config)


class Glm4ForCausalLM(LlamaForCausalLM):
    """GLM-4 with its head. Checkpoints have gate and up in a shared tensor."""

    model_class = Glm4Model

    def sources(self) -> Sources:
        inner, sources = self.config.intermediate_size, {}
        for layer in range(self.config.num_layers):
            path = f"model.layers.{layer}.mlp"
            for index, name in enumerate(("gate", "up")):
                rows = (index * inner, (index + 1) * inner)
                source = TensorSource(f"{path}.gate_up_proj.weight", rows)
                sources[f"{path}.{name}_proj.weight"] = (source,)
        return sources


ARCHITECTURE = Architecture(
    Glm4ForCausalLM,
    fixed={"output_bias": False, "mlp_bias": False},
    hf_defaults={
        "attention_bias": True,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rms_norm_eps": 1.5625e-7,
    },
    has_partial_rotary=True,
    has_adjacent_pairs=True,
    gguf_names={
        "ffn_up": "mlp.gate_up_proj",
        "post_attention_norm": "post_self_attn_layernorm",
        "post_ffw_norm": "post_mlp_layernorm",
    },
)
