"""Decoders with a second rotation in some layers, or no rotation in them."""

from __future__ import annotations

import torch
from torch import Tensor

from tilewright.models.architectures.layers import RotaryEmbedding
from tilewright.models.architectures.llama import LlamaForCausalLM, LlamaModel
from tilewright.models.architectures.rope import inverse_frequencies
from tilewright.models.config import TwoRopesConfig


class TwoRopesModel(LlamaModel):
    """Llama's embedding and norm. `TwoRopesConfig.second_layers` use the second rotation.

    A layer without a rotation has frequencies of 0. It multiplies by a cosine of 1, so its values
    are unchanged.
    """

    def __init__(self, config: TwoRopesConfig) -> None:
        super().__init__(config)
        self.second_layers = frozenset(config.second_layers)
        rope = config.second_rope
        factor = 1.0 if rope is None else rope.attention_factor
        num_pairs = (config.rope if rope is None else rope).num_pairs(config.head_dim)
        self.second_rotary = RotaryEmbedding(num_pairs, factor)

    def forward(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        x = self.embed_tokens(tokens_T)
        first, second = self.rotary(positions_T), self.second_rotary(positions_T)
        for index, layer in enumerate(self.layers):
            x = layer(x, *(second if index in self.second_layers else first))
        return self.norm(x)


class TwoRopesForCausalLM(LlamaForCausalLM):
    """A `TwoRopesModel` with its head."""

    config: TwoRopesConfig
    model_class = TwoRopesModel

    def constants(self, max_context: int | None = None) -> dict[str, Tensor]:
        config, constants = self.config, super().constants(max_context)
        if config.second_rope is None:
            second = torch.zeros_like(constants["model.rotary.inv_freq"])
        else:
            values = inverse_frequencies(config.second_rope, config.head_dim, max_context)
            second = torch.tensor(values, dtype=torch.float32)
        return {**constants, "model.second_rotary.inv_freq": second}
