"""Which architectures exist: the files beside this one that define an ``ARCHITECTURE``.

A file is called as Hugging Face's ``model_type`` and imported when that is asked for.
"""

from __future__ import annotations

import functools
import importlib
import reprlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from tilewright.compiler.errors import CheckpointError, allowed

if TYPE_CHECKING:
    from torch import nn

    from tilewright.models.checkpoints.keys import Keys
    from tilewright.models.checkpoints.pieces import View

_MARK = "\nARCHITECTURE = "

Refine = Callable[["Keys", Any], Any]
"""A configuration, `ModelConfig` or the architecture's own, with what further keys say of it."""

Views = Callable[[Any, Mapping[str, tuple[int, ...]], Path], dict[str, "View"]]
"""Of a configuration and the shapes that a file has: tensors made of others' rows."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a file says of its architecture, where it differs from Llama.

    Attributes:
        model: the class of the module; its constructor takes the configuration.
        config: the configuration's class, if it is not `config.ModelConfig` itself.
        fixed: fields of the configuration that no file says.
        hf_defaults: values of keys that a config.json may leave out.
        read_hf, read_gguf: what else to read from config.json, and from GGUF metadata.
        has_partial_rotary: whether ``partial_rotary_factor`` is read.
        has_mrope: whether positions may have sections for images, which are all alike for text.
        has_rope_by_layer: whether ``rope_parameters`` may have a section for each type of layer.
        text_config: whether config.json may be that of a model of several kinds of input, with this
            one's keys inside; then its tensors lie beside those of the others.
        intermediate_key: the key of ``intermediate_size``, where no layer has a dense block.
        experts: how the names of experts' tensors are asked for: ``apart``, one for each product of
            each expert, or ``together``, one for all experts of a layer; empty where none are.
        gguf_intermediate_key: GGUF's key of ``intermediate_size``.
        gguf_names: Hugging Face's names of GGUF's tensors of a layer, where they differ; of a whole
            name where GGUF's has a dot or no ending, else of what stands before the ending.
        gguf_pairs_adjacent: GGUF's converter moves the rows of q and k so that rotation pairs are
            neighbours; otherwise they are half a head apart, as in Hugging Face's files.
        gguf_norm_offset: what GGUF's converter adds to the weights of norms, those of linear
            attention apart.
        gguf_views: the tensors that GGUF's converter has cut otherwise, experts apart.
        gguf_tiled_heads: GGUF's converter orders the value heads of linear attention so that the
            first ones of all key heads come first; otherwise those of a key head lie together.
    """

    model: type[nn.Module]
    config: type | None = None
    fixed: Mapping[str, object] = field(default_factory=dict)
    hf_defaults: Mapping[str, object] = field(default_factory=dict)
    read_hf: Refine | None = None
    read_gguf: Refine | None = None
    has_partial_rotary: bool = False
    has_mrope: bool = False
    has_rope_by_layer: bool = False
    text_config: bool = False
    intermediate_key: str = "intermediate_size"
    experts: Literal["", "apart", "together"] = ""
    gguf_intermediate_key: str = "feed_forward_length"
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_pairs_adjacent: bool = False
    gguf_norm_offset: float = 0.0
    gguf_views: Views | None = None
    gguf_tiled_heads: bool = False


@functools.cache
def model_types() -> tuple[str, ...]:
    """Every ``model_type`` that is read, by its file's name; nothing is imported."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return tuple(file.stem for file in files if _MARK in file.read_text(encoding="utf-8"))


def architecture_of(model_type: str) -> Architecture:
    """What the file of a known ``model_type`` says."""
    assert model_type in model_types(), model_type
    architecture: Architecture = importlib.import_module(
        f"tilewright.models.architectures.{model_type}"
    ).ARCHITECTURE
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
