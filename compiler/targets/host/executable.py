"""Base class for executables with host-side slot state and a single forward per batch.

A target implements ``forward`` and access to slot state. This class implements state updates, token
feedback and sampling. Values are numpy arrays. torch is imported only to return logits.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tilewright.compiler.targets.host.batch import (
    Batch,
    decode_batch,
    images_by_token,
    visible_ends,
)
from tilewright.compiler.targets.host.choice import HostChoice, SlotState, log_probs
from tilewright.compiler.targets.host.draft_layer import DraftLayer
from tilewright.compiler.targets.host.draft_outputs import divide, join, output_at
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.capabilities import MAX_DRAFTS
from tilewright.compiler.targets.interface.step import (
    GOES_ON,
    CloseSlot,
    CopyState,
    DropImage,
    EncodeImage,
    ImageId,
    LoadState,
    LogProbs,
    OpenSlot,
    Pooled,
    PrefillChunk,
    SampledTokens,
    SamplerOutput,
    SaveState,
    Slot,
    StateSnapshot,
    StateUpdate,
    Step,
    StepOutput,
)
from tilewright.compiler.targets.interface.token_masks import NO_MASK, TokenMask

if TYPE_CHECKING:
    from torch import Tensor

_NOTHING = SamplerOutput((), lambda: SampledTokens((), ()))
"""A follower's result."""


