"""Requests and results in a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from tilewright.serve.web.errors import ApiError

OK = 200


@dataclass(frozen=True, slots=True)
class Item:
    """A data set's request, with a chat or completion body."""

    row: int
    is_chat: bool
    body: bytes


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a request. ``body`` is a server's response, or its error if ``status`` is
    not 200.
    """

    row: int
    status: int = OK
    prompt_tokens: int = 0
    completion_tokens: int = 0
    body: msgspec.Raw

    @property
    def is_ok(self) -> bool:
        """Return whether the row has an answer."""
        return self.status == OK

    def said(self) -> dict[str, Any]:
        """Return the answer's decoded JSON body."""
        found: dict[str, Any] = msgspec.json.decode(self.body)
        return found

    def error(self) -> dict[str, Any]:
        """Return the error's code and message."""
        found: dict[str, Any] = self.said()["error"]
        return found


def refused(row: int, error: ApiError) -> Record:
    """Return the record of a row without an answer."""
    return Record(row=row, status=error.status, body=msgspec.Raw(error.body()))
