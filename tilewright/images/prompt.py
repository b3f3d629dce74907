"""Images in a prompt's token ids: placeholders, rotary positions, and tokens for caches."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from tilewright.images.decode import ImageError
from tilewright.images.processor import PreparedImage


class PromptImage(msgspec.Struct, frozen=True):
    """An image and its first token's index in the prompt."""

    first: int
    image: PreparedImage

    @property
    def end(self) -> int:
        """Return the index after the last token."""
        return self.first + self.image.num_tokens


def insert_images(
    tokens: Sequence[int], images: Sequence[PreparedImage], image_token: int
) -> tuple[tuple[int, ...], tuple[PromptImage, ...]]:
    """Return token ids with a placeholder per embedding, and the placed images.

    Raises:
        ImageError: The prompt has another number of placeholders than images.
    """
    count = sum(token == image_token for token in tokens)
    if count != len(images):
        raise ImageError(
            f"the prompt has {count} image placeholders (token {image_token}); allowed: "
            f"{len(images)}, as many as images"
        )
    result: list[int] = []
    placed: list[PromptImage] = []
    for token in tokens:
        if token != image_token:
            result.append(token)
            continue
        image = images[len(placed)]
        placed.append(PromptImage(len(result), image))
        result += [image_token] * image.num_tokens
    return tuple(result), tuple(placed)


def rotary_positions(images: Sequence[PromptImage]) -> tuple[np.ndarray, int]:
    """Return rotary positions (time, height, width), int64 ``[3, end]``, and a difference.

    The positions end with the last image. For a later token, the position is its index plus the
    difference.
    """
    end = images[-1].end if images else 0
    result = np.empty((3, end), np.int64)
    index = position = 0
    for placed in images:
        result[:, index : placed.first] = position + np.arange(placed.first - index)
        position += placed.first - index
        rows, columns = placed.image.rows, placed.image.columns
        result[0, placed.first : placed.end] = position
        result[1:, placed.first : placed.end] = position + np.indices((rows, columns)).reshape(
            2, -1
        )
        position += max(rows, columns)
        index = placed.end
    return result, position - index


def cache_tokens(prompt: tuple[int, ...], images: Sequence[PromptImage]) -> tuple[int, ...]:
    """Return a prompt for cache comparison: placeholders contain the image's digest.

    A number above 32 bits has the token in its low 32 bits and the digest above them.
    """
    result = list(prompt)
    for placed in images:
        marked = int.from_bytes(placed.image.digest, "little") << 32 | prompt[placed.first]
        result[placed.first : placed.end] = [marked] * placed.image.num_tokens
    return tuple(result)
