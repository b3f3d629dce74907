"""Protocol for data sets in batches, with shared functions for rows and outputs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import msgspec

from tilewright.batch.records import Item, Record
from tilewright.errors import ConfigError
from tilewright.serve.web.errors import ApiError
from tilewright.serve.web.settings import MAX_BODY
from tilewright.utils.files import open_regular

MAX_TOKENS = 512
"""Output tokens of a plain row without a length."""


class _DatasetEnd(msgspec.Struct):
    error: object = None


_ERROR = msgspec.json.Decoder(_DatasetEnd)


class DataSet(Protocol):
    """Rows numbered from 0.

    Attributes:
        name: name for messages.
        suffixes: allowed suffixes of outputs.
        content_hash: hash over all rows.
    """

    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]: ...

    @property
    def content_hash(self) -> str: ...

    def __len__(self) -> int: ...

    def length(self, row: int) -> int:
        """Return a row's maximum output tokens, 0 if unknown."""

    def item(self, row: int) -> Item:
        """Return a row as an engine request. Raises ApiError 400 for an unreadable row."""

    def write(self, path: Path, records: Iterable[Record]) -> None:
        """Write the answers in ``records`` order."""

    def num_failed(self, path: Path) -> int:
        """Count the failed rows in an output.

        Raises:
            ConfigError: for a file that `write` has not written.
        """


def file_hash(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal digits.

    Raises:
        ConfigError: if the file cannot be read.
    """
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"data set {path}: {reason}") from None


def bad_row(place: str, said: str, code: str = "invalid_value") -> ApiError:
    """Return the error for an unreadable row with its place."""
    return ApiError(400, code, f"{place}: {said}")


def check_size(place: str, size: int) -> None:
    """Raise ApiError for a row above the server's limit."""
    if size > MAX_BODY:
        said = f"{size} bytes; allowed: up to {MAX_BODY} a row"
        raise bad_row(place, said, "too_large")


def spent(record: Record, answer_column: str) -> dict[str, Any]:
    """Return the columns that an answer adds to a plain row."""
    if not record.is_ok:
        none = {"prompt_tokens": None, "completion_tokens": None}
        return {answer_column: None, "finish_reason": "error", **none}
    choice = record.said()["choices"][0]
    return {
        answer_column: choice["text"] if "text" in choice else choice["message"]["content"],
        "finish_reason": choice["finish_reason"],
        "prompt_tokens": record.prompt_tokens,
        "completion_tokens": record.completion_tokens,
    }


def write_json(path: Path, lines: Iterable[bytes], *, is_list: bool = False) -> None:
    """Write JSON lines, or with ``is_list`` a JSON list of them.

    Raises:
        OSError: if the file cannot be written.
    """
    before, between, after = (b"[\n", b",\n", b"\n]\n") if is_list else (b"", b"\n", b"\n")
    with path.open("wb") as file:
        lead = before
        for line in lines:
            file.write(lead + line)
            lead = between
        file.write(after if lead is between else before + after)


def count_errors(lines: Iterable[bytes], path: Path) -> int:
    """Return the object count with an ``error``.

    Raises:
        ConfigError: if a line is no object.
    """
    try:
        return sum(_ERROR.decode(line).error is not None for line in lines)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = "is there already, and no output of a batch; allowed: a new file"
        raise ConfigError(f"--output {path}: {said}") from None


def encode(value: object) -> bytes:
    """Return a value as a line of JSON."""
    return msgspec.json.encode(value)
