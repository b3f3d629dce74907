"""Gemma 3's vision tower in config.json, and its image processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tilewright.images.squares import SquareSettings
from tilewright.models.architectures.gemma3_vision import SquareTowerConfig
from tilewright.models.checkpoints.huggingface.pixels import check_pixels
from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.config import MAX_HEADS, MAX_LAYERS, MAX_VOCAB, MAX_WIDTH, ModelConfig

_MAX_SIZE, _MAX_TOKENS = 1 << 12, 256
_BILINEAR = 2
_IMAGE_TOKEN = 262144
_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "num_channels": (3,),
    "hidden_act": ("gelu_pytorch_tanh",),
}
_DEFAULTS = {
    "hidden_size": 768,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "patch_size": 16,
    "image_size": 224,
    "layer_norm_eps": 1e-6,
}
"""Default values in transformers."""

_MARKER, _PLACEHOLDER, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"
"""Special tokens in all Gemma 3 models."""


def read_square_tower(
    keys: Keys, section: Mapping[str, object], config: ModelConfig
) -> SquareTowerConfig:
    """Return a tower's sizes.

    Raises:
        CheckpointError: A key is out of range or unsupported.
    """
    vision = keys.section("vision_config", {**_DEFAULTS, **section})
    hidden = vision.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = vision.integer("num_attention_heads", 1, MAX_HEADS)
    if hidden % num_heads:
        raise vision.error("hidden_size", hidden, f"allowed: a multiple of {num_heads}")
    patch_size = vision.integer("patch_size", 1, _MAX_SIZE)
    image_size = vision.integer("image_size", patch_size, _MAX_SIZE)
    count = keys.integer("mm_tokens_per_image", 1, _MAX_TOKENS, default=256)
    side, patches = round(count**0.5), image_size // patch_size
    if image_size % patch_size or side**2 != count or patches % side:
        raise vision.error(
            "image_size",
            image_size,
            f"allowed: a multiple of {patch_size}, and mm_tokens_per_image = {count} in a square "
            "that divides the patches",
        )
    window = min(filter(None, config.windows), default=count)
    if window < count:  # transformers ignores the window within an image
        tail = f"allowed: 1 to {window}, the attention window"
        raise keys.error("mm_tokens_per_image", count, tail)
    vision.refuse_unread(_NEUTRAL)
    return SquareTowerConfig(
        hidden_size=hidden,
        intermediate_size=vision.integer("intermediate_size", 1, MAX_WIDTH),
        num_heads=num_heads,
        num_layers=vision.integer("num_hidden_layers", 1, MAX_LAYERS),
        patch_size=patch_size,
        num_patches=patches**2,
        tokens_per_side=side,
        norm_eps=vision.real("layer_norm_eps", 0.0, 1.0),
        output_size=config.hidden_size,
    )


def read_square_settings(
    own: Keys, keys: Keys, tower: SquareTowerConfig, config: ModelConfig
) -> SquareSettings:
    """Return the image processor from its keys ``own``. ``keys``: config.json.

    Raises:
        CheckpointError: A key is missing, out of range or unsupported.
    """
    side = tower.patch_size * round(tower.num_patches**0.5)
    expected: Mapping[str, tuple[object, ...]] = {
        "resample": (_BILINEAR,),
        "size": ({"height": side, "width": side},),
        "do_pan_and_scan": (False,),
    }
    for key, values in expected.items():
        if own.get(key) not in (None, *values):
            raise own.error(key, own.get(key), f"allowed: {values[0]}")
    check_pixels(own)
    last = min(MAX_VOCAB, config.vocab_size) - 1
    default = _IMAGE_TOKEN if last >= _IMAGE_TOKEN else None
    triples: Any = {"mean": own.reals("image_mean", 3), "std": own.reals("image_std", 3)}
    return SquareSettings(
        image_token=keys.integer("image_token_index", 0, last, default=default),
        marker=_MARKER,
        expansion=f"\n\n{_MARKER}{_PLACEHOLDER}{_END}\n\n",
        side=side,
        patch_size=tower.patch_size,
        tokens_per_side=tower.tokens_per_side,
        **triples,
    )
