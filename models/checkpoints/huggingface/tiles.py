"""Vision towers of Llama 3.2 Vision in config.json, and their image processors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.images.tiles import TileSettings, arrangements
from tilewright.models.architectures.mllama import NUM_EXTRA_TOKENS
from tilewright.models.architectures.mllama_vision import TileTowerConfig
from tilewright.models.checkpoints.huggingface.pixels import check_pixels
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.config import MAX_HEADS, MAX_LAYERS, MAX_WIDTH, ModelConfig

_MAX_SIZE = 1 << 12
_MAX_TILES = 4
_BILINEAR = 2
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "num_channels": (3,),
    "max_num_tiles": (_MAX_TILES,),
    "hidden_act": ("gelu",),
    "supported_aspect_ratios": ([list(size) for size in arrangements(_MAX_TILES)],),
}
_DEFAULTS = {
    "hidden_size": 1280,
    "attention_heads": 16,
    "intermediate_size": 5120,
    "num_hidden_layers": 32,
    "num_global_layers": 8,
    "patch_size": 14,
    "image_size": 448,
    "norm_eps": 1e-5,
    "intermediate_layers_indices": [3, 7, 15, 23, 30],
}
"""Default values in transformers."""


def read_tile_tower(
    keys: Keys, section: Mapping[str, object], config: ModelConfig
) -> TileTowerConfig:
    """Return a tower's sizes.

    Raises:
        CheckpointError: A key is invalid or unsupported.
    """
    vision = keys.section("vision_config", {**_DEFAULTS, **section})
    hidden = vision.integer("hidden_size", 4, MAX_WIDTH)
    num_heads = vision.integer("attention_heads", 1, MAX_HEADS)
    if hidden % num_heads:
        raise vision.error("hidden_size", hidden, f"allowed: a multiple of {num_heads}")
    num_layers = vision.integer("num_hidden_layers", 1, MAX_LAYERS)
    patch_size = vision.integer("patch_size", 1, _MAX_SIZE)
    image_size = vision.integer("image_size", patch_size, _MAX_SIZE)
    if image_size % patch_size:
        raise vision.error("image_size", image_size, f"allowed: a multiple of {patch_size}")
    vision.refuse_unread(_NEUTRAL)
    kept = _kept_layers(vision, num_layers)
    output = vision.get("vision_output_dim")
    if output not in (None, hidden * (1 + len(kept))):
        raise vision.error("vision_output_dim", output, f"allowed: {hidden * (1 + len(kept))}")
    return TileTowerConfig(
        hidden_size=hidden,
        intermediate_size=vision.integer("intermediate_size", 1, MAX_WIDTH),
        num_heads=num_heads,
        num_layers=num_layers,
        num_global_layers=vision.integer("num_global_layers", 1, MAX_LAYERS),
        kept_layers=kept,
        patch_size=patch_size,
        num_patches=(image_size // patch_size) ** 2,
        norm_eps=vision.real("norm_eps", 0.0, 1.0),
        output_size=config.hidden_size,
    )


def _kept_layers(vision: Keys, num_layers: int) -> tuple[int, ...]:
    layers: Any = vision.get("intermediate_layers_indices")
    is_list = isinstance(layers, list) and all(type(layer) is int for layer in layers)
    if not is_list or not layers or layers != sorted(set(layers) & set(range(num_layers))):
        tail = f"allowed: an ascending list of layers, 0 to {num_layers - 1}"
        raise vision.error("intermediate_layers_indices", layers, tail)
    return tuple(layers)


def read_tile_settings(
    own: Keys, keys: Keys, tower: TileTowerConfig, config: ModelConfig
) -> TileSettings:
    """Return the image processor from its keys ``own``. ``keys``: config.json.

    Raises:
        CheckpointError: A key is missing, out of range or unsupported.
    """
    side = tower.patch_size * round(tower.num_patches**0.5)
    for key, expected in (
        ("max_image_tiles", _MAX_TILES),
        ("resample", _BILINEAR),
        ("size", {"height": side, "width": side}),
    ):
        if own.get(key) not in (None, expected):
            raise own.error(key, own.get(key), f"allowed: {expected}")
    check_pixels(own)
    most = config.vocab_size + NUM_EXTRA_TOKENS - 1
    return TileSettings(
        image_token=keys.integer("image_token_index", 0, most),
        patch_size=tower.patch_size,
        tile_size=side,
        mean=own.reals("image_mean", 3),  # type: ignore[arg-type]
        std=own.reals("image_std", 3),  # type: ignore[arg-type]
    )
