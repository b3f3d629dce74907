"""Encoded images by digest: numbers, sizes and eviction. The executable owns the embeddings."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from tilewright.compiler.targets.interface.step import (
    DropImage,
    EncodeImage,
    ImageId,
    ImageRows,
    StateUpdate,
)
from tilewright.images.prompt import PromptImage

IMAGE_CACHE_BYTES = 1 << 30
"""Maximum size of all embeddings."""


class ImageCache:
    """The encoded images of an executable, in order of last use.

    An image of the step in preparation is never evicted. An evicted image is encoded again.

    Attributes:
        num_images: Number of requested images.
        num_hits: Number of images with embeddings from an earlier request.
    """

    def __init__(self, hidden_size: int, max_bytes: int = IMAGE_CACHE_BYTES) -> None:
        self._rows_bytes, self._max_bytes = 4 * hidden_size, max_bytes
        self._images: OrderedDict[bytes, tuple[ImageId, int]] = OrderedDict()
        self._in_step: set[bytes] = set()
        self._num_bytes = self._number = 0
        self.num_images = self.num_hits = 0

    def count(self, images: Sequence[PromptImage]) -> None:
        """Count the images of a new request."""
        self.num_images += len(images)
        self.num_hits += sum(placed.image.digest in self._images for placed in images)

    def rows(
        self, images: Sequence[PromptImage], start: int, end: int, edits: list[StateUpdate]
    ) -> tuple[ImageRows, ...]:
        """Return the image tokens from ``start`` to ``end``. Add updates to ``edits``."""
        result = []
        for placed in images:
            first, last = max(placed.first, start), min(placed.end, end)
            if first < last:
                image = self._take(placed, edits)
                result.append(ImageRows(first - start, image, first - placed.first, last - first))
        return tuple(result)

    def end_step(self, edits: list[StateUpdate]) -> None:
        """Evict images above the limit, after all chunks of a step."""
        for digest in list(self._images):
            if self._num_bytes <= self._max_bytes:
                break
            if digest not in self._in_step:
                image, num_bytes = self._images.pop(digest)
                self._num_bytes -= num_bytes
                edits.append(DropImage(image))
        self._in_step.clear()

    def forget(self) -> None:
        """Forget all images, because the executable was reset."""
        self._images.clear()
        self._in_step.clear()
        self._num_bytes = 0

    def _take(self, placed: PromptImage, edits: list[StateUpdate]) -> ImageId:
        image = placed.image
        self._in_step.add(image.digest)
        if image.digest in self._images:
            self._images.move_to_end(image.digest)
            return self._images[image.digest][0]
        self._number += 1
        number = ImageId(self._number)
        edits.append(EncodeImage(number, image.height, image.width, image.pixels))
        num_bytes = image.num_tokens * self._rows_bytes
        self._images[image.digest] = number, num_bytes
        self._num_bytes += num_bytes
        return number
