"""A JSON value's scanner by character. Stores the position only, not the value."""

from __future__ import annotations

import re
from enum import Enum, auto

_SPACE = " \t\r\n"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_LONGEST_NUMBER = 1024
_WORDS = {"t": "rue", "f": "alse", "n": "ull"}


class At(Enum):
    """Position in a JSON value, which determines the next characters."""

    VALUE = auto()
    FIRST_ITEM = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    BEHIND = auto()
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    NUMBER = auto()
    WORD = auto()
    DONE = auto()


class JsonScanner:
    """A JSON checker. Strings may contain control characters, which models write.

    Attributes:
        at: the position.
        in_key: whether the current or the last string is a key.
    """

    def __init__(self) -> None:
        self.at = At.VALUE
        self.in_key = False
        self._ends: list[str] = []
        self._left = ""  # of a word
        self._number = ""
        self._num_hex = 0

    @property
    def is_done(self) -> bool:
        """Return whether the JSON value is complete."""
        return self.at is At.DONE

    @property
    def depth(self) -> int:
        """The number of open objects and lists."""
        return len(self._ends)

    def step(self, character: str) -> bool:
        """Take the next character. Return False for invalid JSON."""
        if self.at is At.STRING:
            if character == '"':
                self._close(At.COLON if self.in_key else None)
            elif character == "\\":
                self.at = At.ESCAPE
            return True
        if self.at in (At.ESCAPE, At.HEX):
            return self._escaped(character)
        if self.at is At.NUMBER:
            if character in "0123456789+-.eE":
                self._number += character
                return len(self._number) <= _LONGEST_NUMBER
            if _NUMBER.fullmatch(self._number) is None:
                return False
            self._close()
        if self.at is At.WORD:
            if character != self._left[0]:
                return False
            self._left = self._left[1:]
            if not self._left:
                self._close()
            return True
        return character in _SPACE or self._structural(character)

    def _structural(self, character: str) -> bool:
        if self._ends and character == self._ends[-1]:
            if self.at not in (At.BEHIND, At.FIRST_KEY, At.FIRST_ITEM):
                return False
            self._ends.pop()
            self._close()
        elif self.at in (At.VALUE, At.FIRST_ITEM):
            return self._begin(character)
        elif self.at in (At.KEY, At.FIRST_KEY) and character == '"':
            self.at, self.in_key = At.STRING, True
        elif self.at is At.COLON and character == ":":
            self.at = At.VALUE
        elif self.at is At.BEHIND and character == ",":
            self.at = At.KEY if self._ends[-1] == "}" else At.VALUE
        else:
            return False
        return True

    def _begin(self, character: str) -> bool:
        if character == "{":
            self._ends.append("}")
            self.at = At.FIRST_KEY
        elif character == "[":
            self._ends.append("]")
            self.at = At.FIRST_ITEM
        elif character == '"':
            self.at, self.in_key = At.STRING, False
        elif character in "-0123456789":
            self.at, self._number = At.NUMBER, character
        elif character in _WORDS:
            self.at, self._left = At.WORD, _WORDS[character]
        else:
            return False
        return True

    def _escaped(self, character: str) -> bool:
        if self.at is At.HEX:
            self._num_hex -= 1
            self.at = At.HEX if self._num_hex else At.STRING
            return character in "0123456789abcdefABCDEF"
        self.at, self._num_hex = (At.HEX, 4) if character == "u" else (At.STRING, 0)
        return character in '"\\/bfnrtu'

    def _close(self, at: At | None = None) -> None:
        """End a value, or with ``at`` a key."""
        self.at = at or (At.BEHIND if self._ends else At.DONE)


def escaped(character: str, at: At) -> str:
    """Return a character as valid JSON. Control characters in strings become escapes."""
    if at is At.STRING and character < " ":
        return f"\\u{ord(character):04x}"
    return character
