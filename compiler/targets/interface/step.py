"""An executable's steps: plain host data, equal on every target and every rank.

A step lists the slots to decode, the prefill chunks, and changes of device tables before them. It
has no tensors, closures or device handles, so a scheduler needs no device, and a step can be sent
to another process. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, NewType, TypeAlias

from tilewright.compiler.sampling.params import SamplingParams

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Slot = NewType("Slot", int)
"""Index of a running sequence in an executable's tables, from 0 to ``max_num_seqs - 1``."""

StateSnapshot = NewType("StateSnapshot", int)
"""Number of a snapshot, chosen by the runtime. A snapshot has per-sequence state at a position."""

SwapHandle = NewType("SwapHandle", int)
"""Number of a host buffer for the whole state of a preempted sequence."""

ImageId = NewType("ImageId", int)
"""Encoded image number, chosen by the runtime."""

GOES_ON, END_TOKEN, NOT_A_NUMBER = 0, 1, 2
"""Values of :attr:`SampledTokens.why`."""


@dataclass(frozen=True, slots=True)
class OpenSlot:
    """Open a slot for a new sequence. The slot is free or retains a prefix.

    Attributes:
        slot: The slot.
        sampling: Sampling parameters.
        prompt: Tokens before the output. Penalties use them, and ``min_tokens`` counts after them.
        keeps: Computed position count to reuse. 0: start empty. Contiguous state: the slot
            retains them. Pages: the pages assigned in this step contain them.
        rotary_delta: Rotary position minus index, after the last image. 0: no images.
    """

    slot: Slot
    sampling: SamplingParams
    prompt: tuple[int, ...] = ()
    keeps: int = 0
    rotary_delta: int = 0


@dataclass(frozen=True, slots=True)
class CloseSlot:
    """Free a slot. The same step may open the slot again."""

    slot: Slot


@dataclass(frozen=True, slots=True)
class AssignPages:
    """Assign pages to a slot, starting at index ``first`` of its page table."""

    slot: Slot
    first: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SaveState:
    """Copy a slot's per-sequence state from before this step to a snapshot."""

    slot: Slot
    snapshot: StateSnapshot


@dataclass(frozen=True, slots=True)
class LoadState:
    """Copy a snapshot's per-sequence state to a slot. The slot's position becomes the
    snapshot's.
    """

    slot: Slot
    snapshot: StateSnapshot


@dataclass(frozen=True, slots=True)
class CopyState:
    """Copy a slot's first positions to another slot. The target is open and empty.

    Per-sequence state is copied whole. Therefore ``num_positions`` is the source's length, or a
    :class:`LoadState` follows. With pages, only positions after the last whole page are copied:
    :class:`AssignPages` shares whole pages.
    """

    source: Slot
    target: Slot
    num_positions: int


@dataclass(frozen=True, slots=True)
class SwapOut:
    """Copy a slot's whole state to host memory, before other sequences take its pages."""

    slot: Slot
    place: SwapHandle


@dataclass(frozen=True, slots=True)
class SwapIn:
    """Copy the state of :class:`SwapOut` back to a slot. The slot and its pages must be assigned
    before.
    """

    slot: Slot
    place: SwapHandle


@dataclass(frozen=True, slots=True)
class DropSwapped:
    """Free the host copy of :class:`SwapOut`, because its sequence has finished."""

    place: SwapHandle


@dataclass(frozen=True, slots=True)
class EncodeImage:
    """Compute an image's embeddings, for chunks in this step and in later steps.

    Attributes:
        image: New image number.
        height: Height in pixels.
        width: Width in pixels.
        pixels: RGB bytes, row by row.
    """

    image: ImageId
    height: int
    width: int
    pixels: bytes


@dataclass(frozen=True, slots=True)
class DropImage:
    """Free embeddings from :class:`EncodeImage`."""

    image: ImageId


StateUpdate: TypeAlias = (
    OpenSlot
    | CloseSlot
    | AssignPages
    | SaveState
    | LoadState
    | CopyState
    | SwapOut
    | SwapIn
    | DropSwapped
    | EncodeImage
    | DropImage
)


