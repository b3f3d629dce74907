"""Responses that later requests continue, in memory, the oldest dropped first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tilewright.serve.responses.items import Item

MAX_STORED, MAX_STORED_BYTES = 4096, 64 << 20


@dataclass(frozen=True, slots=True)
class Stored:
    """A response with its conversation.

    Attributes:
        body: The response.
        given: Items of its request.
        before: Items of the responses that it continues.
        num_bytes: Size of ``body`` and ``given`` as JSON.
    """

    body: dict[str, Any]
    given: Sequence[Item]
    before: Sequence[Item]
    num_bytes: int

    @property
    def conversation(self) -> list[Item]:
        """All items, the response's last."""
        return [*self.before, *self.given, *self.body["output"]]


class ResponseStore:
    """Responses by client and id. A client is the number of its key."""

    def __init__(self, *, most: int = MAX_STORED, most_bytes: int = MAX_STORED_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._found: OrderedDict[tuple[str, str], Stored] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._found)

    def add(
        self, client: str, body: dict[str, Any], given: Sequence[Item], before: Sequence[Item]
    ) -> None:
        """Keep a response, and drop the oldest ones that there is no room for."""
        size = len(msgspec.json.encode((body, given)))
        self._found[client, body["id"]] = Stored(body, given, before, size)
        self._num_bytes += size
        while len(self._found) > self._most or self._num_bytes > self._most_bytes:
            _, dropped = self._found.popitem(last=False)
            self._num_bytes -= dropped.num_bytes

    def find(self, client: str, response_id: str) -> Stored | None:
        """Find a client's response, which becomes the newest."""
        found = self._found.get((client, response_id))
        if found is not None:
            self._found.move_to_end((client, response_id))
        return found

    def remove(self, client: str, response_id: str) -> bool:
        """Remove a client's response. Return whether there was one."""
        found = self._found.pop((client, response_id), None)
        self._num_bytes -= found.num_bytes if found is not None else 0
        return found is not None
