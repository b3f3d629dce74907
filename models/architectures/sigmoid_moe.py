"""Experts with a sigmoid router, a selection bias and an optional shared expert without a gate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.compiler import ops
from tilewright.models.architectures.layers import MLP, DecoderLayer, Linear
from tilewright.models.architectures.moe import TENSOR_GROUPS, Experts
from tilewright.models.config import MoeConfig

GROUPS: Mapping[str, str] = {
    **TENSOR_GROUPS,
    "model.layers.*.mlp.shared_experts.gate_proj": "shared_ff1_3",
    "model.layers.*.mlp.shared_experts.up_proj": "shared_ff1_3",
    "model.layers.*.mlp.shared_experts.down_proj": "shared_ff2",
}
"""Tensor groups in `SigmoidMLP`, by module path globs."""


@dataclass(frozen=True, slots=True)
class SigmoidMoeConfig(MoeConfig):
    """Sizes and switches for experts with a sigmoid router.

    ``routed_scale`` multiplies the selected experts' weights.
    """

    routed_scale: float = 1.0


class SigmoidRouter(Linear):
    """A linear with a sigmoid per expert. The bias affects the selection only."""

    def __init__(self, config: SigmoidMoeConfig) -> None:
        super().__init__(config.hidden_size, config.num_experts, bias=False)
        self.e_score_correction_bias = nn.Parameter(torch.empty(config.num_experts))
        self.top_k, self.renormalise = config.experts_per_token, config.renormalise
        self.scale = config.routed_scale

    def forward(self, x: Tensor) -> Any:
        """Return weights and indices of the selected experts, both ``[T, K]``."""
        logits, bias = super().forward(x), self.e_score_correction_bias
        return ops.router(logits, self.top_k, self.renormalise, bias, self.scale)


class SigmoidMLP(nn.Module):
    """A sigmoid router with its experts, and an optional shared expert."""

    def __init__(self, config: SigmoidMoeConfig) -> None:
        super().__init__()
        self.gate = SigmoidRouter(config)
        self.experts = Experts(config)
        self.shared_experts = None
        if config.shared_size:
            shared = dataclasses.replace(
                config, intermediate_size=config.shared_size, mlp_bias=False
            )
            self.shared_experts = MLP(shared)

    def forward(self, x: Tensor) -> Tensor:
        weights_TK, experts_TK = self.gate(x)
        out: Tensor = self.experts(x, experts_TK, weights_TK)
        return out if self.shared_experts is None else out + self.shared_experts(x)


def sigmoid_layer(config: SigmoidMoeConfig, layer: int) -> DecoderLayer:
    """Return a pre-norm layer with a dense block or experts, by configuration."""
    is_dense = layer in config.dense_layers
    return DecoderLayer(config, mlp=MLP(config) if is_dense else SigmoidMLP(config))
