"""Image tiles for Llama 3.2 Vision: canvas, size, pixels and aspect ratio.

An image is resized to fit a canvas with square tiles, padded with black at the right and at the
bottom, and divided into tiles row by row. Unused tiles are zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from tilewright.images.processor import PreparedImage, digest_of

if TYPE_CHECKING:
    from PIL.Image import Image

    from tilewright.images.parts import Picture

Size = tuple[int, int]
"""Height and width, in pixels or in tiles."""


class TileSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Image processor settings from preprocessor_config.json.

    Attributes:
        image_token: Placeholder token id. The prompt has a placeholder per image.
        patch_size: Patch side in pixels.
        tile_size: Tile side in pixels.
        max_tiles: Maximum tile count per image.
        mean: Color means, from 0 to 1.
        std: Color standard deviations.
    """

    image_token: int
    patch_size: int
    tile_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    max_tiles: int = 4

    @property
    def rows_per_tile(self) -> int:
        """Return the rows for cross-attention per tile: patches, and a class row."""
        return (self.tile_size // self.patch_size) ** 2 + 1

    def prepare(self, picture: Picture) -> PreparedImage:
        """Draw a picture on its canvas. With ``detail: low``, the canvas has a single tile."""
        is_low = picture.detail == "low"
        canvas = draw_canvas(picture.image, self, max_tiles=1 if is_low else self.max_tiles)
        height, width, _ = canvas.shape
        pixels = canvas.tobytes()
        num_tiles = height * width // self.tile_size**2
        digest = digest_of(height, width, pixels)
        num_rows = num_tiles * self.rows_per_tile
        return PreparedImage(height, width, 1, 1, digest, pixels, num_rows)


@dataclass(frozen=True, slots=True)
class TiledImage:
    """Vision tower input for an image.

    Attributes:
        pixels: Normalized pixels ``[max_tiles, 3, side, side]``, float32.
        aspect_id: Position in `arrangements`, counted from 1.
        num_tiles: Used tile count. They are first in ``pixels``.
    """

    pixels: npt.NDArray[np.float32]
    aspect_id: int
    num_tiles: int


@cache
def arrangements(max_tiles: int) -> tuple[Size, ...]:
    """Return all arrangements with up to ``max_tiles`` tiles: rows and columns, in model order."""
    sides = range(1, max_tiles + 1)
    return tuple((rows, cols) for rows in sides for cols in sides if rows * cols <= max_tiles)


def choose_canvas(size: Size, *, tile_size: int, max_tiles: int) -> Size:
    """Return the canvas for an image, in pixels.

    The canvas with the smallest enlargement is selected. If none is large enough, the canvas with
    the smallest reduction is selected. The smaller area decides between equal canvases.
    """
    height, width = size
    scales = {}
    for rows, cols in arrangements(max_tiles):
        canvas = rows * tile_size, cols * tile_size
        scales[canvas] = min(canvas[0] / height, canvas[1] / width)
    large = [scale for scale in scales.values() if scale >= 1]
    scale = min(large) if large else max(scales.values())
    equal = (canvas for canvas in scales if scales[canvas] == scale)
    return min(equal, key=lambda canvas: canvas[0] * canvas[1])


def fit_size(size: Size, canvas: Size, *, tile_size: int) -> Size:
    """Return the resized image's size. The canvas contains the image with its aspect ratio."""
    height, width = size
    largest = [min(max(side, tile_size), limit) for side, limit in zip(size, canvas, strict=True)]
    scale_height, scale_width = largest[0] / height, largest[1] / width
    if scale_width < scale_height:
        return min(math.floor(height * scale_width) or 1, largest[0]), largest[1]
    return largest[0], min(math.floor(width * scale_height) or 1, largest[1])


def draw_canvas(image: Image, settings: TileSettings, *, max_tiles: int) -> npt.NDArray[np.uint8]:
    """Return a resized RGB image on its canvas ``[height, width, 3]``."""
    import PIL.Image

    side, size = settings.tile_size, (image.height, image.width)
    canvas = choose_canvas(size, tile_size=side, max_tiles=max_tiles)
    height, width = fit_size(size, canvas, tile_size=side)
    drawn = np.zeros((*canvas, 3), np.uint8)
    resized = image.resize((width, height), PIL.Image.Resampling.BILINEAR)
    drawn[:height, :width] = np.asarray(resized)
    return drawn


def tiles_of(canvas: npt.NDArray[np.uint8], settings: TileSettings) -> TiledImage:
    """Normalize a canvas, and return its tiles."""
    side = settings.tile_size
    mean, std = (np.asarray(values, np.float32) for values in (settings.mean, settings.std))
    values = (canvas.astype(np.float32) * np.float32(1 / 255) - mean) / std
    rows, cols = canvas.shape[0] // side, canvas.shape[1] // side
    tiles = values.reshape(rows, side, cols, side, 3).transpose(0, 2, 4, 1, 3)
    pixels = np.zeros((settings.max_tiles, 3, side, side), np.float32)
    pixels[: rows * cols] = tiles.reshape(-1, 3, side, side)
    aspect_id = arrangements(settings.max_tiles).index((rows, cols)) + 1
    return TiledImage(pixels, aspect_id, rows * cols)
