"""`NgramIndex`: drafts from earlier occurrences of the last tokens (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence

_MAX_INDEXED = 4096
"""Tokens that a call indexes, a millisecond per thousand. A long prompt takes several calls."""


class NgramIndex:
    """The tokens of a request, with the last position after every n-gram.

    Keys are hashes. The model rejects a collision's wrong draft.
    """

    def __init__(self, prompt: Sequence[int], *, longest: int, shortest: int) -> None:
        self._tokens = list(prompt)
        self._num_prompt = len(prompt)
        self._lengths = range(longest, shortest - 1, -1)
        self._ends: dict[int, dict[int, int]] = {length: {} for length in self._lengths}
        self._starts = set[int]() if shortest > 1 else None
        self._num_indexed = 0

    def update(self, output: Sequence[int]) -> bool:
        """Add the output's new tokens. Return whether all tokens are indexed."""
        tokens = self._tokens
        tokens += output[len(tokens) - self._num_prompt :]
        # The n-gram at the end is not indexed: it would match itself.
        end = min(len(tokens) - 1, self._num_indexed + _MAX_INDEXED)
        for position in range(self._num_indexed + 1, end + 1):
            for length in self._lengths:
                if position >= length:
                    self._ends[length][_hash(tokens, position, length)] = position
            if self._starts is not None and position >= self._lengths[-1] - 1:
                self._starts.add(_hash(tokens, position, self._lengths[-1] - 1))
        self._num_indexed = max(self._num_indexed, end)
        return self._num_indexed >= len(tokens) - 1

    def propose(self, count: int) -> tuple[int, ...]:
        """Return ``count`` tokens after the longest matches' latest. Empty: no match.

        A match near the end continues with its own draft.
        """
        tokens, size = self._tokens, len(self._tokens)
        for length in self._lengths:
            if size <= length:
                continue
            end = self._ends[length].get(_hash(tokens, size, length))
            if end is not None:
                period = size - end
                return tuple(tokens[end + at % period] for at in range(count))
        return ()

    def may_match_next(self) -> bool:
        """Return whether a match is possible after the next token."""
        length = self._lengths[-1] - 1
        if self._starts is None:
            return True
        size = len(self._tokens)
        return size >= length and _hash(self._tokens, size, length) in self._starts


def _hash(tokens: list[int], end: int, length: int) -> int:
    return hash(tuple(tokens[end - length : end]))
