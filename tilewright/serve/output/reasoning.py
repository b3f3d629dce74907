"""Separates reasoning from content in streamed text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.serve.output.stops import StopMatcher

OPEN, CLOSE = "<think>", "</think>"


def begins_in_reasoning(prompt: str) -> bool:
    """Return whether a rendered prompt ends inside an open think block."""
    return prompt.rfind(OPEN) > prompt.rfind(CLOSE)


@dataclass(frozen=True, slots=True)
class CallPiece:
    """The next arguments of call ``index``. The first delta has ``id`` and ``name``."""

    index: int
    arguments: str = ""
    id: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class AnswerDelta:
    """A part of an answer: reasoning, content and tool calls."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallPiece, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    @property
    def is_content(self) -> bool:
        """Return whether the delta has content only."""
        return bool(self.content) and not self.reasoning and not self.calls


def joined(pieces: Sequence[AnswerDelta]) -> AnswerDelta:
    """Join consecutive deltas."""
    return AnswerDelta(
        "".join(piece.reasoning for piece in pieces),
        "".join(piece.content for piece in pieces),
        tuple(call for piece in pieces for call in piece.calls),
    )


class ReasoningSplitter:
    """Splits an answer at its think block. The result does not depend on the stream's chunks.

    A block exists if the prompt has opened it (``is_open``), or if ``may_open`` and the answer
    begins with the marker. White space around the block is dropped.
    """

    __slots__ = ("_at_start", "_close", "_space", "_undecided")

    def __init__(self, *, is_open: bool, may_open: bool = False) -> None:
        self._close = StopMatcher((CLOSE,)) if is_open else None
        self._undecided: str | None = "" if may_open and not is_open else None
        self._at_start = is_open  # of a part without its leading white space
        self._space = ""

    @property
    def is_inside(self) -> bool:
        """Return whether the next text is reasoning."""
        return self._close is not None

    @property
    def is_done(self) -> bool:
        """Return whether all further text is unchanged content."""
        return self._close is None and self._undecided is None and not self._at_start

    def push(self, text: str) -> AnswerDelta:
        """Take the next ``text`` and return the part that is certain."""
        if self._undecided is not None:
            begun = (self._undecided + text).lstrip()
            if len(begun) < len(OPEN) and OPEN.startswith(begun):
                self._undecided += text
                return AnswerDelta()
            text, self._undecided = self._undecided + text, None
            if begun.startswith(OPEN):
                self._close, self._at_start = StopMatcher((CLOSE,)), True
                text = begun.removeprefix(OPEN)
        if self._close is None:
            return AnswerDelta(content=self._said(text))
        thought = self._thought(self._close.push(text))
        if self._close.found is None:
            return AnswerDelta(thought)
        rest, self._close, self._at_start = self._close.rest, None, True
        return AnswerDelta(thought, self._said(rest))

    def flush(self) -> AnswerDelta:
        """Return the delayed text at the answer's end."""
        if self._undecided is not None:
            text, self._undecided = self._undecided, None
            return AnswerDelta(content=text)
        return (
            AnswerDelta()
            if self._close is None
            else AnswerDelta(self._thought(self._close.flush()))
        )

    def _thought(self, text: str) -> str:
        """Strip white space at both ends of the reasoning. Trailing space is delayed."""
        whole = self._space + text
        if self._at_start:
            whole = whole.lstrip()
        kept = whole.rstrip()
        self._space = whole[len(kept) :]
        self._at_start = self._at_start and not kept
        return kept

    def _said(self, text: str) -> str:
        if self._at_start:
            text = text.lstrip()
            self._at_start = not text
        return text
