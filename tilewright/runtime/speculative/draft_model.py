"""`DraftModel`: drafts from a smaller model with the same tokens. Excludes acceptance."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import (
    NOT_A_NUMBER,
    AssignPages,
    CloseSlot,
    OpenSlot,
    PrefillChunk,
    Slot,
    StateUpdate,
    Step,
    StepOutput,
)
from tilewright.runtime.scheduling.request_state import RequestState

_NO_TOKEN = -1
"""In place of a token of logits with NaN."""


@dataclass(slots=True)
class _DraftSequence:
    """A request in the draft model.

    Attributes:
        slot: Its slot.
        num_equal: Tokens in the slot's state that the request has, too: all but its last.
        draft: Later tokens in the slot's state. They may be wrong.
    """

    slot: Slot
    num_equal: int = 0
    draft: tuple[int, ...] = ()


class DraftModel:
    """Greedy tokens of a second executable.

    A request gets a slot with its first draft. Its next draft discards rejected tokens by the start
    of a prefill chunk, so the model has no per-sequence state.
    """

    def __init__(self, executable: Executable) -> None:
        assert not executable.capabilities.has_sequence_state, "state without truncation"
        self.executable = executable
        self.forget()

    def limit_tokens(self, num_tokens: int) -> None:
        """Draft the first tokens only: a model may have fewer logits than its tokenizer tokens."""
        self.executable.num_tokens = min(self.executable.num_choosable, num_tokens)

    def forget(self) -> None:
        """Discard all sequences."""
        self.executable.reset()
        self._in_flight: deque[StepOutput] = deque()
        self._sequences: dict[RequestState, _DraftSequence] = {}
        count = self.executable.capabilities.max_num_seqs
        self._free = [Slot(number) for number in reversed(range(count))]

    def propose(self, counts: Mapping[RequestState, int]) -> dict[RequestState, tuple[int, ...]]:
        """Return up to ``counts`` tokens after the request output. Wait for them.

        A draft ends before logits with NaN. Hence it may be empty. It is also empty for a request
        with an unreadable token.
        """
        updates: list[StateUpdate] = []
        for request in [key for key in self._sequences if key.finish_reason or not key.has_drafts]:
            slot = self._sequences.pop(request).slot
            self._free.append(slot)
            updates.append(CloseSlot(slot))
        lengths: dict[Slot, int] = {}
        chunks: list[PrefillChunk] = []
        requests: dict[Slot, RequestState] = {}
        unreadable: dict[RequestState, tuple[int, ...]] = {}
        for request, count in counts.items():
            length = len(request.prompt) + len(request.output)
            count = min(count, self.executable.capabilities.max_context - length)
            sequence = self._sequence(request, updates)
            if count <= 0 or sequence is None:
                continue
            tokens = _tokens_from(request, sequence.num_equal)
            if not self.can_read(request):
                unreadable[request] = ()
                continue
            num_right = min(_num_equal(sequence.draft, tokens), len(tokens) - 1)
            start = sequence.num_equal + num_right
            chunks.append(PrefillChunk(sequence.slot, start, tokens[num_right:], chooses=True))
            sequence.num_equal, sequence.draft = length - 1, tokens[-1:]
            lengths[sequence.slot], requests[sequence.slot] = count, request
        drafts: dict[Slot, list[int]] = {slot: [] for slot in lengths}
        self._prefill(chunks, updates, drafts)
        self._decode(lengths, drafts)
        self._read(drafts, 0)
        for slot, draft in drafts.items():
            del draft[draft.index(_NO_TOKEN) if _NO_TOKEN in draft else len(draft) :]
            self._sequences[requests[slot]].draft += tuple(draft[:-1])
        return {requests[slot]: tuple(draft) for slot, draft in drafts.items()} | unreadable

    def can_read(self, request: RequestState) -> bool:
        """Return whether every new token has an embedding. A tokenizer may have more tokens."""
        sequence = self._sequences.get(request)
        tokens = _tokens_from(request, sequence.num_equal if sequence is not None else 0)
        return max(tokens) < self.executable.vocab_size

    def _launch(self, step: Step, drafts: dict[Slot, list[int]]) -> None:
        """Launch a step while a step at most is in flight."""
        self._read(drafts, int(self.executable.capabilities.runs_ahead))
        self._in_flight.append(self.executable.step(step))

    def _read(self, drafts: dict[Slot, list[int]], num_left: int) -> None:
        """Read the oldest steps in flight, and leave ``num_left``."""
        while len(self._in_flight) > num_left:
            for sampled in self._in_flight.popleft().parts:
                chosen = sampled.read()
                for slot, token, why in zip(sampled.slots, chosen.tokens, chosen.why, strict=True):
                    drafts[slot].append(_NO_TOKEN if why == NOT_A_NUMBER else token)

    def _sequence(self, request: RequestState, updates: list[StateUpdate]) -> _DraftSequence | None:
        """Return a request's sequence. None: no slot is free."""
        if request not in self._sequences and self._free:
            limits, slot = self.executable.capabilities, self._free.pop()
            self._sequences[request] = _DraftSequence(slot)
            updates.append(OpenSlot(slot, SamplingParams()))
            if limits.page_size:
                size = -(-limits.max_context // limits.page_size)
                pages = tuple(range(slot * size, (slot + 1) * size))
                updates.append(AssignPages(slot, 0, pages))
        return self._sequences.get(request)

    def _prefill(
        self,
        chunks: list[PrefillChunk],
        updates: list[StateUpdate],
        drafts: dict[Slot, list[int]],
    ) -> None:
        """Run updates, and chunks in steps within the limits."""
        limits = self.executable.capabilities
        while chunks or updates:
            prompts: list[PrefillChunk] = []
            budget = limits.max_step_tokens
            while chunks and budget and len(prompts) < limits.max_prompts:
                chunk = chunks.pop(0)
                if len(chunk.tokens) > budget:
                    later = chunk.start + budget, chunk.tokens[budget:]
                    chunks.insert(0, PrefillChunk(chunk.slot, *later, chooses=True))
                    chunk = PrefillChunk(chunk.slot, chunk.start, chunk.tokens[:budget])
                prompts.append(chunk)
                budget -= len(chunk.tokens)
            self._launch(Step(edits=tuple(updates), prompts=tuple(prompts)), drafts)
            updates.clear()

    def _decode(self, lengths: Mapping[Slot, int], drafts: dict[Slot, list[int]]) -> None:
        """Decode until each slot has ``lengths`` tokens."""
        decode: tuple[Slot, ...] = ()
        for done in range(1, max(lengths.values(), default=1)):
            slots = tuple(slot for slot, length in lengths.items() if length > done)
            decode = decode if slots == decode else slots  # executables compare identity
            self._launch(Step(decode=decode), drafts)

    def prepare(self) -> None:
        """Do the one-time work for all steps."""
        self.executable.prepare()

    def close(self) -> None:
        """Close the executable."""
        self.executable.close()


def _tokens_from(request: RequestState, start: int) -> tuple[int, ...]:
    """Return a request's tokens from a position on. A prompt is copied once only."""
    num_prompt = len(request.prompt)
    return (*request.prompt[start:], *request.output[max(0, start - num_prompt) :])


def _num_equal(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the common prefix's length."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))
