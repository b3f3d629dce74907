"""Finds stop strings in text that comes in pieces; knows no tokens."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Lets text through up to the first stop string that is complete.

    Where two are complete at the same character, the longer one counts. What may be the beginning
    of a stop string is held back until that is known, so the text let through is the same however
    it is cut into pieces.

    Attributes:
        found: the stop string that was found, or None.
        rest: what stood behind it in the piece that completed it.
    """

    __slots__ = ("_firsts", "_held", "_includes", "_stops", "found", "rest")

    def __init__(self, stops: Sequence[str], *, includes: bool = False) -> None:
        assert all(stops), "an empty stop string"
        self.found: str | None = None
        self.rest = ""
        self._stops = sorted(set(stops), key=len, reverse=True)
        self._firsts = "".join([stop[0] for stop in self._stops])
        self._includes = includes
        self._held = ""

    @property
    def has_stops(self) -> bool:
        """Whether there is anything to be found."""
        return bool(self._stops)

    def push(self, text: str) -> str:
        """What is certain to be no stop string, now that ``text`` has come; nothing after one."""
        if self.found is not None or not text:
            return ""
        if not self._stops:
            return text
        whole = self._held + text
        ends = [
            (at + len(stop), -len(stop), stop)
            for stop in self._stops
            if (at := whole.find(stop)) >= 0
        ]
        if ends:
            end, _, self.found = min(ends)
            self._held, self.rest = "", whole[end:]
            return whole[: end if self._includes else end - len(self.found)]
        keep = self._beginning(whole)
        self._held = whole[len(whole) - keep :]
        return whole[: len(whole) - keep]

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        text, self._held = self._held, ""
        return text if self.found is None else ""

    def _beginning(self, text: str) -> int:
        """How many last characters may be the beginning of a stop string."""
        longest = len(self._stops[0]) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if text[start] in self._firsts:
                tail = text[start:]
                if any(len(tail) < len(stop) and stop.startswith(tail) for stop in self._stops):
                    return len(tail)
        return 0
