"""Images of noise, to measure models with random weights."""

from __future__ import annotations

from tilewright.images.parts import Picture


def noise_picture(side: int, seed: int) -> Picture:
    """Return a square image of noise with ``side`` pixels."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(seed).integers(0, 256, (side, side, 3), np.uint8)
    return Picture(Image.fromarray(noise), "auto", "noise")
