"""Vision tower in an executable: an image's pixels to embeddings for the text model.

The tower is read with its first image, so text needs neither its memory nor torch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tilewright.compiler.targets.tile_encoder import TileEncoder, TileEncoderSettings, Tower
from tilewright.images.patches import coordinates, corners, normalized, patches_of
from tilewright.images.processor import ImageProcessor
from tilewright.images.squares import SquareSettings

if TYPE_CHECKING:
    from torch import Tensor


class EncoderSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Tower facts outside its graph.

    Attributes:
        processor: Image processor.
        num_frames: Frames per patch.
        grid_side: Position grid side.
        num_pairs: Rotated pairs per head.
        rotary_axes: Coordinate per rotated pair in the text model: 0 time, 1 height, 2 width.
    """

    processor: ImageProcessor
    num_frames: int
    grid_side: int
    num_pairs: int
    rotary_axes: tuple[int, ...]


class ImageEncoder:
    """A tower with its settings. ``load`` returns the tower."""

    cross_width = tile_keys = 0
    """Values per key, and keys per tile. 0: embeddings."""

    def __init__(self, settings: EncoderSettings, load: Callable[[], Tower]) -> None:
        self.settings = settings
        self._load = load
        self._axes = np.array(settings.rotary_axes)

    @functools.cached_property
    def _tower(self) -> Tower:
        return self._load()

    def encode(self, height: int, width: int, pixels: bytes) -> np.ndarray:
        """Return a resized image's embeddings, float32 ``[tokens, hidden]``."""
        values: np.ndarray = self.encode_tensor(height, width, pixels).cpu().numpy()
        return values

    def encode_tensor(self, height: int, width: int, pixels: bytes) -> Tensor:
        """Return the result of :meth:`encode` on the tower's device."""
        return self._tower(*self.inputs(height, width, pixels))

    def inputs(self, height: int, width: int, pixels: bytes) -> tuple[Any, ...]:
        """Return the tower's inputs for a resized image."""
        settings, processor = self.settings, self.settings.processor
        patch, merge = processor.patch_size, processor.merge_size
        image = normalized(pixels, height, width, mean=processor.mean, std=processor.std)
        patches = patches_of(image, patch=patch, merge=merge, frames=settings.num_frames)
        down, across = height // patch, width // patch
        where = coordinates(down, across, merge)
        indices, weights = corners(where, down, across, settings.grid_side)
        positions = where.repeat(settings.num_pairs // 2, axis=1)
        return np.ascontiguousarray(patches), indices, weights, positions

    def by_pair(self, positions: np.ndarray) -> np.ndarray:
        """Return a position per rotated pair, int64 ``[T, pairs]``.

        ``positions`` are ``[3, T]`` (time, height, width).
        """
        return np.ascontiguousarray(positions[self._axes].T)


class SquareEncoderSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Facts outside the graph of a tower with images of fixed size."""

    processor: SquareSettings


class SquareEncoder:
    """A tower with images of fixed size. ``load`` returns the tower."""

    cross_width = tile_keys = 0

    def __init__(self, settings: SquareEncoderSettings, load: Callable[[], Tower]) -> None:
        self.settings = settings
        self._load = load

    @functools.cached_property
    def _tower(self) -> Tower:
        return self._load()

    def encode(self, height: int, width: int, pixels: bytes) -> np.ndarray:
        """Return an image's embeddings, float32 ``[tokens, hidden]``."""
        values: np.ndarray = self.encode_tensor(height, width, pixels).cpu().numpy()
        return values

    def encode_tensor(self, height: int, width: int, pixels: bytes) -> Tensor:
        """Return the result of :meth:`encode` on the tower's device."""
        return self._tower(self.patches(height, width, pixels))

    def patches(self, height: int, width: int, pixels: bytes) -> np.ndarray:
        """Return the patches ``[P, 3 * side * side]`` in scan order."""
        processor = self.settings.processor
        image = normalized(pixels, height, width, mean=processor.mean, std=processor.std)
        patches = patches_of(image, patch=processor.patch_size, merge=1, frames=1)
        return np.ascontiguousarray(patches)

    def by_pair(self, positions: np.ndarray) -> np.ndarray:
        """Images of this tower do not change rotary positions."""
        raise AssertionError("rotary positions are positions")


AnyEncoder = ImageEncoder | TileEncoder | SquareEncoder
AnySettings = EncoderSettings | TileEncoderSettings | SquareEncoderSettings


def encoder_of(settings: AnySettings, load: Callable[[], Tower]) -> AnyEncoder:
    """Return the encoder for a tower's settings."""
    if isinstance(settings, TileEncoderSettings):
        return TileEncoder(settings, load)
    if isinstance(settings, SquareEncoderSettings):
        return SquareEncoder(settings, load)
    return ImageEncoder(settings, load)
