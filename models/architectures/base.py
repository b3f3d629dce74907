"""Record type for an architecture's file. `ARCHITECTURES` lists the files."""

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
"""Reads further keys. Takes keys and a configuration, returns the extended configuration."""

Views = Callable[[Any, Mapping[str, tuple[int, ...]], Path], dict[str, "View"]]
"""Builds views. Takes a configuration, tensor shapes by name and the file's path. Returns tensors
made from rows of other tensors, by name.
"""


@dataclass(frozen=True, slots=True)
class Architecture:
    """An architecture's differences from Llama.

    Attributes:
        model: Class of the module. Its constructor takes the configuration.
        config: Configuration class. None: `config.ModelConfig`.
        fixed: Configuration fields not found in files.
        hf_defaults: Defaults for optional keys in config.json.
        read_hf: Reads further keys from config.json.
        read_gguf: Reads further keys from GGUF metadata.
        has_partial_rotary: Read ``partial_rotary_factor``.
        has_adjacent_pairs: Files of all containers have adjacent rotation pairs in q and k. Readers
            convert them to half-split order.
        has_mrope: Accept position sections for images. They are all equal for text.
        has_rope_by_layer: Accept ``rope_parameters`` with a section per layer type.
        text_config: Accept a multimodal config.json with a nested text configuration. Tensors of
            other inputs are then ignored.
        text_type: ``model_type`` of the nested configuration. Empty: the family's, or with _text.
        hf_prefixes: Tensor name prefixes in Hugging Face files, and the model's own prefixes.
        skips_tensor: Returns whether the model ignores a tensor. Takes a configuration and a name.
            None: it ignores none.
        intermediate_key: Key for ``intermediate_size`` if no layer has a dense block.
        experts: Expert tensor names: ``apart`` (a tensor per matmul and expert), ``together`` (a
            tensor for all experts in a layer) or ``alternating`` (the same, with biases, and rows
            of gate and up in turns). Empty: no experts.
        gguf_intermediate_key: GGUF's key for ``intermediate_size``.
        gguf_names: Hugging Face names for GGUF layer tensors with different names. Keys with a dot,
            or without an ending, are whole names. Other keys omit the ending.
        gguf_pairs_adjacent: GGUF's converter makes rotation pairs adjacent in q and k. False: pairs
            are half a head apart, as in Hugging Face files.
        gguf_norm_offset: Number added to norm weights by GGUF's converter, except in linear
            attention.
        gguf_views: Tensors split differently by GGUF's converter, except experts.
        draft_layer: Class of the module for a draft layer in Hugging Face files. Its constructor
            takes the layer's configuration. None: draft layers are ignored.
        gguf_tiled_heads: GGUF's converter orders linear attention's value heads by index within the
            key head. False: a key head's value heads are adjacent.
    """

    model: type[nn.Module]
    config: type | None = None
    fixed: Mapping[str, object] = field(default_factory=dict)
    hf_defaults: Mapping[str, object] = field(default_factory=dict)
    read_hf: Refine | None = None
    read_gguf: Refine | None = None
    has_partial_rotary: bool = False
    has_adjacent_pairs: bool = False
    has_mrope: bool = False
    has_rope_by_layer: bool = False
    text_config: bool = False
    text_type: str = ""
    hf_prefixes: Mapping[str, str] = field(default_factory=dict)
    skips_tensor: Callable[[Any, str], bool] | None = None
    intermediate_key: str = "intermediate_size"
    experts: Literal["", "apart", "together", "alternating"] = ""
    gguf_intermediate_key: str = "feed_forward_length"
    gguf_names: Mapping[str, str] = field(default_factory=dict)
    gguf_pairs_adjacent: bool = False
    gguf_norm_offset: float = 0.0
    gguf_views: Views | None = None
    draft_layer: type[nn.Module] | None = None
    gguf_tiled_heads: bool = False
