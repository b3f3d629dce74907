"""Plain rows: objects with a prompt column, or the ASC24 triples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta

from tilewright.batch.dataset import (
    MAX_TOKENS,
    bad_row,
    check_size,
    count_errors,
    encode,
    spent,
    write_json,
)
from tilewright.batch.lines import LineFile
from tilewright.batch.records import Item, Record
from tilewright.errors import ConfigError, one_line
from tilewright.utils.files import read_regular

_Triple: TypeAlias = tuple[str, Annotated[int, Meta(ge=0)], Annotated[int, Meta(ge=1, le=1 << 31)]]
_TRIPLE = msgspec.json.Decoder(_Triple)
_OBJECT = msgspec.json.Decoder(dict[str, Any])
_LIST = msgspec.json.Decoder(list[msgspec.Raw])
_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_MAX_READ = 64 << 20  # maximum bytes in a row for reading
_LOOKED_AT = 16  # maximum rows for detecting the form
TRIPLE = ("prompt", "prompt_len", "output_len")
"""Column names of a triple in the output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asking:
    """Columns and defaults for requests from plain rows.

    Attributes:
        prompt_column: column with texts, token ids, or chat messages.
        answer_column: name for the answer column.
        is_chat: whether a text is a user message.
        max_tokens: output tokens for rows without a length.
    """

    prompt_column: str = "prompt"
    answer_column: str = "text"
    is_chat: bool = False
    max_tokens: int = MAX_TOKENS

    def item(self, row: int, prompt: object, max_tokens: int, place: str) -> Item:
        """Return the request for a prompt. Raises ApiError for an invalid prompt."""
        body: dict[str, Any] = {"max_tokens": max_tokens}
        is_text = isinstance(prompt, str)
        if is_text and self.is_chat:
            body["messages"] = [{"role": "user", "content": prompt}]
        elif isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            body["messages"] = prompt
        elif is_text or (isinstance(prompt, list) and all(type(e) is int for e in prompt)):
            body["prompt"] = prompt
        else:
            said = f"{self.prompt_column!r} is {type(prompt).__name__}"
            raise bad_row(place, f"{said}; allowed: a text, token ids, or messages")
        try:
            return Item(row, "messages" in body, encode(body))
        except (UnicodeEncodeError, ValueError, TypeError, RecursionError) as error:
            raise bad_row(place, one_line(error)) from None

    def added(self) -> tuple[str, ...]:
        """Return the columns that answers add."""
        return self.answer_column, "finish_reason", "prompt_tokens", "completion_tokens", "error"

    def check_columns(self, columns: Iterable[str], place: str) -> None:
        """Check that a data set has prompts, and no column that answers add.

        Raises:
            ConfigError: with the column's name.
        """
        known = list(columns)
        if self.prompt_column not in known:
            raise ConfigError(
                f"{place}: no column {self.prompt_column!r}; allowed: --prompt-column, one of "
                + ", ".join(map(repr, known[:20]))
            )
        taken = self.taken(known)
        if taken:
            raise ConfigError(f"{place}: {taken}")

    def taken(self, columns: Iterable[str]) -> str:
        """Return an error text for a column that answers add too, or an empty text."""
        known = set(columns)
        taken = [name for name in self.added() if name in known]
        other = "another --answer-column" if taken == [self.answer_column] else "another name"
        return f"has a column {taken[0]!r}, which answers add; allowed: {other}" if taken else ""


class JsonRows(Sequence[Any]):
    """The elements of a JSON list, read on demand."""

    def __init__(self, path: Path, raws: Sequence[msgspec.Raw]) -> None:
        self._path, self._raws = path, raws

    def __len__(self) -> int:
        return len(self._raws)

    def __getitem__(self, index: Any) -> Any:
        return bytes(self._raws[index])

    def size(self, index: int) -> int:
        """Return an element's size in bytes."""
        return len(memoryview(self._raws[index]))

    def place(self, index: int) -> str:
        """Return an element's place for messages."""
        return f"{self._path}: row {index + 1}"


