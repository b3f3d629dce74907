"""What is found in an answer that may call functions, and how a parser finds where calls begin.

A parser works on text alone. However the text is cut, the events say the same: the same content,
the same calls with the same arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from tilewright.serve.output.stops import StopMatcher

SPACE = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of the answer's text that belongs to no call."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallStart:
    """A call of a function begins; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Argued:
    """The next piece of the JSON of the last call's arguments."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The arguments of the last call are complete."""


Event: TypeAlias = ContentDelta | ToolCallStart | Argued | ToolCallEnd


class CallRegion(Protocol):
    """Reads what stands behind an opening marker.

    Attributes:
        is_call: whether a `ToolCallStart` was given; before it the text may still be plain.
        rest: None while it reads; then the text behind its end, or behind what it could not read.
    """

    is_call: bool
    rest: str | None

    def push(self, text: str) -> list[Event]:
        """Take the next text; returns the events that are certain now."""

    def flush(self) -> list[Event]:
        """Return the arguments that were held back, at the end of the text. Cut markup is dropped:
        it is no text of the answer.
        """


class ToolParser:
    """Finds calls in text that comes in pieces.

    Args:
        markers: what opens a region anywhere.
        region: makes the reader of one; it is told the marker, empty where there was none.
        first: a character that opens a region where nothing was said before it, as ``{``.

    White space around calls belongs to no content; text that proves to be no call is content, its
    marker and all.
    """

    def __init__(
        self, markers: Sequence[str], region: Callable[[str], CallRegion], *, first: str = ""
    ) -> None:
        self._markers, self._first, self._make = tuple(markers), first, region
        self._matcher = StopMatcher(self._markers)
        self._region: CallRegion | None = None
        self._raw: list[str] = []  # of a region that may yet be plain text
        self._space = ""
        self._is_at_start = True
        self._has_called = False
        self._follows_call = False

    def push(self, text: str) -> list[Event]:
        """Take the next text; returns the events that are certain now."""
        found: list[Event] = []
        while text:
            text = self._scan(text, found) if self._region is None else self._read(text, found)
        return found

    def flush(self, *, must_call: bool = False) -> list[Event]:
        """Return what was held back, at the end of the text.

        The beginning of a call is dropped if it follows a call, or if ``must_call``: nothing but a
        call may be there. Else it is content.
        """
        found: list[Event] = []
        is_cut = self._follows_call or must_call
        if self._region is not None:
            found += self._region.flush()
            self._has_called |= self._region.is_call
            if not self._region.is_call and not is_cut:
                self._say("".join(self._raw), found)
            self._region, self._raw = None, []
        held = self._matcher.flush()
        if not is_cut:
            self._say(held, found)
        if not self._has_called and self._space:
            found.append(ContentDelta(self._space))
        self._space = ""
        return found

    def _scan(self, text: str, found: list[Event]) -> str:
        """Look for where a call may begin; returns what stands from there on."""
        if self._first and self._is_at_start:
            begun = text.lstrip(SPACE)
            if begun.startswith(self._first):
                self._space += text[: len(text) - len(begun)]
                self._open("")
                return begun
            self._is_at_start = not begun
        self._say(self._matcher.push(text), found)
        if self._matcher.found is None:
            return ""
        marker, rest = self._matcher.found, self._matcher.rest
        self._matcher = StopMatcher(self._markers)
        self._open(marker)
        return rest

    def _open(self, marker: str) -> None:
        self._region, self._raw, self._is_at_start = self._make(marker), [marker], False

    def _read(self, text: str, found: list[Event]) -> str:
        region = self._region
        assert region is not None
        was_call = region.is_call
        found += region.push(text)
        if not was_call:
            self._raw.append(text)
        if region.rest is None:
            return ""
        rest, self._region = region.rest, None
        if region.is_call:
            self._has_called = self._follows_call = True
        else:
            raw = "".join(self._raw)
            self._say(raw[: len(raw) - len(rest)], found)
        self._raw = []
        return rest

    def _say(self, text: str, found: list[Event]) -> None:
        if self._follows_call:
            text = text.lstrip(SPACE)
        if not text:
            return
        self._follows_call = False
        whole = self._space + text
        kept = whole.rstrip(SPACE)
        self._space = whole[len(kept) :]
        if kept:
            found.append(ContentDelta(kept))