@dataclass(frozen=True, slots=True)
class ImageRows:
    """Tokens in a chunk with an image's embeddings.

    Attributes:
        offset: First token's index in the chunk.
        image: Image number.
        first: First token's index in the image's embeddings.
        count: Token count.
        is_bidirectional: Each token attends to all tokens of the image. A chunk has all of them.
    """

    offset: int
    image: ImageId
    first: int
    count: int
    is_bidirectional: bool = False


@dataclass(frozen=True, slots=True)
class VisibleImages:
    """Images with cross-attention from a token on.

    Attributes:
        offset: First token's index in the chunk.
        images: Image numbers, in prompt order. A list in a chunk continues or replaces its
            predecessor.
    """

    offset: int
    images: tuple[ImageId, ...]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive prompt tokens for prefill.

    Attributes:
        slot: The slot.
        start: The first token's position. Later positions in the slot are discarded.
        tokens: The tokens.
        chooses: Sample the next token after the chunk. The slot reads it in the next decode step.
        saves: Pairs: a position after any of these tokens, and the snapshot for the state there.
        echoes: Return logits for all tokens instead of the last only, and the log probabilities of
            all tokens after the first.
        also: Empty open slots for further samples of the same prompt (only if ``chooses``). Each
            gets a copy of the state and its own sampled token. With pages, only positions after the
            last whole page are copied.
        next_token: The prompt token after an echoing chunk, for its log probability. None at the
            end of the prompt.
        pools: Return final hidden states as `Pooled`. The chunk then neither samples nor echoes.
        decodes: Use the arithmetic of decode steps with one token. The chunk echoes and does
            not sample. See `Capabilities.has_decode_chunks`.
        images: Tokens with image embeddings.
        visible: Images with cross-attention, ascending. Earlier tokens see no image. Decoded tokens
            see the last images.
        rotary: Rotary positions: all times, then all heights, then all widths. Empty: the
            index plus the slot's `OpenSlot.rotary_delta`.
    """

    slot: Slot
    start: int
    tokens: tuple[int, ...]
    chooses: bool = False
    saves: tuple[tuple[int, StateSnapshot], ...] = ()
    echoes: bool = False
    also: tuple[Slot, ...] = ()
    next_token: int | None = None
    pools: bool = False
    decodes: bool = False
    images: tuple[ImageRows, ...] = ()
    visible: tuple[VisibleImages, ...] = ()
    rotary: tuple[int, ...] = ()

    @property
    def echoed(self) -> tuple[int, ...]:
        """Return the tokens with log probabilities in an echoing chunk."""
        return self.tokens[1:] + (() if self.next_token is None else (self.next_token,))

    @property
    def end(self) -> int:
        """Return the position after the last token."""
        return self.start + len(self.tokens)

    def slice(self, start: int, end: int) -> PrefillChunk:
        """Return the tokens from ``start`` to ``end`` with their images. All else is equal."""
        first, last, count = start - self.start, end - self.start, len(self.tokens)
        images = []
        for rows in self.images:
            low, high = max(rows.offset, first), min(rows.offset + rows.count, last)
            if low < high:
                at = rows.first + low - rows.offset
                images.append(replace(rows, offset=low - first, first=at, count=high - low))
        seen = [v for v in self.visible if v.offset < last]
        begin = max((at for at, v in enumerate(seen) if v.offset <= first), default=0)
        visible = (VisibleImages(max(0, v.offset - first), v.images) for v in seen[begin:])
        axes = (self.rotary[axis * count :][first:last] for axis in range(3))
        return replace(
            self,
            start=start,
            tokens=self.tokens[first:last],
            images=tuple(images),
            visible=tuple(visible),
            rotary=tuple(chain.from_iterable(axes)) if self.rotary else (),
        )


@dataclass(frozen=True, slots=True)
class Step:
    """The work of a step. ``edits`` run first, in order. A slot occurs at most once in the step's
    work.

    Speculative decoding: a slot at position P with drafts ``d1 .. dk`` has k + 1 decode rows. It
    reads its token at P and draft ``dj`` at P + j. All rows use decode arithmetic
    and attend to the earlier rows. They sample as in a step without drafts: parameters and seed of
    the slot, the own position, and the token counts after the earlier drafts. Hence the output does
    not depend on the drafts, at any temperature.
    The accepted draft count, a, is the length of the longest prefix with ``dj`` equal to the
    sample at P + j - 1. The slot emits the samples of rows 0 to a and advances by a + 1 positions.
    It reads the last emitted token next. Later rows have no effect: a later step overwrites their
    positions before it reads them. End tokens do not shorten the prefix.

    Attributes:
        decode: Slots that decode a token each, or a + 1 tokens with drafts. While the set of slots
            does not change, this is the same tuple object: executables compare identity.
        prompts: Prefill chunks.
        edits: State updates.
        forced: Tokens to read instead of the sampled tokens, by slot.
        drafts: Draft tokens to verify, by slot of ``decode``: 1 to `Capabilities.max_drafts` ids of
            the vocabulary. The positions fit the context and the slot's pages. These slots are not
            in ``forced`` and have neither a token mask nor penalties.
        proposes: Maximum token count to draft after the step's work, by slot with a next
            token. They are the last output, 0 to this number per slot.
        masked: Delay sampling until :meth:`Executable.choose` with the token masks. Slots with
            drafts do not wait.
        logprobs: Top log probability count per sampled token, in addition to the sampled
            token's. None: no log probabilities.
        want_logits: Return logits. Not in a step with drafts.
    """

    decode: tuple[Slot, ...] = ()
    prompts: tuple[PrefillChunk, ...] = ()
    edits: tuple[StateUpdate, ...] = ()
    forced: Mapping[Slot, int] = field(default_factory=dict)
    drafts: Mapping[Slot, tuple[int, ...]] = field(default_factory=dict)
    proposes: Mapping[Slot, int] = field(default_factory=dict)
    masked: bool = False
    logprobs: int | None = None
    want_logits: bool = False


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Natural log probabilities for a sampled token, from unmodified logits.

    Attributes:
        chosen: Log probability of the sampled token.
        top: The most probable tokens with their log probabilities, descending. Ties are in token
            order.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Pooled:
    """Final hidden states of a chunk: the output layer's normalized input.

    Attributes:
        count: Token count.
        total: Sum over the tokens, float32 ``[hidden]``.
        last: The last token's state, float32 ``[hidden]``.
    """

    count: int
    total: np.ndarray
    last: np.ndarray


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """Sampled tokens for a part of a step, in slot order.

    Attributes:
        tokens: Sampled tokens. With drafts, each slot's emitted tokens in turn.
        why: ``GOES_ON``, ``END_TOKEN`` for an end token of the slot, or ``NOT_A_NUMBER`` if the
            logits are NaN. In this case the token is meaningless.
        logprobs: Log probabilities of the sampled tokens. None: not requested.
        echo: Log probabilities of an echoing chunk's tokens.
        pooled: Hidden states of a pooling chunk.
        counts: Emitted token count per slot, 1 to k + 1. ``tokens``, ``why`` and ``logprobs``
            have their sum as length. None: a token per slot.
    """

    tokens: Sequence[int]
    why: Sequence[int]
    logprobs: Sequence[LogProbs] | None = None
    echo: Sequence[LogProbs] | None = None
    pooled: Pooled | None = None
    counts: Sequence[int] | None = None


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """Results of a step that are available at the same time: decode rows, or ends of prompts.

    An echoing or pooling chunk is a separate part. It has no slots if it does not sample.

    Attributes:
        slots: Slots with a sampled token, in the step's order.
        read: Waits for this part and returns it. It may be called repeatedly, and while up to two
            later steps are in flight.
        logits: Returns float32 ``[rows, vocabulary]`` on the host, valid until the next step: a row
            per slot, or per token of an echoing chunk. None: not requested.
    """

    slots: tuple[Slot, ...]
    read: Callable[[], SampledTokens]
    logits: Callable[[], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The sampling parts of a step: decode rows first, then ends of prompts.

    Attributes:
        parts: The parts.
        is_mixed: A single forward computed decode rows and prefill chunks. They are a single part,
            and reading it waits for the whole step.
    """

    parts: tuple[SamplerOutput, ...] = ()
    is_mixed: bool = False
