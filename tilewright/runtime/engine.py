"""The engine facade: prefill, decode and remove by request id. Returns logits, samples nothing."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import Executable
from tilewright.compiler.targets.interface.step import (
    AssignPages,
    CloseSlot,
    OpenSlot,
    PrefillChunk,
    Slot,
    StateUpdate,
    Step,
)
from tilewright.errors import RequestError
from tilewright.runtime.memory.pages import PagePool, pages_of
from tilewright.runtime.request import check_tokens

_DECODE_CHUNK = 64
"""Known tokens in a step of :meth:`Engine.decode_text`."""


class UnknownRequestError(RequestError, KeyError):
    """An unknown or removed request id."""

    def __str__(self) -> str:
        return str(self.args[0])


class DuplicateRequestError(RequestError, ValueError):
    """A request id occurs twice in a call."""


@dataclass(slots=True)
class _Sequence:
    """A live request: slot, pages, and all input tokens for a replay."""

    slot: Slot
    prompt: list[int]
    decoded: list[int] = field(default_factory=list)
    pages: list[int] = field(default_factory=list)

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.decoded)


class Engine:
    """State by request id over an :class:`Executable`. The engine owns its slots.

    A call may name live ids in any order. A call that raises changes nothing: the engine computes
    the earlier state again from the tokens.
    """

    def __init__(self, executable: Executable, *, step_tokens: int | None = None) -> None:
        """Set up an empty engine. ``step_tokens`` limits prompt tokens per step. None: maximum."""
        self.executable = executable
        limits = executable.capabilities
        self._piece = min(step_tokens or limits.max_step_tokens, limits.max_step_tokens)
        self._begin()

    def _begin(self) -> None:
        """Reset the executable."""
        limits = self.executable.capabilities
        self.executable.reset()
        self._live: dict[int, _Sequence] = {}
        self._free = list(range(limits.max_num_seqs))
        self._pool = PagePool(limits.num_pages)
        self._edits: list[StateUpdate] = []

    @property
    def request_ids(self) -> tuple[int, ...]:
        """The ids of the live requests."""
        return tuple(self._live)

    def slot(self, request_id: int) -> Slot:
        """Return a live request's slot."""
        return self._live[request_id].slot

    def length(self, request_id: int) -> int:
        """Return the token count in a live request's state."""
        return self._live[request_id].length

    def prefill(self, request_ids: Sequence[int], input_ids: Sequence[Tensor]) -> Tensor:
        """Start requests, or restart live requests. Return logits ``[B, vocab]`` in float32.

        The logits are of the last token.

        Args:
            request_ids: an id for each request.
            input_ids: an int64 tensor ``[length]`` for each request.

        Raises:
            RequestError: for an empty or long prompt, a token outside the vocabulary, a doubled id,
                or too many requests.
        """
        prompts = [tokens.tolist() for tokens in input_ids]
        self._check_prefill(request_ids, prompts)
        with self._undone_by_failure():
            self._leave(request_ids)
            for request_id, prompt in zip(request_ids, prompts, strict=True):
                self._live[request_id] = self._fill_slots(prompt)
            rows = [self._compute(self._live[each]) for each in request_ids]
        return torch.stack(rows) if rows else torch.empty(0, self.executable.vocab_size)

    def decode(self, request_ids: Sequence[int], token_ids: Tensor) -> Tensor:
        """Append a token to each request. Return logits ``[B, vocab]`` in float32.

        Raises:
            UnknownRequestError: for an id that is not live.
            RequestError: for a doubled id, a token outside the vocabulary, or a full context.
        """
        tokens = token_ids.tolist()
        self._check_decode(request_ids, tokens)
        live = [self._live[request_id] for request_id in request_ids]
        if not live:
            return torch.empty(0, self.executable.vocab_size)
        with self._undone_by_failure():
            logits = self._feed(live, tokens)
        for sequence, token in zip(live, tokens, strict=True):
            sequence.decoded.append(token)
        return logits

    def decode_text(self, request_id: int, token_ids: Tensor) -> Iterator[Tensor]:
        """Append known tokens to a request. Yield the logits ``[1, vocab]`` after every token.

        The bits are those of :meth:`decode` with a token a call. A target with decode chunks
        computes `_DECODE_CHUNK` tokens together.

        Raises:
            RequestError: as :meth:`decode`.
        """
        if not self.executable.capabilities.has_decode_chunks:
            for token in token_ids.split(1):
                yield self.decode([request_id], token)
            return
        for part in token_ids.split(_DECODE_CHUNK):
            tokens = part.tolist()
            self._check_decode([request_id], tokens, per_request=len(tokens))
            sequence = self._live[request_id]
            chunk = PrefillChunk(
                sequence.slot, sequence.length, tuple(tokens), echoes=True, decodes=True
            )
            with self._undone_by_failure():
                self._grow(sequence, sequence.length + len(tokens))
                logits = self._run(Step(prompts=(chunk,)))
            sequence.decoded += tokens
            yield from logits.split(1)

    def remove(self, request_ids: Sequence[int]) -> None:
        """Remove requests and free their state. Unknown ids are ignored."""
        self._leave(request_ids)
        if self._edits:
            self._run(Step())  # free the memory without waiting for another call

    def _leave(self, request_ids: Sequence[int]) -> None:
        for request_id in request_ids:
            sequence = self._live.pop(request_id, None)
            if sequence is not None:
                self._edits.append(CloseSlot(sequence.slot))
                heapq.heappush(self._free, sequence.slot)
                self._pool.release(sequence.pages)

    @contextmanager
    def _undone_by_failure(self) -> Iterator[None]:
        """Compute every live request again if the block raises."""
        before = {each: replace(old) for each, old in self._live.items()}
        try:
            yield
        except BaseException:
            self._begin()
            self._live = {each: self._again(old) for each, old in before.items()}
            raise

    def _fill_slots(self, prompt: list[int]) -> _Sequence:
        sequence = _Sequence(Slot(heapq.heappop(self._free)), prompt)
        self._edits.append(OpenSlot(sequence.slot, SamplingParams()))
        self._grow(sequence, len(prompt))
        return sequence

    def _grow(self, sequence: _Sequence, num_positions: int) -> None:
        size = self.executable.capabilities.page_size
        missing = pages_of(num_positions, size) - len(sequence.pages) if size else 0
        if missing > 0:
            if missing > self._pool.num_available:
                raise RequestError(
                    f"{missing} pages of the cache are needed; allowed: the "
                    f"{self._pool.num_available} free ones"
                )
            fresh = self._pool.take(missing)
            self._edits.append(AssignPages(sequence.slot, len(sequence.pages), tuple(fresh)))
            sequence.pages += fresh

    def _compute(self, sequence: _Sequence) -> Tensor:
        """Run a prompt in chunks of maximum size. Return logits ``[vocab]``."""
        size, prompt = self._piece, tuple(sequence.prompt)
        logits = torch.empty(0)
        for start in range(0, len(prompt), size):
            tokens = prompt[start : start + size]
            ends = start + size >= len(prompt)
            logits = self._run(
                Step(prompts=(PrefillChunk(sequence.slot, start, tokens, chooses=ends),))
            )
        return logits[0].clone()

    def _feed(self, live: Sequence[_Sequence], tokens: Sequence[int]) -> Tensor:
        for sequence in live:
            self._grow(sequence, sequence.length + 1)
        forced = {each.slot: token for each, token in zip(live, tokens, strict=True)}
        return self._run(Step(decode=tuple(forced), forced=forced))

    def _run(self, step: Step) -> Tensor:
        """Run a step with the pending updates. Return its logits, valid until the next step."""
        edits, self._edits = tuple(self._edits), []
        output = self.executable.step(
            Step(step.decode, step.prompts, edits, step.forced, want_logits=True)
        )
        logits = [part.logits() for part in output.parts if part.logits is not None]
        return torch.cat(logits) if len(logits) > 1 else logits[0] if logits else torch.empty(0)

    def _again(self, old: _Sequence) -> _Sequence:
        """Return a new sequence with a lost sequence's tokens."""
        sequence = self._fill_slots(old.prompt)
        self._compute(sequence)
        for token in old.decoded:
            self._feed([sequence], [token])
            sequence.decoded.append(token)
        return sequence

    def _check_prefill(self, request_ids: Sequence[int], prompts: Sequence[list[int]]) -> None:
        self._check_ids(request_ids, len(prompts))
        limits = self.executable.capabilities
        for request_id, prompt in zip(request_ids, prompts, strict=True):
            if not 1 <= len(prompt) <= limits.max_context:
                raise RequestError(
                    f"request {request_id} has {len(prompt)} tokens; "
                    f"allowed: 1 to {limits.max_context}"
                )
            check_tokens(prompt, self.executable.vocab_size)
        fresh = sum(request_id not in self._live for request_id in request_ids)
        if fresh > len(self._free):
            raise RequestError(
                f"{fresh} new requests; allowed: {len(self._free)} more "
                f"({limits.max_num_seqs} at a time)"
            )
        if size := limits.page_size:
            given_back = sum(len(self._live[r].pages) for r in request_ids if r in self._live)
            available = self._pool.num_available + given_back
            needed = sum(pages_of(len(prompt), size) for prompt in prompts)
            if needed > available:
                raise RequestError(
                    f"{needed} pages of the cache are needed; allowed: {available} free ones"
                )

    def _check_decode(
        self, request_ids: Sequence[int], tokens: Sequence[int], *, per_request: int = 1
    ) -> None:
        self._check_ids(request_ids, len(tokens) // per_request)
        check_tokens(tokens, self.executable.vocab_size)
        context = self.executable.capabilities.max_context
        for request_id in request_ids:
            if request_id not in self._live:
                raise UnknownRequestError(f"request {request_id} is not known; prefill it first")
            if self._live[request_id].length + per_request > context:
                raise RequestError(
                    f"request {request_id} is at the end of its context; allowed: {context} tokens"
                )

    def _check_ids(self, request_ids: Sequence[int], count: int) -> None:
        if len(request_ids) != count:
            raise RequestError(f"{len(request_ids)} request ids for {count} inputs")
        seen: set[int] = set()
        for request_id in request_ids:
            if request_id in seen:
                raise DuplicateRequestError(f"request {request_id} is named twice in one call")
            seen.add(request_id)
