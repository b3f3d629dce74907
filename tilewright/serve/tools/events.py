"""Events in an answer with tool calls, and the search for the beginning of calls.

Parsers read text only. Content, calls and arguments do not depend on the stream's chunks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tilewright.serve.output.stops import StopMatcher

SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """Answer text outside calls."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call's beginning. Its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """The next part of the last call's arguments, as JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The end of the last call's arguments."""


Event: TypeAlias = ContentDelta | ToolCallStart | Argued | ToolCallEnd


class CallRegion(Protocol):
    """Reads the text after an opening marker.

    Attributes:
        is_call: whether a `ToolCallStart` was returned. Before it, the text may be plain.
        rest: None during reading, then the text after the region.
    """

    is_call: bool
    rest: str | None

    def push(self, text: str) -> list[Event]:
        """Take the next text and return the events that are certain."""

    def flush(self) -> list[Event]:
        """Return the delayed arguments at the text's end. Cut markup is dropped."""


class ToolParser:
    """Finds calls in streamed text.

    Args:
        markers: texts that open a region.
        region: returns a reader for a marker, empty without a marker.
        first: character that opens a region at the answer's beginning, as ``{``.

    White space around calls is dropped. Text that is no call becomes content with its marker.
    """

    def __init__(
        self, markers: Sequence[str], region: Callable[[str], CallRegion], *, first: str = ""
    ) -> None:
        self._markers, self._first, self._make = tuple(markers), first, region
        self._matcher = StopMatcher(self._markers)
        self._region: CallRegion | None = None
        self._raw: list[str] = []  # of a region without a call so far
        self._space = ""
        self._is_at_start = True
        self._has_called = False
        self._follows_call = False

    def push(self, text: str) -> list[Event]:
        """Take the next text and return the events that are certain."""
        events: list[Event] = []
        while text:
            text = self._scan(text, events) if self._region is None else self._read(text, events)
        return events

    def flush(self, *, must_call: bool = False) -> list[Event]:
        """Return the delayed events at the text's end.

        The beginning of a call is dropped after a call, or if ``must_call`` allows no other text.
        Else it is content.
        """
        events: list[Event] = []
        is_cut = self._follows_call or must_call
        if self._region is not None:
            events += self._region.flush()
            self._has_called |= self._region.is_call
            if not self._region.is_call and not is_cut:
                self._say("".join(self._raw), events)
            self._region, self._raw = None, []
        rest = self._matcher.flush()
        if not is_cut:
            self._say(rest, events)
        if not self._has_called and self._space:
            events.append(ContentDelta(self._space))
        self._space = ""
        return events

    def _scan(self, text: str, events: list[Event]) -> str:
        """Search a call's beginning. Return the text from there."""
        if self._first and self._is_at_start:
            begun = text.lstrip(SPACE)
            if begun.startswith(self._first):
                self._space += text[: len(text) - len(begun)]
                self._open("")
                return begun
            self._is_at_start = not begun
        self._say(self._matcher.push(text), events)
        if self._matcher.found is None:
            return ""
        marker, rest = self._matcher.found, self._matcher.rest
        self._matcher = StopMatcher(self._markers)
        self._open(marker)
        return rest

    def _open(self, marker: str) -> None:
        self._region, self._raw, self._is_at_start = self._make(marker), [marker], False

    def _read(self, text: str, events: list[Event]) -> str:
        region = self._region
        assert region is not None
        was_call = region.is_call
        events += region.push(text)
        if not was_call:
            self._raw.append(text)
        if region.rest is None:
            return ""
        rest, self._region = region.rest, None
        if region.is_call:
            self._has_called = self._follows_call = True
        else:
            raw = "".join(self._raw)
            self._say(raw[: len(raw) - len(rest)], events)
        self._raw = []
        return rest

    def _say(self, text: str, events: list[Event]) -> None:
        if self._follows_call:
            text = text.lstrip(SPACE)
        if not text:
            return
        self._follows_call = False
        whole = self._space + text
        kept = whole.rstrip(SPACE)
        self._space = whole[len(kept) :]
        if kept:
            events.append(ContentDelta(kept))