class HostExecutable(Executable):
    """An executable that runs steps synchronously, with rows in step order.

    If a forward raises, no slot advances. Later steps overwrite data after a slot's length. With
    several ranks, only rank 0 samples. It sends input tokens to the followers, and ``follows`` is
    true on them.
    """

    follows = False
    verifies_in_turn = False
    """Verify a draft per slot in a forward. True for state without truncation."""
    keeps_hidden = False
    """Whether `forward` stores ``last_hidden``, float32 ``[T, hidden]``: normalized hidden states
    of all tokens.
    """
    last_hidden: np.ndarray
    draft_layer: DraftLayer | None = None

    def __init__(self) -> None:
        self._slot_states: dict[Slot, SlotState] = {}
        self._waiting: list[HostChoice] = []
        self._verified: Batch | None = None
        self._counts = b""
        self._images: dict[ImageId, np.ndarray] = {}

    @abstractmethod
    def forward(self, batch: Batch) -> np.ndarray:
        """Run a batch and return the requested logits, float32 ``[R, vocabulary]``.

        The next forward may overwrite the result. Afterwards slot states contain the batch's
        tokens.
        """

    def forward_drafts(self, batch: Batch) -> np.ndarray:
        """Run decode rows with drafts, as :meth:`forward`. :meth:`roll_back` may follow."""
        return self.forward(batch)

    def roll_back(self, slot: Slot, last: int) -> None:
        """Discard a slot's per-sequence state after token ``last`` of :meth:`forward_drafts`."""

    def hidden(self, batch: Batch) -> np.ndarray:
        """Run a prefill batch and return final hidden states for all tokens, float32 ``[T,
        hidden]``.

        Afterwards slot states contain the tokens, as after `forward`.
        """
        raise AssertionError("this executable gives no hidden states")

    def copy_state(self, source: Slot, target: Slot, num_positions: int) -> None:
        """Copy the first positions of a slot's state to another slot."""
        raise AssertionError("this executable copies no state")

    def clear_state(self, slot: Slot) -> None:
        """Discard a slot's state. Its memory may be freed."""

    def save_state(self, slot: Slot, snapshot: StateSnapshot) -> None:
        """Copy a slot's per-sequence state to a snapshot."""
        raise AssertionError("this executable keeps no snapshots")

    def load_state(self, slot: Slot, snapshot: StateSnapshot) -> int:
        """Copy a snapshot's state to a slot. Return its position."""
        raise AssertionError("this executable keeps no snapshots")

    def length(self, slot: Slot) -> int:
        """Return the position count in an open slot's state."""
        return self._slot_states[slot].length

    def attach(self, layer: HostExecutable) -> None:
        """Use the executable of the model's draft layer for `Step.proposes`."""
        self.draft_layer, self.keeps_hidden = DraftLayer(layer), True
        self.capabilities = replace(self.capabilities, max_proposals=MAX_DRAFTS)

    def agreed(self) -> bytes:
        lengths = {int(slot): state.length for slot, state in self._slot_states.items()}
        return repr(sorted(lengths.items())).encode()

    def reset(self) -> None:
        self._waiting.clear()
        self._images.clear()
        for slot in list(self._slot_states):
            self._apply(CloseSlot(slot))

    def step(self, step: Step) -> StepOutput:
        assert not self._waiting, "the last step is not sampled yet"
        for edit in step.edits:
            self._apply(edit)
        parts = self._run_decode(step) if step.decode else []
        for chunk in step.prompts:
            part = self._run_prompt(chunk, step)
            if part is not None:
                parts.append(part)
        if step.proposes:
            parts.append(self._propose(step.proposes))
        return StepOutput(tuple(parts))

    def _propose(self, counts: Mapping[Slot, int]) -> SamplerOutput:
        assert self.draft_layer is not None, "there is no draft layer"
        tokens = {slot: self._slot_states[slot].token for slot in counts}
        known = {slot: token for slot, token in tokens.items() if token is not None}
        assert len(known) == len(tokens), "a slot without a next token drafts"
        drafts = self.draft_layer.propose(counts, known, self.num_choosable)
        flat = [token for draft in drafts.values() for token in draft]
        sizes = [len(draft) for draft in drafts.values()]
        chosen = SampledTokens(flat, [GOES_ON] * len(flat), counts=sizes)
        return SamplerOutput(tuple(drafts), lambda: chosen)

    def step_for_followers(self, step: Step) -> Step:
        current = {
            slot: self._slot_states[slot].token for slot in step.decode if slot in self._slot_states
        }
        forced = {slot: token for slot, token in current.items() if token is not None}
        return replace(
            step,
            forced={**forced, **step.forced},
            masked=False,
            logprobs=None,
            want_logits=False,
        )

    def follow(self, step: Step) -> None:
        self.follows = True
        self.step(step)

    def _apply(self, edit: StateUpdate) -> None:
        if isinstance(edit, OpenSlot):
            self._open(edit)
        elif isinstance(edit, CloseSlot):
            del self._slot_states[edit.slot]
            self.clear_state(edit.slot)
            if self.draft_layer is not None:
                self.draft_layer.close(edit.slot)
        elif isinstance(edit, CopyState):
            self._copy(edit.source, edit.target, edit.num_positions)
        elif isinstance(edit, SaveState):
            self.save_state(edit.slot, edit.snapshot)
        elif isinstance(edit, LoadState):
            slot_state = self._slot_states[edit.slot]
            position = self.load_state(edit.slot, edit.snapshot)
            assert not slot_state.is_cut or position == slot_state.length, (
                f"{edit} is of {position}"
            )
            slot_state.length, slot_state.is_cut = position, False
        elif isinstance(edit, EncodeImage):
            assert self.encoder is not None, "there is no tower"
            values = self.encoder.encode(edit.height, edit.width, edit.pixels)
            self._images[edit.image] = self.stored_image(values)
        elif isinstance(edit, DropImage):
            del self._images[edit.image]
        else:
            raise AssertionError(f"{edit}: this executable has neither pages nor places")

    def _open(self, edit: OpenSlot) -> None:
        assert 0 <= edit.slot < self.capabilities.max_num_seqs, f"there is no slot {edit.slot}"
        current = self._slot_states.get(edit.slot)
        assert (current is not None) == (edit.keeps > 0), f"slot {edit.slot} is taken, or not kept"
        if current is not None:
            assert edit.keeps <= current.length, (
                f"slot {edit.slot} holds only {current.length} positions"
            )
        else:
            self.clear_state(edit.slot)
        is_cut = current is not None and self._cuts(edit.keeps, current)
        self._slot_states[edit.slot] = SlotState(
            edit.sampling,
            edit.prompt,
            edit.keeps,
            is_cut=is_cut,
            rotary_delta=edit.rotary_delta,
        )

    def _copy(self, source: Slot, target: Slot, num_positions: int) -> None:
        """Copy the first positions to another slot. The target is open and empty."""
        self.copy_state(source, target, num_positions)
        if self.draft_layer is not None:
            self.draft_layer.copy(source, target, num_positions)
        self._slot_states[target].length = num_positions
        self._slot_states[target].images = self._slot_states[source].images
        self._slot_states[target].is_cut = self._cuts(num_positions, self._slot_states[source])

    def _cuts(self, num_positions: int, slot_state: SlotState) -> bool:
        return self.capabilities.has_sequence_state and num_positions != slot_state.length

    def _run_decode(self, step: Step) -> list[SamplerOutput]:
        """Decode a token per slot, and verify drafts."""
        if step.drafts:
            self._check_drafts(step)
            if self.verifies_in_turn:
                return self._verify_in_turn(step)
        slot_states = [self._slot_states[slot] for slot in step.decode]
        tokens = [step.forced.get(s, self._slot_states[s].token) for s in step.decode]
        assert None not in tokens, "a slot that holds no token was stepped"
        batch = decode_batch(step, tokens, [slot_state.length for slot_state in slot_states])
        deltas = [slot_state.rotary_delta for slot_state in slot_states]
        if any(deltas):
            positions = batch.positions + np.repeat(deltas, np.diff(batch.cu_seqlens))
            batch = replace(batch, rotary=self._rotary(positions))
        if any(state.images for state in slot_states):
            counts = np.diff(batch.cu_seqlens)
            pairs = zip(slot_states, counts, strict=True)
            batch = self._with_visible(batch, [s.images for s, n in pairs for _ in range(n)])
        logits = self.forward_drafts(batch) if step.drafts else self.forward(batch)
        for slot, token in step.forced.items():
            self._slot_states[slot].force(token)
        for slot_state in slot_states:
            slot_state.length += 1
        parts = self._decoded(step, logits, batch.cu_seqlens.tolist())
        self._verified = batch
        if step.drafts and not self.follows:
            verified = parts[0]
            accepted = dict(zip(verified.slots, verified.read().counts or (), strict=True))
            self._counts = bytes(accepted.get(slot, 1) for slot in step.decode)
            self._discard_rejected(self._counts)
        if self.draft_layer is not None:
            self._note_decoded(
                batch, self._counts if step.drafts else bytes([1] * len(batch.slots))
            )
        return parts

    def _note_decoded(self, batch: Batch, counts: bytes) -> None:
        """Give the accepted rows to the draft layer."""
        assert self.draft_layer is not None
        for slot, first, count in zip(batch.slots, batch.cu_seqlens, counts, strict=False):
            rows, start = slice(first, first + count), int(batch.positions[first])
            self.draft_layer.note(slot, start, batch.tokens[rows], self.last_hidden[rows])

    def _decoded(self, step: Step, logits: np.ndarray, ends: Sequence[int]) -> list[SamplerOutput]:
        """Return the outputs of decode rows. With masks, slots with drafts do not wait for them."""
        if not (step.drafts and step.masked):
            return [self._part(step.decode, logits, step, step.drafts)]
        groups: dict[bool, list[int]] = {True: [], False: []}
        for index, slot in enumerate(step.decode):
            groups[slot in step.drafts] += range(ends[index], ends[index + 1])
        verified, others = divide(step)
        parts = [self._part(verified.decode, logits[groups[True]], verified, step.drafts)]
        if others.decode:
            parts.append(self._part(others.decode, logits[groups[False]], others))
        return parts

    def emitted_counts(self) -> bytes:
        return self._counts

    def follow_counts(self, counts: bytes) -> None:
        assert self._verified is not None, "no step had drafts"
        for slot, count in zip(self._verified.slots, counts, strict=True):
            self._slot_states[slot].length += count - 1
        self._discard_rejected(counts)

    def _discard_rejected(self, counts: bytes) -> None:
        batch = self._verified
        assert batch is not None
        ends = batch.cu_seqlens.tolist()
        for index, slot in enumerate(batch.slots):
            if counts[index] < ends[index + 1] - ends[index]:
                self.roll_back(slot, ends[index] + counts[index] - 1)

    def _check_drafts(self, step: Step) -> None:
        limits = self.capabilities
        assert not step.want_logits or self.follows, "a step with drafts has no logits"
        for slot, drafts in step.drafts.items():
            is_forced = slot in step.forced and not self.follows
            assert slot in step.decode and not is_forced, f"slot {slot} has drafts"
            assert 1 <= len(drafts) <= limits.max_drafts, f"slot {slot}: {len(drafts)} drafts"
            assert min(drafts) >= 0 and max(drafts) < self.vocab_size, f"slot {slot}: {drafts}"
            end = self.length(slot) + 1 + len(drafts)
            assert end <= limits.max_context, f"slot {slot} ends at {end}"

    def _verify_in_turn(self, step: Step) -> list[SamplerOutput]:
        """Decode all slots until their drafts are wrong. Nothing is rolled back."""
        if step.masked:
            verified, others = divide(step)
            parts = self._verify_in_turn(verified)
            return parts + (self._run_decode(others) if others.decode else [])
        turn = replace(step, drafts={}, prompts=(), edits=())
        outputs = {slot: list[SampledTokens]() for slot in step.decode}
        while turn.decode:
            chosen, going = self._run_decode(turn)[0].read(), []
            for index, slot in enumerate(turn.decode):
                outputs[slot].append(output_at(chosen, index))
                count, drafts = len(outputs[slot]), step.drafts.get(slot, ())
                if drafts[count - 1 : count] == (chosen.tokens[index],):
                    going.append(slot)
            turn = replace(turn, decode=tuple(going), forced={})
        joined = join(outputs.values())
        return [SamplerOutput(step.decode, lambda: joined)]

    def _run_prompt(self, chunk: PrefillChunk, step: Step) -> SamplerOutput | None:
        """Run a prefill chunk. Return None if it has no output."""
        slot_state = self._slot_states[chunk.slot]
        assert chunk.start <= slot_state.length, f"slot {chunk.slot}: {chunk.start} leaves a gap"
        assert not slot_state.is_cut, f"slot {chunk.slot}: {chunk.start} is not where its state is"
        marks = sorted({*(at for at, _ in chunk.saves), chunk.end})
        every: list[np.ndarray] = []
        start, logits = chunk.start, np.empty((0, self.vocab_size), np.float32)
        for end in marks:
            logits = self._run_piece(chunk, start, end, is_last=end == chunk.end)
            every += [logits.copy()] if chunk.echoes or chunk.pools else []
            slot_state.length, start = end, end
            for at, snapshot in chunk.saves:
                if at == end:
                    self.save_state(chunk.slot, snapshot)
        slot_state.token = None
        slot_state.images = chunk.visible[-1].images if chunk.visible else ()
        for slot in chunk.also:
            self._copy(chunk.slot, slot, chunk.end)
        if chunk.pools:
            pooled = pooled_of(np.concatenate(every))
            return SamplerOutput((), lambda: SampledTokens((), (), pooled=pooled))
        if chunk.echoes:
            return self._echo(chunk, np.concatenate(every), step)
        if not chunk.chooses:
            return None
        slots = (chunk.slot, *chunk.also)
        return self._part(slots, logits.repeat(len(slots), axis=0) if chunk.also else logits, step)

    def _run_piece(self, chunk: PrefillChunk, start: int, end: int, *, is_last: bool) -> np.ndarray:
        tokens = chunk.tokens[start - chunk.start : end - chunk.start]
        wanted = np.arange(len(tokens) if chunk.echoes else 0)
        if is_last and chunk.chooses and not chunk.echoes:
            wanted = np.array([len(tokens) - 1])
        bounds = np.array([0, len(tokens)])
        positions = np.arange(start, end)
        batch = Batch(np.array(tokens), positions, bounds, wanted, (chunk.slot,), chunk.decodes)
        batch = self._with_images(batch, chunk, start)
        if chunk.visible:
            seen = images_by_token(chunk)[start - chunk.start : end - chunk.start]
            batch = self._with_visible(batch, seen)
        if chunk.pools:
            return self.hidden(batch)
        logits = self.forward(batch)
        if self.draft_layer is not None:
            self.draft_layer.note(chunk.slot, start, tokens, self.last_hidden)
        return logits

    def stored_image(self, values: np.ndarray) -> np.ndarray:
        """Return an encoded image as the executable stores it."""
        return values

    def _with_images(self, batch: Batch, chunk: PrefillChunk, start: int) -> Batch:
        """Add embeddings and positions of rotation to a batch of a chunk's tokens at ``start``."""
        first, count = start - chunk.start, len(batch.tokens)
        indices, rows = [], []
        for run in chunk.images:
            begin, end = max(run.offset, first), min(run.offset + run.count, first + count)
            if begin < end:
                indices.append(np.arange(begin, end) - first)
                at = run.first + begin - run.offset
                rows.append(self._images[run.image][at : at + end - begin])
        delta, rotary = self._slot_states[chunk.slot].rotary_delta, None
        if chunk.rotary:
            whole = np.array(chunk.rotary).reshape(3, -1)
            rotary = self._rotary(whole[:, first : first + count])
        elif delta:
            rotary = self._rotary(batch.positions + delta)
        if not rows:
            return batch if rotary is None else replace(batch, rotary=rotary)
        tokens, embeddings = np.concatenate(indices), np.concatenate(rows)
        ends = visible_ends(chunk)
        ends = None if ends is None else ends[first : first + count]
        batch = replace(batch, image_tokens=tokens, embeddings=embeddings)
        return replace(batch, rotary=rotary, ends=ends)

    def _with_visible(self, batch: Batch, seen: Sequence[tuple[ImageId, ...]]) -> Batch:
        """Add images for cross-attention to a batch. ``seen`` are the images per token."""
        if not any(seen):
            return batch
        ranges: dict[tuple[ImageId, ...], tuple[int, int]] = {(): (0, 0)}
        parts: list[np.ndarray] = []
        for images in sorted(set(seen) - {()}, key=len, reverse=True):
            longer = next((key for key in ranges if key[: len(images)] == images), None)
            first = len(parts) if longer is None else ranges[longer][0]
            if longer is None:
                parts += [self._images[image] for image in images]
            ranges[images] = first, first + len(images)
        visible = np.array([ranges[images] for images in seen])
        return replace(batch, cross_rows=tuple(parts), visible=visible)

    def _rotary(self, positions: np.ndarray) -> np.ndarray:
        """Return positions of rotation by pair, for ``[T]`` or ``[3, T]``."""
        assert self.encoder is not None, "there is no tower"
        return self.encoder.by_pair(np.broadcast_to(positions, (3, positions.shape[-1])))

    def _echo(self, chunk: PrefillChunk, logits: np.ndarray, step: Step) -> SamplerOutput:
        """Return log probabilities and logits for all rows. Sample from the last row if
        requested.
        """
        if self.follows:
            return _NOTHING
        slots = (chunk.slot, *chunk.also) if chunk.chooses else ()
        echo = None
        if step.logprobs is not None:
            echoed = chunk.echoed
            echo = log_probs(logits[: len(echoed)], echoed, step.logprobs)
        choice = self._begin(slots, logits[-1:].repeat(len(slots), axis=0), step, echo)
        return SamplerOutput(
            slots, choice.read, (lambda: tensor_of(logits)) if step.want_logits else None
        )

    def _part(
        self,
        slots: tuple[Slot, ...],
        logits: np.ndarray,
        step: Step,
        drafts: Mapping[Slot, tuple[int, ...]] | None = None,
    ) -> SamplerOutput:
        if self.follows:
            return _NOTHING
        if step.want_logits or step.masked:
            logits = logits.copy()
        choice = self._begin(slots, logits, step, None, drafts or {})
        return SamplerOutput(
            slots, choice.read, (lambda: tensor_of(logits)) if step.want_logits else None
        )

    def _begin(
        self,
        slots: tuple[Slot, ...],
        logits: np.ndarray,
        step: Step,
        echo: list[LogProbs] | None,
        drafts: Mapping[Slot, tuple[int, ...]] | None = None,
    ) -> HostChoice:
        """Sample a part's tokens, or defer sampling to :meth:`choose`."""
        num_tokens = self.num_choosable
        choice = HostChoice(slots, logits, step.logprobs, echo, num_tokens, drafts or {})
        if step.masked:
            self._waiting.append(choice)
        else:
            choice.choose(self._slot_states, NO_MASK)
        return choice

    def choose(self, output: StepOutput, allowed: TokenMask) -> None:
        assert self._waiting or not output.parts, "no choice waits"
        for choice in self._waiting:
            choice.choose(self._slot_states, allowed)
        self._waiting.clear()


def with_all_rows(batch: Batch) -> Batch:
    """Return the batch with logits for every token."""
    return replace(batch, logit_rows=np.arange(len(batch.tokens)))


def pooled_of(hidden: np.ndarray) -> Pooled:
    """Pool a chunk's hidden states ``[T, hidden]``."""
    return Pooled(len(hidden), hidden.sum(axis=0, dtype=np.float32), hidden[-1].copy())


def tensor_of(logits: np.ndarray) -> Tensor:
    """Return logits as a torch tensor. Callers have torch."""
    import torch

    return torch.from_numpy(logits)
