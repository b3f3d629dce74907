"""What a data set is to a batch: rows that become requests, and a form for their answers."""

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
"""Tokens of an answer to a plain row that says nothing of its length."""


class _DatasetEnd(msgspec.Struct):
    error: object = None


_ERROR = msgspec.json.Decoder(_DatasetEnd)


class DataSet(Protocol):
    """The rows of a data set, each known by its number from 0.

    Attributes:
        name: what it is, for people.
        suffixes: how the names of outputs may end.
        content_hash: of all that rows are made of.
    """

    @property
    def name(self) -> str: ...

    @property
    def suffixes(self) -> tuple[str, ...]: ...

    @property
    def content_hash(self) -> str: ...

    def __len__(self) -> int: ...

    def length(self, row: int) -> int:
        """The most tokens of a row's answer, as far as the row says; 0 where it does not."""

    def item(self, row: int) -> Item:
        """A row as the engine is asked; raises ApiError 400 for one that cannot be read."""

    def write(self, path: Path, records: Iterable[Record]) -> None:
        """Write the answers of rows, in the order in which they are given."""

    def num_failed(self, path: Path) -> int:
        """Count the rows of an output that were not answered.

        Raises:
            ConfigError: for a file that `write` has not made.
        """


def file_hash(path: Path) -> str:
    """The SHA-256 of a file's bytes, as hexadecimal digits.

    Raises:
        ConfigError: where it cannot be read.
    """
    try:
        with open_regular(path) as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"data set {path}: {reason}") from None


def bad_row(place: str, said: str, code: str = "invalid_value") -> ApiError:
    """A row that cannot be read, with the place where it stands."""
    return ApiError(400, code, f"{place}: {said}")


def check_size(place: str, size: int) -> None:
    """Refuse a row that is larger than a server would take; raises ApiError."""
    if size > MAX_BODY:
        said = f"{size} bytes; allowed: up to {MAX_BODY} a row"
        raise bad_row(place, said, "too_large")


def spent(record: Record, answer_column: str) -> dict[str, Any]:
    """The columns that an answer adds to those of a plain row."""
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
    """Lines of JSON, as they are or as the elements of one list.

    Raises:
        OSError: where they cannot be written.
    """
    before, between, after = (b"[\n", b",\n", b"\n]\n") if is_list else (b"", b"\n", b"\n")
    with path.open("wb") as file:
        lead = before
        for line in lines:
            file.write(lead + line)
            lead = between
        file.write(after if lead is between else before + after)


def count_errors(lines: Iterable[bytes], path: Path) -> int:
    """Count the objects of an output whose ``error`` says something.

    Raises:
        ConfigError: where one of them is no object.
    """
    try:
        return sum(_ERROR.decode(line).error is not None for line in lines)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        said = "is there already, and no output of a batch; allowed: a new file"
        raise ConfigError(f"--output {path}: {said}") from None


def encode(value: object) -> bytes:
    """A value as one line of JSON."""
    return msgspec.json.encode(value)
