"""Converts Python literals to JSON, for models with Python function calls."""

from __future__ import annotations

import json
import math
import re
from typing import Any

_WORDS = {"true": True, "false": False, "null": None, "True": True, "False": False, "None": None}
_MAX_DEPTH = 64
_MAX_DIGITS = 1024
_STRING = re.compile(
    r'"""((?:[^\\]|\\.)*?)"""|\'\'\'((?:[^\\]|\\.)*?)\'\'\''
    r'|"((?:[^"\\]|\\.)*)"|\'((?:[^\'\\]|\\.)*)\'',
    re.DOTALL,
)
_NUMBER = re.compile(r"[-+]?(?:[0-9]+(\.[0-9]*)?|(\.[0-9]+))([eE][-+]?[0-9]+)?")
_WORD = re.compile(r"[A-Za-z]+")
_BLANK = re.compile(r"[ \t\r\n]*")
_ESCAPE = re.compile(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U(000[0-9a-fA-F]{5}|0010[0-9a-fA-F]{4})|(.))",
    re.DOTALL,
)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}
_LETTERS |= {each: each for each in "\\'\"/"}


def json_of(source: str) -> str:
    """Return a literal as JSON. Other text becomes a JSON string.

    The words of JSON are also literals, because a model may write them.
    """
    text = source.strip(" \t\r\n")
    reader = _Reader(text)
    try:
        value = reader.value(0)
        reader.blank()
        if reader.at == len(text):
            return json.dumps(value, ensure_ascii=False)
    except _NoLiteralError:
        pass
    return json.dumps(text, ensure_ascii=False)


class _NoLiteralError(Exception):
    """The text is no literal."""


class _Reader:
    """Reads a literal from position ``at``."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def blank(self) -> None:
        """Skip white space."""
        self.at = self._match(_BLANK).end()

    def value(self, depth: int) -> Any:
        """Read the value at the current position."""
        if depth > _MAX_DEPTH:
            raise _NoLiteralError
        self.blank()
        first = self.text[self.at : self.at + 1]
        if first in ("[", "("):
            return self._items("]" if first == "[" else ")", depth)
        if first == "{":
            return self._pairs(depth)
        if first in ("'", '"'):
            return self._string()
        if first.isalpha():
            word = self._match(_WORD).group()
            if word not in _WORDS:
                raise _NoLiteralError
            self.at += len(word)
            return _WORDS[word]
        return self._number()

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str]:
        match = pattern.match(self.text, self.at)
        if match is None:
            raise _NoLiteralError
        return match

    def _take(self, text: str) -> bool:
        self.blank()
        is_there = self.text.startswith(text, self.at)
        self.at += len(text) * is_there
        return is_there

    def _items(self, end: str, depth: int) -> list[Any]:
        self.at += 1
        items: list[Any] = []
        while not self._take(end):
            if items and not self._take(","):
                raise _NoLiteralError
            if items and self._take(end):
                break
            items.append(self.value(depth + 1))
        return items

    def _pairs(self, depth: int) -> dict[str, Any]:
        self.at += 1
        pairs: dict[str, Any] = {}
        while not self._take("}"):
            if pairs and not self._take(","):
                raise _NoLiteralError
            if pairs and self._take("}"):
                break
            self.blank()
            key = self._string()
            if not self._take(":"):
                raise _NoLiteralError
            pairs[key] = self.value(depth + 1)
        return pairs

    def _string(self) -> str:
        match = self._match(_STRING)
        self.at = match.end()
        text = _ESCAPE.sub(_character, next(part for part in match.groups() if part is not None))
        # join separately escaped surrogates; a single surrogate becomes U+FFFD
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _number(self) -> int | float:
        match = self._match(_NUMBER)
        self.at = match.end()
        if len(match.group()) > _MAX_DIGITS:
            raise _NoLiteralError
        if not any(match.groups()):
            return int(match.group())
        value = float(match.group())
        if not math.isfinite(value):
            raise _NoLiteralError
        return value


def _character(match: re.Match[str]) -> str:
    code = match.group(1) or match.group(2) or match.group(3)
    if code is not None:
        return chr(int(code, 16))
    return _LETTERS.get(match.group(4), match.group())
