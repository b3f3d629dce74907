"""Which architectures there are, by Hugging Face's ``model_type``, and finding one by its name.

An architecture's file imports torch, so it is imported when it is asked for; the names are known
without it. No such file imports this one.
"""

from __future__ import annotations

import importlib
import reprlib
from collections.abc import Mapping
from types import MappingProxyType

from tilewright.errors import CheckpointError, allowed
from tilewright.models.architectures.base import Architecture

ARCHITECTURES: Mapping[str, str] = MappingProxyType(
    {
        "gemma3_text": "tilewright.models.architectures.gemma3_text",
        "llama": "tilewright.models.architectures.llama",
        "mistral": "tilewright.models.architectures.mistral",
        "phi3": "tilewright.models.architectures.phi3",
        "qwen2": "tilewright.models.architectures.qwen2",
        "qwen3": "tilewright.models.architectures.qwen3",
        "qwen3_5": "tilewright.models.architectures.qwen3_5",
        "qwen3_5_moe": "tilewright.models.architectures.qwen3_5_moe",
        "qwen3_moe": "tilewright.models.architectures.qwen3_moe",
        "qwen3_next": "tilewright.models.architectures.qwen3_next",
    }
)
"""The module of each ``model_type``, which calls what it says of itself ``ARCHITECTURE``."""


def model_types() -> tuple[str, ...]:
    """Every ``model_type`` that is read, in alphabetical order; nothing is imported for it."""
    return tuple(sorted(ARCHITECTURES))


def architecture_of(model_type: str) -> Architecture:
    """What the module of ``model_type``, a key of `ARCHITECTURES`, says of its architecture."""
    architecture: Architecture = importlib.import_module(ARCHITECTURES[model_type]).ARCHITECTURE
    return architecture


def check_model_type(model_type: object, where: str) -> str:
    """``model_type`` if it is one that is read, or the text part of one; ``where`` names file and
    key in the message.

    Raises:
        CheckpointError: an unknown architecture, with the known ones.
    """
    if isinstance(model_type, str):
        if model_type in model_types():
            return model_type
        whole = model_type.removesuffix("_text")
        if whole in model_types() and architecture_of(whole).text_config:
            return whole
    raise _unknown(model_type, where)


def find_gguf_type(name: object, where: str) -> str:
    """The ``model_type`` of GGUF's ``general.architecture``.

    GGUF writes names without underscores, and calls the text part of a family as the family.

    Raises:
        CheckpointError: an unknown architecture, with the known ones.
    """
    for model_type in model_types() if isinstance(name, str) else ():
        plain = model_type.replace("_", "")
        if name in (model_type, plain, plain.removesuffix("text")):
            return model_type
    raise _unknown(name, where)


def _unknown(model_type: object, where: str) -> CheckpointError:
    return CheckpointError(
        f"{where} = {reprlib.repr(model_type)} is not an architecture that is read; "
        + allowed(model_types())
    )
