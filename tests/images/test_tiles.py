"""Tiles of Llama 3.2 Vision against transformers' processor with the Pillow backend."""

from __future__ import annotations

import io
import random
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.mllama import image_processing_pil_mllama as theirs

from tilewright.images.tiles import TileSettings, choose_canvas, draw_canvas, fit_size, tiles_of

SETTINGS = TileSettings(
    image_token=0,
    patch_size=14,
    tile_size=56,
    mean=(0.48145466, 0.4578275, 0.40821073),
    std=(0.26862954, 0.26130258, 0.27577711),
)
SIZES = ((56, 56), (1, 1), (30, 100), (1, 5000), (5000, 1), (200, 90), (117, 113), (300, 70))


@pytest.mark.parametrize("count", [3000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_canvas_and_size_of_random_images_equal_transformers(count: int) -> None:
    canvas_of = theirs.get_optimal_tiled_canvas.__wrapped__
    generator = random.Random(0)
    for _ in range(count):
        size = generator.randint(1, 5000), generator.randint(1, 5000)
        canvas = choose_canvas(size, tile_size=560, max_tiles=4)
        assert canvas == tuple(canvas_of(*size, 4, 560)), size
        fitted = theirs.get_image_size_fit_to_canvas(*size, *canvas, 560)
        assert fit_size(size, canvas, tile_size=560) == fitted, size


@pytest.mark.parametrize("height, width", SIZES)
def test_pixels_equal_the_pillow_processor(height: int, width: int) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), np.uint8)
    _check(Image.fromarray(noise))


@pytest.mark.parametrize(
    "mode, kind", [("RGB", "JPEG"), ("P", "PNG"), ("L", "PNG"), ("RGBA", "PNG")]
)
def test_pixels_of_files_equal_the_pillow_processor(mode: str, kind: str) -> None:
    noise = np.random.default_rng(1).integers(0, 256, (90, 70, 4), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise, "RGBA").convert("RGB" if mode in "PL" else mode).convert(mode).save(
        file, kind
    )
    image = Image.open(file)
    _check(image.convert("RGB"))


def _check(image: Image.Image) -> None:
    expected: Any = theirs.MllamaImageProcessorPil(
        size={"height": 56, "width": 56},
        image_mean=SETTINGS.mean,
        image_std=SETTINGS.std,
    )(image, return_tensors="np")
    tiled = tiles_of(draw_canvas(image, SETTINGS, max_tiles=SETTINGS.max_tiles), SETTINGS)
    np.testing.assert_allclose(tiled.pixels, expected["pixel_values"][0, 0], atol=1e-6, rtol=0)
    assert tiled.aspect_id == expected["aspect_ratio_ids"][0, 0]
    assert tiled.num_tiles == expected["num_tiles"][0][0]
    assert tiled.num_tiles == expected["aspect_ratio_mask"][0, 0].sum()
