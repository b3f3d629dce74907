"""Vision towers of named shapes: config.json and image processor keys, without weights."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

PROCESSOR = "image_processor"
"""Key of a shape with the keys of preprocessor_config.json."""

_Values = Mapping[str, object]
_CLIP = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_HALF = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}


def _tiles(image_token: int, side: int, **tower: object) -> _Values:
    """Return the keys of a Llama 3.2 Vision tower with tiles of ``side`` pixels."""
    size = {"height": side, "width": side}
    return {
        "image_token_index": image_token,
        "vision_config": {"image_size": side, "patch_size": 14, **tower},
        PROCESSOR: {"size": size, "max_image_tiles": 4, "resample": 2, **_CLIP},
    }


def _patches(image_token: int, output_size: int, **tower: object) -> _Values:
    """Return the keys of a Qwen3.5 tower with ``output_size`` channels in the text model."""
    size = {"shortest_edge": 1 << 16, "longest_edge": 1 << 24}
    return {
        "image_token_id": image_token,
        "vision_config": {"depth": 27, "out_hidden_size": output_size, **tower},
        PROCESSOR: {"size": size, "patch_size": 16, "merge_size": 2, **_HALF},
    }


_TINY_TILES = _tiles(
    512,
    28,
    hidden_size=32,
    attention_heads=4,
    intermediate_size=64,
    num_hidden_layers=4,
    num_global_layers=2,
    intermediate_layers_indices=[1, 3],
)
_TINY_PATCHES = _patches(
    511, 64, depth=2, hidden_size=32, num_heads=2, intermediate_size=64, num_position_embeddings=16
)

TOWERS: Mapping[str, _Values] = MappingProxyType(
    {
        "llama-3.2-11b": _tiles(128256, 560),
        "llama-3.2-90b": _tiles(128256, 560),
        "qwen3.5-35b-a3b": _patches(248056, 2048),
        "qwen3.8-27b": _patches(248056, 5120),
        "tiny": {
            **_TINY_TILES,
            "model_type": "mllama",
            "num_hidden_layers": 4,
            "cross_attention_layers": [1, 3],
        },
        "tiny-hybrid": _TINY_PATCHES,
    }
)
"""Keys added to a text shape. The result has the shape's name with ``-vision``."""


def with_towers(shapes: Mapping[str, _Values]) -> dict[str, _Values]:
    """Return the shapes, and the shapes in `TOWERS` with their towers."""
    result = dict(shapes)
    for name, tower in TOWERS.items():
        text = shapes[name]
        named = f"{text['_name_or_path']}-Vision"
        result[f"{name}-vision"] = MappingProxyType({**text, **tower, "_name_or_path": named})
    return result
