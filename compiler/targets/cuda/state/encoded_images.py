"""Encoded images on the device: embeddings, or keys and values of tiles for cross-attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.attention.cross_attention import TILE_UNIT, ImageTiles
from tilewright.compiler.targets.cuda.state.slot_table import send
from tilewright.compiler.targets.cuda.state.token_batch import TokenBatch
from tilewright.compiler.targets.host.batch import images_by_token, visible_ends
from tilewright.compiler.targets.interface.step import EncodeImage, ImageId, PrefillChunk

if TYPE_CHECKING:
    from tilewright.compiler.targets.image_encoder import AnyEncoder


def has_offsets(chunk: PrefillChunk, rotary_delta: int) -> bool:
    """Return whether a chunk has images, or rotary positions that differ from its positions."""
    return bool(chunk.images or chunk.rotary or rotary_delta)


class EncodedImages:
    """Values by image. Dropped values stay valid for launched steps: all work is on one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._values: dict[ImageId, Tensor] = {}
        self._tile_keys = 0
        self._anchor = torch.empty(0, device=device)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all values."""
        return sum(values.nbytes for values in self._values.values())

    def add(self, image: ImageId, values: Tensor, tile_keys: int = 0) -> None:
        """Store an image's values. ``tile_keys``: Keys per tile. 0: the values are embeddings."""
        is_view = values.untyped_storage().nbytes() > values.nbytes  # of padded tiles
        self._values[image] = values.clone() if is_view else values.contiguous()
        if self._anchor.dtype != values.dtype or not len(self._anchor):
            self._anchor = torch.empty(16, dtype=values.dtype, device=self._device)
        self._tile_keys = tile_keys

    def encode(self, image: EncodeImage, encoder: AnyEncoder, *, value_bytes: int) -> None:
        """Store an image's encoded values: bfloat16 if ``value_bytes`` is 2, else float32."""
        values = encoder.encode_tensor(image.height, image.width, image.pixels).to(self._device)
        values = values.bfloat16() if value_bytes == 2 else values
        self.add(image.image, values, encoder.tile_keys)

    def drop(self, image: ImageId) -> None:
        """Discard an image's values."""
        del self._values[image]

    def clear(self) -> None:
        """Discard all values."""
        self._values.clear()

    def words_of(
        self, images: Sequence[tuple[ImageId, ...]], num_tokens: int
    ) -> npt.NDArray[np.int64]:
        """Return the input of :meth:`of_words` for ``num_tokens`` decode tokens, flat.

        Tokens after ``images`` see no tile.
        """
        tiles = [[at for image in own for at in self._tiles(image)] for own in images]
        width = -(-max(map(len, tiles)) // TILE_UNIT) * TILE_UNIT
        words = np.zeros(num_tokens * (2 + width), np.int64)
        visible = words[: 2 * num_tokens].reshape(num_tokens, 2)
        offsets = words[2 * num_tokens :].reshape(num_tokens, width)
        for token, own in enumerate(tiles):
            visible[token, 1], offsets[token, : len(own)] = len(own), own
        return words

    def of_words(self, words: Tensor, num_tokens: int) -> ImageTiles:
        """Return the tiles of decode tokens: all ranges, then all offsets."""
        visible, offsets = words[: 2 * num_tokens], words[2 * num_tokens :]
        return self._with(offsets.view(num_tokens, -1), visible.view(num_tokens, 2))

    def of_chunk(self, chunk: PrefillChunk) -> ImageTiles:
        """Return the tiles of a chunk's tokens."""
        firsts: dict[tuple[ImageId, ...], tuple[int, int]] = {(): (0, 0)}
        tiles: list[int] = []
        seen = images_by_token(chunk)
        for images in sorted(set(seen) - {()}, key=len, reverse=True):
            longer = next((key for key in firsts if key[: len(images)] == images), None)
            own = [at for image in images for at in self._tiles(image)]
            first = len(tiles) if longer is None else firsts[longer][0]
            tiles += own if longer is None else []
            firsts[images] = first, first + len(own)
        visible = np.array([firsts[images] for images in seen], np.int64)
        offsets = send(np.array([tiles], np.int64), self._device)
        return self._with(offsets, send(visible, self._device))

    def add_to_rows(
        self,
        rows: TokenBatch,
        chunk: PrefillChunk,
        encoder: AnyEncoder | None,
        *,
        rotary_delta: int,
    ) -> TokenBatch:
        """Add a chunk's image embeddings, rotary offsets and visible tiles to its rows.

        Args:
            encoder: Vision tower. Required for chunks with rotary positions.
            rotary_delta: Rotary position minus position, for chunks without rotary positions.
        """
        if chunk.visible:
            rows = replace(rows, tiles=self.of_chunk(chunk))
        if not has_offsets(chunk, rotary_delta):
            return rows
        if chunk.rotary:
            assert encoder is not None, "there is no tower"
            axes = np.array(chunk.rotary).reshape(3, len(chunk.tokens))
            positions = np.arange(chunk.start, chunk.end)
            offsets = send(encoder.by_pair(axes - positions), self._device)
        else:
            shape = (len(chunk.tokens),)
            offsets = torch.full(shape, rotary_delta, dtype=torch.int64, device=self._device)
        if (ends := visible_ends(chunk)) is not None:
            rows = replace(rows, ends=send(ends, self._device))
        image_rows = self._embeddings_of(chunk) if chunk.images else None
        return replace(rows, offsets=offsets, image_rows=image_rows)

    def _embeddings_of(self, chunk: PrefillChunk) -> tuple[Tensor, Tensor]:
        """Return the indices of a chunk's image tokens, and their embeddings."""
        indices = [np.arange(run.offset, run.offset + run.count) for run in chunk.images]
        values = [self._values[run.image][run.first :][: run.count] for run in chunk.images]
        return send(np.concatenate(indices), self._device), torch.cat(values)

    def _with(self, offsets: Tensor, visible: Tensor) -> ImageTiles:
        width = next(iter(self._values.values())).shape[1]
        return ImageTiles(self._anchor, offsets, visible, self._tile_keys, width)

    def _tiles(self, image: ImageId) -> range:
        """Return the first element per tile, from the anchor."""
        values = self._values[image]
        first = (values.data_ptr() - self._anchor.data_ptr()) // values.element_size()
        return range(first, first + values.numel(), self._tile_keys * values.shape[1])
