"""OpenAI's batch format: a request per line, with the user's id."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from tilewright.batch.dataset import (
    bad_row,
    check_size,
    count_errors,
    encode,
    file_hash,
    write_json,
)
from tilewright.batch.lines import LineFile
from tilewright.batch.records import Item, Record
from tilewright.errors import one_line

URLS = {"/v1/chat/completions": True, "/v1/completions": False}
"""Allowed URLs of a request, and whether they are chats."""

_MAX_READ = 64 << 20  # maximum bytes in a line for reading its id


class _BatchRequestLine(msgspec.Struct):
    custom_id: str
    url: str
    body: msgspec.Raw
    method: str = "POST"


class _Sizes(msgspec.Struct):
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n: Any = None


class _Glance(msgspec.Struct):
    """Fields read in advance."""

    custom_id: Any = None
    body: msgspec.Raw = msgspec.Raw(b"null")


_LINE, _GLANCE = msgspec.json.Decoder(_BatchRequestLine), msgspec.json.Decoder(_Glance)
_SIZES = msgspec.json.Decoder(_Sizes)
_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


class OpenAiRows:
    """The requests in a batch file, as for OpenAI's API and vLLM's ``run-batch``."""

    suffixes: tuple[str, ...] = (".jsonl",)

    def __init__(self, path: Path, lines: LineFile) -> None:
        self.name = "OpenAI's batch"
        self.content_hash = file_hash(path)
        self._lines = lines
        self._ids: list[str | None] = []
        self._lengths: list[int] = []
        self._first: dict[str, int] = {}
        for row in range(len(lines)):
            self._look_at(row)

    def __len__(self) -> int:
        return len(self._lines)

    def length(self, row: int) -> int:
        """Return the maximum output tokens over all choices, 0 if unknown."""
        return self._lengths[row]

    def item(self, row: int) -> Item:
        """Read the request in a row's line.

        Raises:
            ApiError: 400 for an invalid line, or an earlier line's id.
        """
        place = self._lines.place(row)
        check_size(place, self._lines.size(row))
        try:
            line = _LINE.decode(self._lines[row])
        except _ERRORS as error:
            raise bad_row(place, f"no line of a batch: {one_line(error)}") from None
        first = self._first[line.custom_id]
        if first != row:
            said = f"custom_id {line.custom_id[:100]!r} is that of {self._lines.place(first)} too"
            raise bad_row(place, f"{said}; allowed: each once", "duplicate_id")
        if line.url not in URLS:
            said = f"url {line.url[:100]!r}; allowed: {', '.join(URLS)}"
            raise bad_row(place, said, "unsupported")
        if line.method.upper() != "POST":
            raise bad_row(place, f"method {line.method[:20]!r}; allowed: POST", "unsupported")
        return Item(row, URLS[line.url], bytes(line.body))

    def write(self, path: Path, records: Iterable[Record]) -> None:
        """Write lines as OpenAI's API does: id, and response or error."""
        write_json(path, map(self._line, records))

    def num_failed(self, path: Path) -> int:
        """Count the lines with an error."""
        lines = LineFile(path)
        return count_errors((lines[row] for row in range(len(lines))), path)

    def _line(self, record: Record) -> bytes:
        digest = hashlib.sha256(f"{self.content_hash} {record.row}".encode()).hexdigest()[:24]
        response = {
            "status_code": record.status,
            "request_id": f"req_{digest}",
            "body": record.body,
        }
        error = None
        if not record.is_ok:
            failure = record.error()
            error = {"code": failure["code"], "message": failure["message"]}
        custom_id = self._ids[record.row]
        found = {"id": f"batch_req_{digest}", "custom_id": custom_id, "response": response}
        return encode({**found, "error": error})

    def _look_at(self, row: int) -> None:
        """Store a line's id and its output length. Errors are reported by `item`."""
        known, length = None, 0
        if self._lines.size(row) <= _MAX_READ:
            with suppress(*_ERRORS):
                seen = _GLANCE.decode(self._lines[row])
                if isinstance(seen.custom_id, str):
                    known = seen.custom_id
                    self._first.setdefault(known, row)
                sizes = _SIZES.decode(seen.body)  # after the id, because any body has an id
                most = sizes.max_completion_tokens or sizes.max_tokens
                length = _count(most) * max(1, _count(sizes.n))
        self._ids.append(known)
        self._lengths.append(length)


def _count(value: object) -> int:
    return value if isinstance(value, int) and 0 < value < 1 << 31 else 0
