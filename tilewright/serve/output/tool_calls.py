"""Tool calls in a streamed answer: separated from its content, numbered and named."""

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
    """A call of a function. ``arguments`` is the JSON received so far."""

    id: str
    name: str
    arguments: str = ""
    is_whole: bool = False


@dataclass(slots=True)
class CallReader:
    """Separates tool calls from a streamed answer's content.

    Attributes:
        parser: parser of the model's format.
        new_id: returns a new id for a call.
        is_parallel: whether several calls are allowed. Else the answer ends after the first call.
        must_call: whether the answer must be calls. A cut beginning is then no content, and text
            after a call ends the answer.
        calls: the calls found so far.
    """

    parser: ToolParser
    new_id: Callable[[], str]
    is_parallel: bool = True
    must_call: bool = False
    calls: list[ToolCall] = field(default_factory=list)
    _is_over: bool = False

    @property
    def is_full(self) -> bool:
        """Return whether the answer needs no further text."""
        return self._is_over or (not self.is_parallel and self.is_whole)

    @property
    def is_whole(self) -> bool:
        """Return whether the answer has calls and all of them are complete."""
        return bool(self.calls) and self.calls[-1].is_whole

    def push(self, text: str) -> AnswerDelta:
        """Take the next ``text`` and return the part that is certain."""
        return self._piece(self.parser.push(text))

    def flush(self) -> AnswerDelta:
        """Return the delayed part at the answer's end."""
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
