"""Calls in one answer as it comes: told from its content, numbered, named and counted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tilewright.serve.output.reasoning import AnswerDelta, CallPiece
from tilewright.serve.tools.events import (
    Argued,
    ContentDelta,
    Event,
    ToolCallEnd,
    ToolCallStart,
    ToolParser,
)


@dataclass(slots=True)
class ToolCall:
    """A call of a function; ``arguments``: JSON, as far as it has come."""

    id: str
    name: str
    arguments: str = ""
    is_whole: bool = False


@dataclass(slots=True)
class CallReader:
    """A reader that takes the calls of functions out of one answer as it streams.

    Attributes:
        is_parallel: whether there may be several; else the answer is over behind the first.
        must_call: whether the answer is held to calls: its cut end is no content, and it is over
            where other text follows a call.
        calls: those found so far.
    """

    parser: ToolParser
    new_id: Callable[[], str]
    is_parallel: bool = True
    must_call: bool = False
    calls: list[ToolCall] = field(default_factory=list)
    _is_over: bool = False

    @property
    def is_full(self) -> bool:
        """Whether nothing more is wanted of the answer."""
        return self._is_over or (not self.is_parallel and self.is_whole)

    @property
    def is_whole(self) -> bool:
        """Whether the answer has called something, and nothing by halves."""
        return bool(self.calls) and self.calls[-1].is_whole

    def push(self, text: str) -> AnswerDelta:
        """What is certain now that ``text`` has come."""
        return self._piece(self.parser.push(text))

    def flush(self) -> AnswerDelta:
        """What was held back, at the end of the answer."""
        return self._piece(self.parser.flush(must_call=self.must_call))

    def _piece(self, events: Sequence[Event]) -> AnswerDelta:
        content, pieces = "", []
        for event in events:
            if self.is_full:
                break
            if isinstance(event, ContentDelta):
                self._is_over = self.must_call and self.is_whole
                content += "" if self._is_over else event.text
            elif isinstance(event, ToolCallStart):
                self.calls.append(ToolCall(self.new_id(), event.name))
                call = self.calls[-1]
                pieces.append(CallPiece(len(self.calls) - 1, id=call.id, name=call.name))
            elif isinstance(event, Argued):
                self.calls[-1].arguments += event.text
                pieces.append(CallPiece(len(self.calls) - 1, event.text))
            else:
                assert isinstance(event, ToolCallEnd), event
                self.calls[-1].is_whole = True
        return AnswerDelta(content=content, calls=tuple(pieces))
