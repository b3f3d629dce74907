"""Image encoder for Llama 3.2 Vision: an image's canvas to cross-attention keys and values.

The tower is read with its first image, so text needs no memory for the tower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from tilewright.images.tiles import TileSettings, tiles_of

Tower = Callable[..., np.ndarray]
"""Called with patches, aspect and padding rows. Returns rows for all tiles, float32."""

_ROW_MULTIPLE = 8
"""Multiple for the padded row count per tile."""


class TileEncoder:
    """A tower with its image settings. ``load`` returns the tower."""

    def __init__(self, settings: TileSettings, patch_size: int, load: Callable[[], Tower]) -> None:
        self._settings, self._patch_size, self._load = settings, patch_size, load

    @functools.cached_property
    def _tower(self) -> Tower:
        return self._load()

    def encode(self, height: int, width: int, pixels: bytes) -> npt.NDArray[np.float32]:
        """Return keys and values for the used tiles in a canvas, float32 ``[rows, width]``.

        ``pixels`` are the canvas as RGB bytes, with black padding.
        """
        canvas = np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
        tiled = tiles_of(canvas, self._settings)
        patches = patches_of(tiled.pixels, self._patch_size)
        rows = patches.shape[1] + 1
        padded = -(-rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
        is_padding = np.ones((len(patches), padded), np.bool_)
        is_padding[: tiled.num_tiles, :rows] = False
        result = self._tower(patches, np.array([tiled.aspect_id]), is_padding.reshape(-1))
        return result[: tiled.num_tiles * rows]


def patches_of(pixels: npt.NDArray[np.float32], side: int) -> npt.NDArray[np.float32]:
    """Return the patches for tiles ``[N, 3, size, size]``: ``[N, patches, 3 * side * side]``."""
    tiles, colors, size, _ = pixels.shape
    count = size // side
    grid = pixels.reshape(tiles, colors, count, side, count, side).transpose(0, 2, 4, 1, 3, 5)
    return np.ascontiguousarray(grid.reshape(tiles, count * count, -1))
