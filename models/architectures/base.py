"""What a file of this folder says of its architecture; `table` lists the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import nn

    from tilewright.models.checkpoints.pieces import View
    from tilewright.models.checkpoints.spelling.keys import Keys

Refine = Callable[["Keys", Any], Any]
"""A function of keys and a configuration, `ModelConfig` or the architecture's own, which returns
the configuration with what further keys say of it."""

Views = Callable[[Any, Mapping[str, tuple[int, ...]], Path], dict[str, "View"]]
"""A function of a configuration, the shapes of a file's tensors and its path, which returns the
tensors that are made of other tensors' rows, by name."""


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
