"""The dense models of Granite 4 (IBM, 2025): Granite with gate and up in a shared tensor.

Layers of Mamba and experts are not supported.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.granite import GraniteConfig, GraniteForCausalLM
from tilewright.models.architectures.granite import read_hf as read_factors
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.checkpoints.spelling.windows import FULL
from tilewright.models.sources import Sources, TensorSource

_ATTENTION = ("attention", FULL)


class GraniteMoeHybridForCausalLM(GraniteForCausalLM):
    """Granite 4 with its head."""

    def sources(self) -> Sources:
        inner = self.config.intermediate_size
        sources = {}
        for layer in range(self.config.num_layers):
            path = f"model.layers.{layer}"
            tensor = f"{path}.shared_mlp.input_linear.weight"
            for index, part in enumerate(("gate", "up")):
                rows = (index * inner, (index + 1) * inner)
                sources[f"{path}.mlp.{part}_proj.weight"] = (TensorSource(tensor, rows),)
            down = TensorSource(f"{path}.shared_mlp.output_linear.weight")
            sources[f"{path}.mlp.down_proj.weight"] = (down,)
        return sources


def read_hf(keys: Keys, config: GraniteConfig) -> GraniteConfig:
    """Add the multipliers from config.json.

    Raises:
        CheckpointError: The model has experts, Mamba layers or no rotation, or a multiplier is
            invalid.
    """
    keys.integer("num_local_experts", 0, 0)
    for key in ("layer_types", "layers_block_type"):
        kinds: Any = keys.get(key)
        if kinds is not None:
            is_list = isinstance(kinds, list) and len(kinds) == config.num_layers
            if not is_list or any(layer_type not in _ATTENTION for layer_type in kinds):
                raise keys.error(key, kinds, f"allowed: {config.num_layers} of attention")
    if all(keys.get(key) is None for key in ("layer_types", "layers_block_type")):
        raise keys.error("layer_types", None, f"allowed: {config.num_layers} of attention")
    if keys.get("position_embedding_type") != "rope":
        sources = keys.get("position_embedding_type")
        raise keys.error("position_embedding_type", sources, "allowed: rope")
    return dataclasses.replace(read_factors(keys, config), mlp_bias=False)


ARCHITECTURE = Architecture(
    GraniteMoeHybridForCausalLM,
    config=GraniteConfig,
    read_hf=read_hf,
    intermediate_key="shared_intermediate_size",
)
