"""The queue of requests without a slot."""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

from tilewright.runtime.scheduling.request_state import RequestState


@dataclass(slots=True)
class _PriorityQueue:
    """A priority's requests: preempted ones by arrival, and a queue per client."""

    resumed: list[RequestState] = field(default_factory=list)
    clients: OrderedDict[str, deque[RequestState]] = field(default_factory=OrderedDict)


class WaitingQueue:
    """Requests without a slot, iterated in the order of admission.

    Lower priority numbers are first. Within a priority, preempted requests are first, by arrival.
    Then the clients take turns, with their requests by arrival. The queue must not change during
    an iteration.
    """

    def __init__(self) -> None:
        self._levels: dict[int, _PriorityQueue] = {}
        self._resumed: set[RequestState] = set()
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[RequestState]:
        for priority in sorted(self._levels):
            level = self._levels[priority]
            yield from level.resumed
            if len(level.clients) == 1:
                (queue,) = level.clients.values()
                yield from queue
                continue
            for turn in zip_longest(*level.clients.values()):
                yield from (request for request in turn if request is not None)

    def add(self, request: RequestState) -> None:
        """Add a new request after the requests of its client and priority."""
        level = self._levels.setdefault(request.priority, _PriorityQueue())
        level.clients.setdefault(request.client, deque()).append(request)
        self._num_waiting += 1

    def put_back(self, request: RequestState) -> None:
        """Add a preempted request before new requests."""
        level = self._levels.setdefault(request.priority, _PriorityQueue())
        insort(level.resumed, request, key=lambda each: each.order)
        self._resumed.add(request)
        self._num_waiting += 1

    def leave(self, request: RequestState) -> bool:
        """Remove a request. Its client moves to the turn's end.

        Return whether the request was in the queue.
        """
        level = self._levels.get(request.priority)
        if level is None:
            return False
        if request in self._resumed:
            self._resumed.remove(request)
            level.resumed.remove(request)
        else:
            queue = level.clients.get(request.client)
            if queue is None or request not in queue:
                return False
            queue.remove(request)
            level.clients.move_to_end(request.client)
            if not queue:
                del level.clients[request.client]
        if not level.resumed and not level.clients:
            del self._levels[request.priority]
        self._num_waiting -= 1
        return True
