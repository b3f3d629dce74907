"""Stored responses for later requests, in memory. The oldest responses are dropped first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tilewright.serve.responses.items import Item

MAX_STORED, MAX_STORED_BYTES = 4096, 64 << 20
_REFERENCE = 8


@dataclass(frozen=True, slots=True)
class Stored:
    """A response with its conversation.

    Attributes:
        body: The response.
        given: Request items.
        before: Earlier response items.
        num_bytes: JSON size of ``body`` without items, plus 8 bytes per item.
    """

    body: dict[str, Any]
    given: Sequence[Item]
    before: Sequence[Item]
    num_bytes: int

    @property
    def conversation(self) -> list[Item]:
        """Return the conversation in order: ``before``, the request's items, the output."""
        return [*self.before, *self.given, *self.body["output"]]


class ResponseStore:
    """Responses by client and id. The client is the number of an API key."""

    def __init__(self, *, most: int = MAX_STORED, most_bytes: int = MAX_STORED_BYTES) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._found: OrderedDict[tuple[str, str], Stored] = OrderedDict()
        self._items: dict[int, tuple[int, int]] = {}  # id() to number of responses and size
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._found)

    def add(
        self, client: str, body: dict[str, Any], given: Sequence[Item], before: Sequence[Item]
    ) -> None:
        """Keep a response. Drop the oldest responses over the limits.

        A shared item counts once, until its last response is dropped.
        """
        items = [*before, *given, *body["output"]]
        size = len(msgspec.json.encode({**body, "output": []})) + _REFERENCE * len(items)
        self._found[client, body["id"]] = Stored(body, given, before, size)
        self._num_bytes += size
        for item in items:
            count, size = self._items.get(id(item), (0, 0))
            if not count:
                size = len(msgspec.json.encode(item))
                self._num_bytes += size
            self._items[id(item)] = count + 1, size
        while len(self._found) > self._most or self._num_bytes > self._most_bytes:
            _, dropped = self._found.popitem(last=False)
            self._release(dropped)

    def find(self, client: str, response_id: str) -> Stored | None:
        """Find a client's response, which becomes the newest."""
        stored = self._found.get((client, response_id))
        if stored is not None:
            self._found.move_to_end((client, response_id))
        return stored

    def remove(self, client: str, response_id: str) -> bool:
        """Remove a client's response. Return whether there was one."""
        stored = self._found.pop((client, response_id), None)
        if stored is not None:
            self._release(stored)
        return stored is not None

    def _release(self, stored: Stored) -> None:
        self._num_bytes -= stored.num_bytes
        for item in stored.conversation:
            count, size = self._items.pop(id(item))
            if count > 1:
                self._items[id(item)] = count - 1, size
            else:
                self._num_bytes -= size
