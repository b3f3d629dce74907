"""Which architectures exist: Hugging Face's `model_type` -> the class, imported when asked for."""

from __future__ import annotations

import importlib
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from compiler.errors import CheckpointError, allowed

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class Architecture:
    """Where the class is, and what the architecture fixes so that no configuration says it.

    ``has_qkv_bias``: q, k and v have biases and o has none; otherwise ``attention_bias`` decides
    over all four. ``gguf_pairs_adjacent``: GGUF's converter moves the rows of q and k so that
    rotation pairs are neighbours; otherwise they are half a head apart, as in Hugging Face's files.
    """

    location: str
    has_qkv_bias: bool = False
    gguf_pairs_adjacent: bool = False


ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture("models.llama:LlamaForCausalLM", gguf_pairs_adjacent=True),
    "qwen2": Architecture("models.qwen2:Qwen2ForCausalLM", has_qkv_bias=True),
}


def check_model_type(model_type: object, where: str) -> str:
    """``model_type`` if it is one that is read; ``where`` names file and key in the message.

    Raises:
        CheckpointError: an unknown architecture, with the known ones.
    """
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise CheckpointError(
            f"{where} = {reprlib.repr(model_type)} is not an architecture that is read; "
            + allowed(ARCHITECTURES)
        )
    return model_type


def architecture_class(model_type: str) -> type[nn.Module]:
    """The module class of a known ``model_type``; its constructor takes a `ModelConfig`."""
    module_name, _, class_name = ARCHITECTURES[model_type].location.partition(":")
    architecture: type[nn.Module] = getattr(importlib.import_module(module_name), class_name)
    return architecture
