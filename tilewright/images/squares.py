"""Image processor for Gemma 3: a square of fixed size, without pan and scan.

The chat template writes a marker per image. Before tokenization, a placeholder with its brackets
replaces the marker.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tilewright.images.processor import ImageProcessor, PreparedImage, digest_of
from tilewright.images.tiles import TileSettings

if TYPE_CHECKING:
    from tilewright.images.parts import Picture


class SquareSettings(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Image processor settings in a checkpoint.

    Attributes:
        image_token: Placeholder token id. Every embedding has a placeholder.
        marker: Text of an image in the chat template's result.
        expansion: Replaces a marker before tokenization. It has a single placeholder.
        side: Image side in pixels.
        patch_size: Patch side in pixels.
        tokens_per_side: Embeddings per side.
        mean: Channel means, from 0 to 1.
        std: Channel standard deviations.
    """

    image_token: int
    marker: str
    expansion: str
    side: int
    patch_size: int
    tokens_per_side: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    def prepare(self, picture: Picture) -> PreparedImage:
        """Resize a picture. ``detail`` has no effect: all images have the same size."""
        import PIL.Image

        size = self.side, self.side
        pixels = picture.image.resize(size, PIL.Image.Resampling.BILINEAR).tobytes()
        count, digest = self.tokens_per_side, digest_of(*size, pixels)
        return PreparedImage(*size, count, count, digest, pixels, is_bidirectional=True)


AnyProcessor = ImageProcessor | TileSettings | SquareSettings


def expand_markers(text: str, processor: AnyProcessor | None) -> str:
    """Return a chat's text with placeholders for its images."""
    if not isinstance(processor, SquareSettings):
        return text
    return text.replace(processor.marker, processor.expansion)
