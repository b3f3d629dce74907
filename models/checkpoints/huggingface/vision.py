"""Vision towers in Hugging Face's config.json, and image processors in preprocessor_config.json."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.images.processor import ImageProcessor
from tilewright.images.squares import SquareSettings
from tilewright.images.tiles import TileSettings
from tilewright.models.architectures.gemma3_vision import SquareTowerConfig
from tilewright.models.architectures.mllama_vision import TileTowerConfig
from tilewright.models.checkpoints.huggingface.pixels import check_pixels
from tilewright.models.checkpoints.huggingface.squares import (
    read_square_settings,
    read_square_tower,
)
from tilewright.models.checkpoints.huggingface.tiles import read_tile_settings, read_tile_tower
from tilewright.models.checkpoints.json_file import read_json
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.config import MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, ModelConfig
from tilewright.models.vision_config import VisionConfig

PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files with image processor settings. The first file has precedence."""

_FAMILIES = ("qwen3_5", "qwen3_5_moe")
_TILE_FAMILY, _SQUARE_FAMILY = "mllama", "gemma3_text"
_SECTIONS = (11, 11, 10)
_MAX_SIZE = 1 << 10
_MAX_PIXELS = 1 << 28
_DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "num_heads": 16,
    "intermediate_size": 4304,
    "patch_size": 16,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "num_position_embeddings": 2304,
    "out_hidden_size": 3584,
    "in_channels": 3,
    "hidden_act": "gelu_pytorch_tanh",
}
"""Default values in transformers."""
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "in_channels": (3,),
    "hidden_act": ("gelu_pytorch_tanh",),
    "deepstack_visual_indexes": ([],),
}

_SIZES = ("depth", "hidden_size", "num_heads", "out_hidden_size")
"""A configuration without any of these keys describes no tower."""

Vision = (
    tuple[VisionConfig, ImageProcessor]
    | tuple[TileTowerConfig, TileSettings]
    | tuple[SquareTowerConfig, SquareSettings]
)


def read_vision(
    values: Mapping[str, object], config: ModelConfig, path: Path
) -> tuple[Vision | None, str]:
    """Return the tower's configuration with its processor, or the reason for none.

    Args:
        values: The parsed config.json.
        config: Text model configuration.
        path: Checkpoint directory.

    Raises:
        CheckpointError: A key is invalid or unsupported.
    """
    section = values.get("vision_config")
    families = (*_FAMILIES, _TILE_FAMILY, _SQUARE_FAMILY)
    if config.model_type not in families or not isinstance(section, Mapping):
        return None, ""
    if config.model_type in _FAMILIES and not any(name in section for name in _SIZES):
        return None, ""
    keys = Keys(values, path / "config.json")
    file = next((path / name for name in PROCESSORS if (path / name).is_file()), None)
    vision = vision_of(keys, config, None if file is None else Keys(_processor_of(file), file))
    if vision is None:
        return None, f"images: {path / PROCESSORS[0]} is missing, so images are refused"
    return vision, ""


def _processor_of(file: Path) -> Mapping[str, object]:
    values = read_json(file)
    inner = values.get("image_processor")
    return inner if isinstance(inner, Mapping) else values


def vision_of(keys: Keys, config: ModelConfig, processor: Keys | None) -> Vision | None:
    """Return a tower's configuration with its image processor. None without ``processor``.

    Args:
        keys: Keys of config.json with ``vision_config``.
        config: Text model configuration.
        processor: Keys of preprocessor_config.json.

    Raises:
        CheckpointError: A key is out of range or unsupported.
    """
    section: Any = keys.get("vision_config")
    if config.model_type == _TILE_FAMILY:
        tower = read_tile_tower(keys, section, config)
        if processor is None:
            return None
        return tower, read_tile_settings(processor, keys, tower, config)
    if config.model_type == _SQUARE_FAMILY:
        square = read_square_tower(keys, section, config)
        if processor is None:
            return None
        return square, read_square_settings(processor, keys, square, config)
    result = _vision_config(keys, {**_DEFAULTS, **section}, config)
    if processor is None:
        return None
    image_token = keys.integer("image_token_id", 0, min(MAX_VOCAB, config.vocab_size) - 1)
    return result, _processor(processor, result, image_token)


