"""A batch's records: requests and results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from tilewright.serve.web.errors import ApiError

OK = 200


@dataclass(frozen=True, slots=True)
class Item:
    """A request of a data set, with the body of a chat or completion."""

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
        """Whether the row was answered."""
        return self.status == OK

    def said(self) -> dict[str, Any]:
        """The body of the answer as a value of JSON."""
        found: dict[str, Any] = msgspec.json.decode(self.body)
        return found

    def error(self) -> dict[str, Any]:
        """The code and the sentence of a row that was not answered."""
        found: dict[str, Any] = self.said()["error"]
        return found


def refused(row: int, error: ApiError) -> Record:
    """The record of a row that cannot be answered."""
    return Record(row=row, status=error.status, body=msgspec.Raw(error.body()))