def read_list(path: Path) -> list[msgspec.Raw]:
    """Return a JSON list's elements.

    Raises:
        ConfigError: if the file is unreadable or no JSON list.
    """
    try:
        return _LIST.decode(read_regular(path))
    except (OSError, ValueError) as error:  # msgspec raises ValueErrors
        reason = getattr(error, "strerror", None) or f"no whole JSON list: {one_line(error)}"
        raise ConfigError(f"data set {path}: {reason}") from None
    except RecursionError:
        raise ConfigError(f"data set {path}: nested too deep; allowed: a list of rows") from None


def lines_of(path: Path) -> Iterator[bytes]:
    """Return an output's objects, JSON lines or a list. Raises ConfigError."""
    rows = JsonRows(path, read_list(path)) if path.suffix == ".json" else LineFile(path)
    return (rows[row] for row in range(len(rows)))


class PlainRows:
    """Rows of JSON lines or a JSON list: triples, or objects with a prompt column."""

    suffixes: tuple[str, ...] = (".jsonl", ".json")

    def __init__(self, rows: Any, content_hash: str, asking: Asking) -> None:
        self.content_hash = content_hash
        self._rows, self._asking = rows, asking
        shown = next((row for row in range(min(len(rows), _LOOKED_AT)) if self._kind(row)), 0)
        self._is_triples = self._kind(shown) == b"["
        self.name = "the ASC24 data set" if self._is_triples else "plain rows"
        if self._kind(shown) == b"{":
            try:
                columns = _OBJECT.decode(rows[shown])
            except _ERRORS:
                columns = {asking.prompt_column: None}  # `item` reports the error
            asking.check_columns(columns, rows.place(shown))
        elif self._is_triples and (taken := asking.taken(TRIPLE)):
            raise ConfigError(f"{rows.place(shown)}: {taken}")

    def __len__(self) -> int:
        return len(self._rows)

    def _kind(self, row: int) -> bytes:
        """Return a row's ``[`` or ``{``, else nothing."""
        if self._rows.size(row) > _MAX_READ:
            return b""
        first = self._rows[row].lstrip()[:1]
        return first if first in (b"[", b"{") else b""

    def length(self, row: int) -> int:
        """Return a triple's output length, or the common length for other rows."""
        if self._is_triples and self._rows.size(row) <= _MAX_READ:
            try:
                return _TRIPLE.decode(self._rows[row])[2]
            except _ERRORS:
                return 0
        return 0 if self._is_triples else self._asking.max_tokens

    def item(self, row: int) -> Item:
        """Return a row's request. Raises ApiError 400 for an invalid row."""
        place = self._rows.place(row)
        check_size(place, self._rows.size(row))
        try:
            if self._is_triples:
                prompt, _, most = _TRIPLE.decode(self._rows[row])
                return self._asking.item(row, prompt, most, place)
            columns = _OBJECT.decode(self._rows[row])
        except _ERRORS as error:
            raise bad_row(place, one_line(error)) from None
        name = self._asking.prompt_column
        if name not in columns:
            raise bad_row(place, f"no column {name!r}")
        if taken := self._asking.taken(columns):
            raise bad_row(place, taken)
        return self._asking.item(row, columns[name], self._asking.max_tokens, place)

    def write(self, path: Path, records: Iterable[Record]) -> None:
        """Write objects with row and answer columns. A failed row has an ``error``."""
        write_json(path, map(self._line, records), is_list=path.suffix == ".json")

    def num_failed(self, path: Path) -> int:
        """Return the object count with an ``error``. Rows have no such column."""
        return count_errors(lines_of(path), path)

    def _line(self, record: Record) -> bytes:
        found = {**self._columns(record.row), **spent(record, self._asking.answer_column)}
        if not record.is_ok:
            found["error"] = record.error()["message"]
        return encode(found)

    def _columns(self, row: int) -> dict[str, Any]:
        """Return a row's columns, or the number of an unreadable or conflicting row."""
        try:
            if self._rows.size(row) <= _MAX_READ:
                if self._is_triples:
                    return dict(zip(TRIPLE, _TRIPLE.decode(self._rows[row]), strict=True))
                columns = _OBJECT.decode(self._rows[row])
                if not self._asking.taken(columns):
                    return columns
        except _ERRORS:
            pass
        return {"row": row + 1}
