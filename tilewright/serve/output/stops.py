"""Finds stop strings in streamed text. Knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text up to the first complete stop string.

    If two strings end at the same character, the longer string is found. A possible beginning of a
    stop string is delayed, so the result does not depend on the stream's chunks.

    Attributes:
        found: the found stop string, or None.
        rest: text after the stop string in the chunk that completed it.
    """

    __slots__ = ("_firsts", "_includes", "_pending", "_stops", "found", "rest")

    def __init__(self, stops: Sequence[str], *, includes: bool = False) -> None:
        assert all(stops), "an empty stop string"
        self.found: str | None = None
        self.rest = ""
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._firsts = "".join([stop[0] for stop in self._stops])
        self._includes = includes
        self._pending = ""

    @property
    def has_stops(self) -> bool:
        """Return whether there are stop strings."""
        return bool(self._stops)

    def push(self, text: str) -> str:
        """Return the text before any possible stop string, and nothing after a found string."""
        if self.found is not None or not text:
            return ""
        if not self._stops:
            return text
        whole = self._pending + text
        ends = [
            (at + len(stop), -len(stop), stop)
            for stop in self._stops
            if (at := whole.find(stop)) >= 0
        ]
        if ends:
            end, _, self.found = min(ends)
            self._pending, self.rest = "", whole[end:]
            return whole[: end if self._includes else end - len(self.found)]
        keep = self._beginning(whole)
        self._pending = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """Return the delayed text at the text's end."""
        text, self._pending = self._pending, ""
        return text if self.found is None else ""

    def _beginning(self, text: str) -> int:
        """Return the number of last characters that may begin a stop string."""
        longest = len(self._stops[0]) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if text[start] in self._firsts:
                tail = text[start:]
                if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stops):
                    return len(tail)
        return 0