def _vision_config(keys: Keys, section: Mapping[str, object], config: ModelConfig) -> VisionConfig:
    vision = keys.section("vision_config", section)
    hidden = vision.integer("hidden_size", 4, MAX_WIDTH)
    num_heads = vision.integer("num_heads", 1, MAX_HEADS)
    if hidden % (4 * num_heads):
        raise vision.error("hidden_size", hidden, f"allowed: a multiple of {4 * num_heads}")
    output = vision.integer("out_hidden_size", 1, MAX_WIDTH)
    if output != config.hidden_size:
        raise vision.error("out_hidden_size", output, f"allowed: {config.hidden_size}")
    num_positions = vision.integer("num_position_embeddings", 1, MAX_WIDTH)
    if round(num_positions**0.5) ** 2 != num_positions:
        raise vision.error("num_position_embeddings", num_positions, "allowed: a square number")
    vision.refuse_unread(_NEUTRAL)
    return VisionConfig(
        num_layers=vision.integer("depth", 1, MAX_LAYERS),
        hidden_size=hidden,
        num_heads=num_heads,
        intermediate_size=vision.integer("intermediate_size", 1, MAX_WIDTH),
        patch_size=vision.integer("patch_size", 1, _MAX_SIZE),
        num_frames=vision.integer("temporal_patch_size", 1, _MAX_SIZE),
        merge_size=vision.integer("spatial_merge_size", 1, _MAX_SIZE),
        num_positions=num_positions,
        output_size=output,
        rotary_axes=rotary_axes(_sections(keys), config.rope.num_pairs(config.head_dim)),
    )


def rotary_axes(sections: tuple[int, int, int], num_pairs: int) -> tuple[int, ...]:
    """Return a coordinate per rotated pair: 0 time, 1 height, 2 width.

    Rows and columns take every third pair, as far as their ``sections`` reach.
    """
    axes = [0] * num_pairs
    for axis in (1, 2):
        for pair in range(axis, min(3 * sections[axis], num_pairs), 3):
            axes[pair] = axis
    return tuple(axes)


def _sections(keys: Keys) -> tuple[int, int, int]:
    """Return the pair counts for time, height and width from the text configuration."""
    text: Any = keys.get("text_config") or keys.values
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    result = rope.get("mrope_section") or _SECTIONS
    if rope.get("mrope_interleaved") is False:
        raise keys.error("mrope_interleaved", False, "allowed: true")
    return (int(result[0]), int(result[1]), int(result[2]))


def _processor(keys: Keys, config: VisionConfig, image_token: int) -> ImageProcessor:
    for key, expected in (
        ("patch_size", config.patch_size),
        ("merge_size", config.merge_size),
        ("temporal_patch_size", config.num_frames),
        ("resample", 3),
    ):
        if keys.get(key) not in (None, expected):
            raise keys.error(key, keys.get(key), f"allowed: {expected}")
    check_pixels(keys)
    size = keys.get("size")
    if not isinstance(size, Mapping):
        raise keys.error("size", size, "allowed: shortest_edge and longest_edge, in pixels")
    area = keys.section("size", size)
    min_pixels = area.integer("shortest_edge", 1, _MAX_PIXELS)
    return ImageProcessor(
        image_token=image_token,
        patch_size=config.patch_size,
        merge_size=config.merge_size,
        min_pixels=min_pixels,
        max_pixels=area.integer("longest_edge", min_pixels, _MAX_PIXELS),
        mean=keys.reals("image_mean", 3),  # type: ignore[arg-type]
        std=keys.reals("image_std", 3),  # type: ignore[arg-type]
    )
