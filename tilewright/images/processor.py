"""Image processor for Qwen vision towers: size in whole blocks, bicubic resizing."""

from __future__ import annotations

import hashlib
import math
from typing import TYPE_CHECKING

import msgspec

from tilewright.images.decode import ImageError
from tilewright.images.parts import Picture

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_ASPECT = 200
LOW_PIXELS = 512 * 512
"""Maximum area with ``detail: low``."""
_BICUBIC = 3
_DIGEST_BYTES = 16


class PreparedImage(msgspec.Struct, frozen=True):
    """A resized image.

    Attributes:
        height: Height in pixels.
        width: Width in pixels.
        rows: Embedding rows in the prompt.
        columns: Embedding columns in the prompt.
        digest: Hash over size and pixels.
        pixels: RGB bytes, in scan order.
        num_rows: Rows for cross-attention. 0: the prompt's tokens have the image's embeddings.
        is_bidirectional: Each token attends to all tokens of the image.
    """

    height: int
    width: int
    rows: int
    columns: int
    digest: bytes
    pixels: bytes
    num_rows: int = 0
    is_bidirectional: bool = False

    @property
    def changes_rotation(self) -> bool:
        """Return whether rotary positions differ from positions."""
        return not self.num_rows and not self.is_bidirectional

    @property
    def num_tokens(self) -> int:
        """Return the prompt token count."""
        return self.rows * self.columns


class ImageProcessor(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Image processor settings in a checkpoint.

    Attributes:
        image_token: Placeholder token id. The prompt has as many as embeddings.
        patch_size: Patch side in pixels.
        merge_size: Block side in patches. A block has a single embedding.
        min_pixels: Minimum area after resizing.
        max_pixels: Maximum area after resizing.
        mean: Channel means, from 0 to 1.
        std: Channel standard deviations.
    """

    image_token: int
    patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]

    @property
    def block_size(self) -> int:
        """Return the block side in pixels."""
        return self.patch_size * self.merge_size

    def prepare(self, picture: Picture) -> PreparedImage:
        """Resize a picture.

        Raises:
            ImageError: Its sides differ too much.
        """
        max_pixels = self.max_pixels
        if picture.detail == "low":
            max_pixels = max(self.min_pixels, min(max_pixels, LOW_PIXELS))
        width, height = picture.image.size
        if max(width, height) > MAX_ASPECT * min(width, height):
            raise ImageError(
                f"{picture.where}: {width} x {height} pixels; allowed: an aspect ratio up to "
                f"{MAX_ASPECT}"
            )
        size = fit(
            height, width, block=self.block_size, min_pixels=self.min_pixels, max_pixels=max_pixels
        )
        return self._resized(picture.image, *size)

    def _resized(self, image: Image, height: int, width: int) -> PreparedImage:
        pixels = image.resize((width, height), _BICUBIC).tobytes()
        digest = digest_of(height, width, pixels)
        block = self.block_size
        return PreparedImage(height, width, height // block, width // block, digest, pixels)


def digest_of(height: int, width: int, pixels: bytes) -> bytes:
    """Return a hash over an image's size and pixels."""
    digest = hashlib.blake2b(b"%dx%d:" % (height, width), digest_size=_DIGEST_BYTES)
    digest.update(pixels)
    return digest.digest()


def fit(
    height: int, width: int, *, block: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return height and width in whole blocks, with an area in the limits and a similar aspect."""
    new_height, new_width = round(height / block) * block, round(width / block) * block
    if new_height * new_width > max_pixels:
        scale = math.sqrt(height * width / max_pixels)
        new_height = max(block, math.floor(height / scale / block) * block)
        new_width = max(block, math.floor(width / scale / block) * block)
    elif new_height * new_width < min_pixels:
        scale = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * scale / block) * block
        new_width = math.ceil(width * scale / block) * block
    return new_height, new_width
