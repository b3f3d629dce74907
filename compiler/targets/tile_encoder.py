"""Image encoder for Llama 3.2 Vision: an image's canvas to cross-attention keys and values.

The tower is read with its first image, so text needs no memory for the tower.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import numpy.typing as npt

from tilewright.compiler.formats import get_format
from tilewright.images.tiles import TileSettings, tiles_of

if TYPE_CHECKING:
    from torch import Tensor

Tower = Callable[..., "Tensor"]
"""Called with a tower's inputs as arrays. Returns float32 values on the tower's device."""

NARROW = ("bf16", "bfp8", "bfp4")
"""Formats of keys and values without loss in bfloat16."""

CROSS_CACHE_BYTES = 4 << 30
"""Maximum bytes for keys and values of images."""

IMAGE_CACHE_BYTES = 1 << 30
"""Maximum bytes for embeddings of images."""

_ROW_MULTIPLE = 8
"""Multiple for the padded row count per tile."""


def padding_rows(num_tiles: int, max_tiles: int, num_rows: int) -> npt.NDArray[np.bool_]:
    """Return which rows are padding, ``[tiles x rows]``, if ``num_tiles`` tiles are used.

    ``num_rows``: rows per tile without padding.
    """
    padded = -(-num_rows // _ROW_MULTIPLE) * _ROW_MULTIPLE
    is_padding = np.ones((max_tiles, padded), np.bool_)
    is_padding[:num_tiles, :num_rows] = False
    return is_padding.reshape(-1)


class TileEncoderSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tower facts outside its graph.

    Attributes:
        processor: Image processor.
        cache_format: Number format of keys and values, before they are stored.
        cross_width: Columns of image rows: keys and values for all cross-attention layers.
    """

    processor: TileSettings
    cross_width: int
    cache_format: str = "fp32"


class Encoder:
    """A tower. ``load`` returns it.

    Attributes:
        cross_width: Values per key. 0: the tower returns embeddings.
        tile_keys: Keys per tile.
    """

    cross_width = tile_keys = 0

    def __init__(self, load: Callable[[], Tower]) -> None:
        self._load = load

    @functools.cached_property
    def _tower(self) -> Tower:
        return self._load()

    def prepare(self) -> None:
        """Read the tower now, not with its first image."""
        _ = self._tower

    def encode(self, height: int, width: int, pixels: bytes) -> npt.NDArray[np.float32]:
        """Return a resized image's values, float32: embeddings, or keys and values.

        ``pixels`` are RGB bytes.
        """
        values: npt.NDArray[np.float32] = self.encode_tensor(height, width, pixels).cpu().numpy()
        return values

    def encode_tensor(self, height: int, width: int, pixels: bytes) -> Tensor:
        """Return the result of :meth:`encode` on the tower's device."""
        raise NotImplementedError

    def by_pair(self, positions: np.ndarray) -> np.ndarray:
        """Return a position per rotated pair. Images of most towers do not change them."""
        raise AssertionError("rotary positions are positions")


class TileEncoder(Encoder):
    """A tower with its settings.

    Images are canvases with black padding. Values are those of the used tiles.
    """

    def __init__(self, settings: TileEncoderSettings, load: Callable[[], Tower]) -> None:
        super().__init__(load)
        self.settings = settings
        self.cross_width = settings.cross_width
        self.tile_keys = settings.processor.rows_per_tile

    def encode_tensor(self, height: int, width: int, pixels: bytes) -> Tensor:
        canvas = np.frombuffer(pixels, np.uint8).reshape(height, width, 3)
        tiled = tiles_of(canvas, self.settings.processor)
        patches = patches_of(tiled.pixels, self.settings.processor.patch_size)
        rows = patches.shape[1] + 1
        is_padding = padding_rows(tiled.num_tiles, len(patches), rows)
        result = self._tower(patches, np.array([tiled.aspect_id]), is_padding)
        return self._rounded(result[: tiled.num_tiles * rows])

    def _rounded(self, values: Tensor) -> Tensor:
        if self.settings.cache_format == "fp32":
            return values
        return get_format(self.settings.cache_format).round_trip(values).float()


def patches_of(pixels: npt.NDArray[np.float32], side: int) -> npt.NDArray[np.float32]:
    """Return the patches for tiles ``[N, 3, size, size]``: ``[N, patches, 3 * side * side]``."""
    tiles, colors, size, _ = pixels.shape
    count = size // side
    grid = pixels.reshape(tiles, colors, count, side, count, side).transpose(0, 2, 4, 1, 3, 5)
    return np.ascontiguousarray(grid.reshape(tiles, count * count, -1))
