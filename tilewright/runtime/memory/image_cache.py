"""Encoded images by digest: numbers, sizes and eviction. The executable has their rows.

Rows are embeddings, or keys and values for cross-attention. Running requests hold the latter.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tilewright.compiler.targets.interface.step import (
    DropImage,
    EncodeImage,
    ImageId,
    ImageRows,
    StateUpdate,
    VisibleImages,
)
from tilewright.compiler.targets.tile_encoder import CROSS_CACHE_BYTES, IMAGE_CACHE_BYTES
from tilewright.errors import RequestError
from tilewright.images.processor import PreparedImage
from tilewright.images.prompt import PromptImage
from tilewright.images.visible import visible_images


class ImageCache:
    """An executable's encoded images, in order of last use.

    An image for the step in preparation is never evicted. An evicted image is encoded again.

    Attributes:
        num_images: Requested image count.
        num_hits: Count of images with rows from an earlier request.
        max_bytes: Maximum bytes for rows.
    """

    def __init__(self, hidden_size: int, *, cross_key_bytes: int = 0) -> None:
        """``cross_key_bytes``: Bytes of a key and value for cross-attention. 0: embeddings."""
        self._rows_bytes = cross_key_bytes or 4 * hidden_size
        self.max_bytes = CROSS_CACHE_BYTES if cross_key_bytes else IMAGE_CACHE_BYTES
        self._images: OrderedDict[bytes, tuple[ImageId, int]] = OrderedDict()
        self._in_step: set[bytes] = set()
        self._num_bytes = self._number = 0
        self.num_images = self.num_hits = 0

    def check(self, images: Sequence[PromptImage]) -> None:
        """Refuse a request whose images for cross-attention never fit.

        Raises:
            RequestError: They are too large together.
        """
        num_bytes = sum(self._bytes_by_digest((images,)).values())
        if num_bytes > self.max_bytes:
            raise RequestError(
                f"images: {num_bytes} bytes of keys and values; allowed: up to {self.max_bytes}, "
                "so fewer or smaller images"
            )

    def fits(self, images: Sequence[PromptImage], running: Iterable[Sequence[PromptImage]]) -> bool:
        """Return whether a request's images fit, with the running requests' images."""
        if not any(placed.image.num_rows for placed in images):
            return True
        return sum(self._bytes_by_digest((images, *running)).values()) <= self.max_bytes

    def _bytes_by_digest(self, requests: Iterable[Sequence[PromptImage]]) -> dict[bytes, int]:
        """Return the bytes for all cross-attention images, by digest."""
        images = (placed.image for images in requests for placed in images)
        return {image.digest: self._size_of(image) for image in images if image.num_rows}

    def _size_of(self, image: PreparedImage) -> int:
        return self._rows_bytes * (image.num_rows or image.num_tokens)

    def count(self, images: Sequence[PromptImage]) -> None:
        """Count a new request's images."""
        self.num_images += len(images)
        self.num_hits += sum(placed.image.digest in self._images for placed in images)

    def rows(
        self, images: Sequence[PromptImage], start: int, end: int, edits: list[StateUpdate]
    ) -> tuple[ImageRows, ...]:
        """Return the tokens with embeddings from ``start`` to ``end``. Add updates to ``edits``."""
        result = []
        for placed in images:
            first, last = max(placed.first, start), min(placed.end, end)
            if first < last and not placed.image.num_rows:
                image = self._take(placed, edits)
                rows = ImageRows(first - start, image, first - placed.first, last - first)
                result.append(replace(rows, is_bidirectional=placed.image.is_bidirectional))
        return tuple(result)

    def visible(
        self, images: Sequence[PromptImage], start: int, end: int, edits: list[StateUpdate]
    ) -> tuple[VisibleImages, ...]:
        """Return the images for cross-attention from ``start`` to ``end``. Add updates to
        ``edits``.
        """
        if not any(placed.image.num_rows for placed in images):
            return ()
        spans = [s for s in visible_images(placed.first for placed in images) if s.start < end]
        first = max((at for at, span in enumerate(spans) if span.start <= start), default=0)
        return tuple(
            VisibleImages(
                max(0, span.start - start),
                tuple(self._take(images[at], edits) for at in range(span.first, span.end)),
            )
            for span in spans[first:]
        )

    def end_step(self, edits: list[StateUpdate], running: Iterable[Sequence[PromptImage]]) -> None:
        """Evict images above the limit, after all chunks in a step. ``running``: images in use."""
        if self._num_bytes > self.max_bytes:
            dropped = list[StateUpdate]()
            kept = self._in_step | self._bytes_by_digest(running).keys()
            for digest in [name for name in self._images if name not in kept]:
                if self._num_bytes <= self.max_bytes:
                    break
                image, num_bytes = self._images.pop(digest)
                self._num_bytes -= num_bytes
                dropped.append(DropImage(image))
            edits[:0] = dropped  # free their memory before new images take it
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
        num_bytes = self._size_of(image)
        self._images[image.digest] = number, num_bytes
        self._num_bytes += num_bytes
        return number
