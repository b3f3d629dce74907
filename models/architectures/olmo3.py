"""OLMo 3 (Ai2, 2025): norms after value block, and windowed layers with a separate rotation."""

from __future__ import annotations

import dataclasses

from torch import Tensor, nn

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.full_norms import FullNormAttention
from tilewright.models.architectures.layers import MLP, RMSNorm
from tilewright.models.architectures.two_ropes import TwoRopesForCausalLM, TwoRopesModel
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.checkpoints.spelling.rope import MAX_THETA, hf_rope
from tilewright.models.checkpoints.spelling.windows import (
    FULL,
    SLIDING,
    checked_types,
    windows_by_type,
)
from tilewright.models.config import RopeConfig, TwoRopesConfig

_LAYERS_A_FULL_ONE = 4


class Olmo3Layer(nn.Module):
    """Attention and feed-forward with a norm after value, added to the residual stream."""

    def __init__(self, config: TwoRopesConfig, window: int) -> None:
        super().__init__()
        self.self_attn = FullNormAttention(config, window)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = MLP(config)
        self.post_feedforward_layernorm = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(x, cos, sin))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class Olmo3Model(TwoRopesModel):
    """Llama's embedding and norm with OLMo 3's layers."""

    @staticmethod
    def make_layer(config: TwoRopesConfig, layer: int) -> Olmo3Layer:
        return Olmo3Layer(config, config.window(layer))


class Olmo3ForCausalLM(TwoRopesForCausalLM):
    """OLMo 3 with its head."""

    model_class = Olmo3Model


def read_hf(keys: Keys, config: TwoRopesConfig) -> TwoRopesConfig:
    """Add windows and the windowed layer rotation from config.json.

    An older file has a single ``rope_scaling``. It applies to full attention only.

    Raises:
        CheckpointError: A key is missing, out of range or unsupported.
    """
    count = config.num_layers
    kinds = keys.get("layer_types")
    if kinds is None:
        layers = range(1, count + 1)
        kinds = [SLIDING if layer % _LAYERS_A_FULL_ONE else FULL for layer in layers]
    kinds = checked_types(keys, kinds, count)
    second = RopeConfig(keys.real("rope_theta", 1.0, MAX_THETA, default=config.rope.theta))
    nested = keys.get("rope_parameters")
    if isinstance(nested, dict) and SLIDING in nested:
        second = hf_rope(keys, config.head_dim, config.max_positions, layers=SLIDING)
    elif isinstance(nested, dict) and FULL not in nested:
        second = config.rope
    return dataclasses.replace(
        config,
        windows=windows_by_type(keys, kinds, config.max_positions),
        second_layers=tuple(layer for layer in range(count) if kinds[layer] == SLIDING),
        second_rope=second,
    )


ARCHITECTURE = Architecture(
    Olmo3ForCausalLM,
    config=TwoRopesConfig,
    hf_defaults={
        "sliding_window": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 2048,
    },
    read_hf=read_hf,
    has_rope_by_layer=True,
)
