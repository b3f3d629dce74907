"""Setup collectives for a rank's executable."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Mapping

import msgspec

from tilewright.distributed.channel import Address, RankListener, call
from tilewright.distributed.group import (
    LOADING_SECONDS,
    LOOK_SECONDS,
    Follower,
    Leader,
    hang_up,
)
from tilewright.errors import RankError


class SetupCollectives:
    """Access to the group during setup, and connections for use in steps.

    ``limit_s`` is a collective's timeout in seconds.
    """

    def __init__(self, group: Leader | Follower, token: bytes, limit_s: float) -> None:
        self._group, self._token, self.limit_s = group, token, limit_s
        self.rank, self.size = group.rank, group.size

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return every rank's data in rank order. All ranks must call this method."""
        return self._group.all_gather(data)

    def least(self, limits: Mapping[str, int]) -> dict[str, int]:
        """Return the minimum of each limit over all ranks. All ranks must call this method."""
        gathered = self.all_gather(msgspec.json.encode(dict(limits)))
        found = [msgspec.json.decode(each, type=dict[str, int]) for each in gathered]
        return {name: min(each[name] for each in found) for name in limits}

    def connect(self) -> dict[int, socket.socket]:
        """Return a socket to every other rank, by rank. All ranks must call this method.

        The sockets are closed at the group's end.

        Raises:
            ConfigError, RankError: A rank cannot be reached.
        """
        group, own = self._group, self._group.address
        if own.path is not None:
            own = Address(path=own.path.with_name(f"{own.path.name}.{self.rank}"))
        else:
            own = Address(own.host)
        listener = RankListener(own, self._token)
        try:
            addresses = self.all_gather(str(listener.address).encode())
            found = {}
            for rank in range(self.rank):
                where = Address.parse(addresses[rank].decode())
                found[rank] = call(where, self.rank, self._token, seconds=LOADING_SECONDS)
            deadline = time.monotonic() + LOADING_SECONDS
            while len(found) < self.size - 1:
                came = listener.accept(min(deadline, time.monotonic() + LOOK_SECONDS))
                if came is not None:
                    found[came[0]] = came[1]
                    continue
                if isinstance(group, Leader):
                    group.check()
                if time.monotonic() > deadline:
                    raise RankError(f"rank {self.rank}: others did not come within the limit")
        finally:
            listener.close()
        if isinstance(group, Leader):
            for each in found.values():
                group.abort_with(functools.partial(hang_up, each))
        return found

    def check(self) -> None:
        """Raise the group's failure on rank 0. A follower ends with rank 0."""
        if isinstance(self._group, Leader):
            self._group.check()

    def abort_with(self, abort: Callable[[], object], *, has_limit: bool = False) -> None:
        """Register a function for the failure or end of the group. It runs in another thread.

        ``abort`` must not block. Unless the blocked operation ``has_limit``, rank 0 ends the group
        if a step takes `LOADING_SECONDS`.
        """
        if isinstance(self._group, Leader):
            self._group.abort_with(abort)
            if not has_limit:
                self._group.step_limit_s = LOADING_SECONDS
