"""The rows of a forward on a host executable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tilewright.compiler.targets.interface.step import ImageId, PrefillChunk, Slot, Step


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens from N slots, flat and in slot order: the input for a forward.

    Attributes:
        tokens: int64 ``[T]``.
        positions: int64 ``[T]``, consecutive within a slot.
        cu_seqlens: ``[N + 1]``, splits the tokens by slot.
        logit_rows: ``[R]``, token indices for logits, ascending.
        slots: The slots.
        decodes: A token per slot and its drafts, with decode kernels. False: a prefill chunk of a
            single slot.
        image_tokens: ``[K]``, indices of tokens with image embeddings. None: none.
        embeddings: Their embeddings, float32 ``[K, hidden]``.
        rotary: Rotary position per token and pair, int64 ``[T, pairs]``. None: as
            ``positions``.
        cross_rows: Cross-attention keys and values per image, float32 ``[rows, width]``.
        visible: First visible image and end per token, int64 ``[T, 2]``. None: no images.
        ends: Position after the last visible position per token, int64 ``[T]``. None: causal.
        hidden: A draft layer's input, float32 ``[T, hidden]``. None: another model.
    """

    tokens: np.ndarray
    positions: np.ndarray
    cu_seqlens: np.ndarray
    logit_rows: np.ndarray
    slots: tuple[Slot, ...]
    decodes: bool
    image_tokens: np.ndarray | None = None
    embeddings: np.ndarray | None = None
    rotary: np.ndarray | None = None
    cross_rows: tuple[np.ndarray, ...] = ()
    visible: np.ndarray | None = None
    ends: np.ndarray | None = None
    hidden: np.ndarray | None = None

    @property
    def has_images(self) -> bool:
        """Return whether the forward differs from a text forward."""
        return self.image_tokens is not None or self.rotary is not None


def decode_batch(step: Step, tokens: Sequence[int | None], lengths: Sequence[int]) -> Batch:
    """Return a step's rows: a token per slot, and its drafts."""
    if not step.drafts:
        count = np.arange(len(tokens) + 1)
        return Batch(np.array(tokens), np.array(lengths), count, count[:-1], step.decode, True)
    lines = [(t, *step.drafts.get(slot, ())) for slot, t in zip(step.decode, tokens, strict=True)]
    bounds = np.cumsum([0, *map(len, lines)])
    positions = [np.arange(at, at + len(line)) for at, line in zip(lengths, lines, strict=True)]
    flat = np.concatenate([np.array(line) for line in lines])
    return Batch(flat, np.concatenate(positions), bounds, np.arange(len(flat)), step.decode, True)


def visible_ends(chunk: PrefillChunk) -> np.ndarray | None:
    """Return the position after the last visible position per token, int64. None: causal."""
    ends = np.arange(chunk.start, chunk.end) + 1
    runs = [run for run in chunk.images if run.is_bidirectional]
    for run in runs:
        assert not run.first, "a cut image"
        ends[run.offset : run.offset + run.count] = chunk.start + run.offset + run.count
    return ends if runs else None


def images_by_token(chunk: PrefillChunk) -> list[tuple[ImageId, ...]]:
    """Return the visible images per token in a chunk."""
    seen: list[tuple[ImageId, ...]] = [()] * len(chunk.tokens)
    for visible in chunk.visible:
        seen[visible.offset :] = [visible.images] * (len(chunk.tokens) - visible.offset)
    return seen
