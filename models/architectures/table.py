"""The supported architectures by Hugging Face's ``model_type``, and their lookup.

An architecture's file imports torch, so it is imported on demand. Architectures do not import this
file.
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
        "glm4": "tilewright.models.architectures.glm4",
        "glm4_moe": "tilewright.models.architectures.glm4_moe",
        "gpt_oss": "tilewright.models.architectures.gpt_oss",
        "granite": "tilewright.models.architectures.granite",
        "granitemoehybrid": "tilewright.models.architectures.granitemoehybrid",
        "lfm2": "tilewright.models.architectures.lfm2",
        "llama": "tilewright.models.architectures.llama",
        "minimax_m2": "tilewright.models.architectures.minimax_m2",
        "ministral3": "tilewright.models.architectures.ministral3",
        "mistral": "tilewright.models.architectures.mistral",
        "mllama": "tilewright.models.architectures.mllama",
        "muse_glimmer": "tilewright.models.architectures.muse_glimmer",
        "olmo3": "tilewright.models.architectures.olmo3",
        "phi3": "tilewright.models.architectures.phi3",
        "qwen2": "tilewright.models.architectures.qwen2",
        "qwen3": "tilewright.models.architectures.qwen3",
        "qwen3_5": "tilewright.models.architectures.qwen3_5",
        "qwen3_5_moe": "tilewright.models.architectures.qwen3_5_moe",
        "qwen3_moe": "tilewright.models.architectures.qwen3_moe",
        "qwen3_next": "tilewright.models.architectures.qwen3_next",
        "smollm3": "tilewright.models.architectures.smollm3",
    }
)
"""The module for each ``model_type``. It defines ``ARCHITECTURE``."""

WRAPPERS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"gemma3": ("gemma3_text",), "mistral3": ("mistral", "ministral3")}
)
"""Multimodal ``model_type`` values with a text model of another type, and the text models' types.
The first is the default.
"""


def model_types() -> tuple[str, ...]:
    """Return the supported ``model_type`` values in alphabetical order, without imports."""
    return tuple(sorted(ARCHITECTURES))


def architecture_of(model_type: str) -> Architecture:
    """Return the `Architecture` for ``model_type``, a key in `ARCHITECTURES`."""
    architecture: Architecture = importlib.import_module(ARCHITECTURES[model_type]).ARCHITECTURE
    return architecture


def check_model_type(model_type: object, where: str) -> str:
    """Return ``model_type`` if it is supported or in `WRAPPERS`, or its text model. ``where`` is
    file and key for errors.

    Raises:
        CheckpointError: The architecture is unknown. The message lists the known names.
    """
    if isinstance(model_type, str):
        if model_type in model_types() or model_type in WRAPPERS:
            return model_type
        whole = model_type.removesuffix("_model").removesuffix("_text")
        if whole in model_types() and architecture_of(whole).text_config:
            return whole
    raise _unknown(model_type, where)


def find_gguf_type(name: object, where: str) -> str:
    """Return the ``model_type`` for GGUF's ``general.architecture``.

    GGUF names have no underscores, and a family's text model has the family's name.

    Raises:
        CheckpointError: The architecture is unknown. The message lists the known names.
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
