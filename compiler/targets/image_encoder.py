"""Vision tower in an executable: an image's pixels to embeddings for the text model.

The tower is read with its first image, so text needs neither its memory nor torch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from tilewright.compiler.targets.tile_encoder import (
    Encoder,
    TileEncoder,
    TileEncoderSettings,
    Tower,
)
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


class ImageEncoder(Encoder):
    """A tower with its settings. Values are embeddings ``[tokens, hidden]``."""

    def __init__(self, settings: EncoderSettings, load: Callable[[], Tower]) -> None:
        super().__init__(load)
        self.settings = settings
        self._axes = np.array(settings.rotary_axes)

    def encode_tensor(self, height: int, width: int, pixels: bytes) -> Tensor:
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


class SquareEncoder(Encoder):
    """A tower with images of fixed size. Values are embeddings ``[tokens, hidden]``."""

    def __init__(self, settings: SquareEncoderSettings, load: Callable[[], Tower]) -> None:
        super().__init__(load)
        self.settings = settings

    def encode_tensor(self, height: int, width: int, pixels: bytes) -> Tensor:
        return self._tower(self.patches(height, width, pixels))

    def patches(self, height: int, width: int, pixels: bytes) -> np.ndarray:
        """Return the patches ``[P, 3 * side * side]`` in scan order."""
        processor = self.settings.processor
        image = normalized(pixels, height, width, mean=processor.mean, std=processor.std)
        patches = patches_of(image, patch=processor.patch_size, merge=1, frames=1)
        return np.ascontiguousarray(patches)


AnyEncoder = ImageEncoder | TileEncoder | SquareEncoder
AnySettings = EncoderSettings | TileEncoderSettings | SquareEncoderSettings


def encoder_of(settings: AnySettings, load: Callable[[], Tower]) -> AnyEncoder:
    """Return the encoder for a tower's settings."""
    if isinstance(settings, TileEncoderSettings):
        return TileEncoder(settings, load)
    if isinstance(settings, SquareEncoderSettings):
        return SquareEncoder(settings, load)
    return ImageEncoder(settings, load)
