"""The engine facade: prefill, decode and remove by request id, logits out, nothing sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilewright.compiler.errors import RequestError
from tilewright.compiler.runtime.batch import Piece, build_step, split_by_capability
from tilewright.compiler.runtime.request import check_tokens
from tilewright.compiler.runtime.scheduler import prefill_chunk_of
from tilewright.compiler.targets.base import Executable, StateHandle


class UnknownRequestError(RequestError, KeyError):
    """A request id that no prefill made, or that was removed."""

    def __str__(self) -> str:
        return str(self.args[0])


class DuplicateRequestError(RequestError, ValueError):
    """One request id is named twice in one call."""


class Engine:
    """State by request id over an :class:`Executable`.

    Calls may name any live ids in any order. A call that raises has changed nothing.
    """

    def __init__(self, executable: Executable, *, prefill_chunk: int | None = None) -> None:
        self.executable = executable
        self.prefill_chunk = prefill_chunk_of(executable.capabilities, prefill_chunk)
        self._states: dict[int, StateHandle] = {}
        self._lengths: dict[int, int] = {}

    @property
    def request_ids(self) -> tuple[int, ...]:
        """The ids of the live requests, in the order they were prefilled."""
        return tuple(self._states)

    def state(self, request_id: int) -> StateHandle:
        """The handle of the state that the executable keeps for a live request."""
        return self._states[request_id]

    def prefill(self, request_ids: Sequence[int], input_ids: Sequence[Tensor]) -> Tensor:
        """Start requests, or start live ones anew: last-token logits ``[B, vocab]`` float32.

        Args:
            input_ids: one int64 tensor ``[length]`` a request.

        Raises:
            RequestError: an empty or too long prompt, a token outside the vocabulary, an id twice,
                or more requests than the executable holds.
        """
        prompts = [tokens.tolist() for tokens in input_ids]
        self._check_prefill(request_ids, prompts)
        self.remove(request_ids)
        context = self.executable.capabilities.max_context
        for request_id, prompt in zip(request_ids, prompts, strict=True):
            self._states[request_id] = self.executable.reserve(context)
            self._lengths[request_id] = len(prompt)
        pieces = [
            Piece(self._states[request_id], prompt, 0, True)
            for request_id, prompt in zip(request_ids, prompts, strict=True)
        ]
        return self._run(pieces)

    def decode(self, request_ids: Sequence[int], token_ids: Tensor) -> Tensor:
        """Append one token to each request: last-token logits ``[B, vocab]`` float32.

        Raises:
            UnknownRequestError: an id that is not live.
            RequestError: an id twice, a token outside the vocabulary, or a full context.
        """
        tokens = token_ids.tolist()
        self._check_ids(request_ids, len(tokens))
        check_tokens(tokens, self.executable.vocab_size)
        for request_id in request_ids:
            if request_id not in self._states:
                raise UnknownRequestError(f"request {request_id} is not known; prefill it first")
            if self._lengths[request_id] >= self.executable.capabilities.max_context:
                raise RequestError(
                    f"request {request_id} is at the end of its context; "
                    f"allowed: {self.executable.capabilities.max_context} tokens"
                )
        pieces = [
            Piece(self._states[request_id], [token], self._lengths[request_id], True)
            for request_id, token in zip(request_ids, tokens, strict=True)
        ]
        for request_id in request_ids:
            self._lengths[request_id] += 1
        return self._run(pieces)

    def remove(self, request_ids: Sequence[int]) -> None:
        """Forget requests and free their state; unknown ids are fine."""
        for request_id in request_ids:
            state = self._states.pop(request_id, None)
            if state is not None:
                del self._lengths[request_id]
                self.executable.free(state)

    def _run(self, pieces: list[Piece]) -> Tensor:
        """Run the pieces in as few steps as the executable allows; rows in the pieces' order."""
        logits = torch.empty(len(pieces), self.executable.vocab_size)
        row_of = {piece.state: row for row, piece in enumerate(pieces)}
        remaining = pieces
        while remaining:
            heads = [self._head(piece) for piece in remaining]
            for group in split_by_capability(heads, self.executable.capabilities):
                output = self.executable.step(build_step(group, want_logits=True))
                assert output.logits is not None
                rows = [row_of[piece.state] for piece in group if piece.wants_logits]
                logits[rows] = output.logits.cpu()
            remaining = [tail for piece in remaining if (tail := self._tail(piece)).tokens]
        return logits

    def _head(self, piece: Piece) -> Piece:
        """The next chunk of a piece; only its last one wants logits."""
        tokens = piece.tokens[: self.prefill_chunk]
        return Piece(piece.state, tokens, piece.position, len(tokens) == len(piece.tokens))

    def _tail(self, piece: Piece) -> Piece:
        """What is left after :meth:`_head`."""
        rest = piece.tokens[self.prefill_chunk :]
        return Piece(piece.state, rest, piece.position + self.prefill_chunk, True)

    def _check_prefill(self, request_ids: Sequence[int], prompts: Sequence[list[int]]) -> None:
        self._check_ids(request_ids, len(prompts))
        context = self.executable.capabilities.max_context
        for request_id, prompt in zip(request_ids, prompts, strict=True):
            if not 1 <= len(prompt) <= context:
                raise RequestError(
                    f"request {request_id} has {len(prompt)} tokens; allowed: 1 to {context}"
                )
            check_tokens(prompt, self.executable.vocab_size)
        fresh = sum(request_id not in self._states for request_id in request_ids)
        if fresh > self.executable.num_free():
            raise RequestError(
                f"{fresh} new requests; allowed: {self.executable.num_free()} more "
                f"({self.executable.capabilities.max_batch} at a time)"
            )

    def _check_ids(self, request_ids: Sequence[int], count: int) -> None:
        if len(request_ids) != count:
            raise RequestError(f"{len(request_ids)} request ids for {count} inputs")
        seen: set[int] = set()
        for request_id in request_ids:
            if request_id in seen:
                raise DuplicateRequestError(f"request {request_id} is named twice in one call")
            seen.add(request_id)
