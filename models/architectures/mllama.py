"""Llama 3.2 Vision (Llama Team, 2024) as a text model.

A prompt of text skips the cross-attention layers, so that 11B computes Llama 3.1 8B. Layers are
numbered without them. Tensors keep the checkpoint's numbers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from tilewright.models.architectures.base import Architecture
from tilewright.models.architectures.layers import Embedding
from tilewright.models.architectures.llama import LlamaForCausalLM, LlamaModel
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.config import ModelConfig
from tilewright.models.sources import Sources, TensorSource

NUM_EXTRA_TOKENS = 8
"""Embedding rows without a logit. The first row is the image token."""

_CROSS_LAYERS = [3, 8, 13, 18, 23, 28, 33, 38]


@dataclass(frozen=True, slots=True)
class MllamaConfig(ModelConfig):
    """Sizes and switches for a Llama 3.2 Vision text model.

    Attributes:
        cross_layers: The cross-attention layers' numbers in the checkpoint. ``num_layers`` does
            not count them.
    """

    cross_layers: tuple[int, ...] = ()

    @property
    def stored_layers(self) -> tuple[int, ...]:
        """Return the checkpoint numbers for the self-attention layers."""
        total = self.num_layers + len(self.cross_layers)
        return tuple(layer for layer in range(total) if layer not in self.cross_layers)


class MllamaModel(LlamaModel):
    """A Llama with embedding rows for tokens without a logit."""

    def __init__(self, config: MllamaConfig) -> None:
        super().__init__(config)
        num_rows = config.vocab_size + NUM_EXTRA_TOKENS
        self.embed_tokens = Embedding(num_rows, config.hidden_size)


class MllamaForCausalLM(LlamaForCausalLM):
    """Llama 3.2 Vision with its head. A tied head is the embedding's first rows."""

    config: MllamaConfig
    model_class = MllamaModel

    def __init__(self, config: MllamaConfig) -> None:
        super().__init__(dataclasses.replace(config, tie_embeddings=False))
        self.config = config

    def sources(self) -> Sources:
        result = {}
        for name, _ in self.named_parameters():
            prefix, is_layer, rest = name.rpartition("model.layers.")
            if is_layer and not prefix:
                layer, _, tail = rest.partition(".")
                stored = self.config.stored_layers[int(layer)]
                result[name] = (TensorSource(f"model.layers.{stored}.{tail}"),)
        if self.config.tie_embeddings:
            rows = (0, self.config.vocab_size)
            result["lm_head.weight"] = (TensorSource("model.embed_tokens.weight", rows=rows),)
        return result


def read_hf(keys: Keys, config: MllamaConfig) -> MllamaConfig:
    """Add the cross-attention layers from config.json, and count the layers without them.

    Raises:
        CheckpointError: The list is not ascending, or a number is not a layer.
    """
    layers: Any = keys.get("cross_attention_layers")
    total = config.num_layers
    is_list = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    if not is_list or layers != sorted(set(layers) & set(range(total))) or len(layers) == total:
        tail = f"allowed: an ascending list of layers, 0 to {total - 1}, but not all"
        raise keys.error("cross_attention_layers", layers, tail)
    return dataclasses.replace(config, num_layers=total - len(layers), cross_layers=tuple(layers))


def skips_tensor(config: MllamaConfig, name: str) -> bool:
    """Return whether a tensor belongs to the vision tower or to a cross-attention layer."""
    if name.startswith(("vision_model.", "multi_modal_projector.")):
        return True
    head, result, rest = name.partition("model.layers.")
    layer = rest.partition(".")[0]
    return not head and bool(result) and layer.isdigit() and int(layer) in config.cross_layers


ARCHITECTURE = Architecture(
    MllamaForCausalLM,
    config=MllamaConfig,
    hf_defaults={
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 131072,
        "cross_attention_layers": _CROSS_LAYERS,
    },
    read_hf=read_hf,
    text_config=True,
    text_type="mllama_text_model",
    hf_prefixes={
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
        "model.vision_model.": "vision_model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    },
    skips_tensor=skips_tensor,
)
