"""What a rank's executable may ask of the others of its group."""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Callable, Mapping

import msgspec

from tilewright.distributed.channel import Address, Listener, call
from tilewright.distributed.group import (
    LOADING_SECONDS,
    LOOK_SECONDS,
    Follower,
    Leader,
    hang_up,
)
from tilewright.errors import RankError


class Peers:
    """What a rank's executable may ask of the others while it is made ready, and where it finds
    them in its steps.

    ``limit_s``: how long one of them may take until an exchange gives up.
    """

    def __init__(self, group: Leader | Follower, token: bytes, limit_s: float) -> None:
        self._group, self._token, self.limit_s = group, token, limit_s
        self.rank, self.size = group.rank, group.size

    def all_gather(self, data: bytes) -> list[bytes]:
        """What every rank gives, in their order; all ranks must call it."""
        return self._group.all_gather(data)

    def least(self, limits: Mapping[str, int]) -> dict[str, int]:
        """The least that any rank has of each limit; all ranks must call it."""
        gathered = self.all_gather(msgspec.json.encode(dict(limits)))
        found = [msgspec.json.decode(each, type=dict[str, int]) for each in gathered]
        return {name: min(each[name] for each in found) for name in limits}

    def connect(self) -> dict[int, socket.socket]:
        """A socket to every other rank, by rank, which ends with the group; all ranks must call it.

        Raises:
            ConfigError, RankError: where one cannot be reached.
        """
        group, own = self._group, self._group.address
        if own.path is not None:
            own = Address(path=own.path.with_name(f"{own.path.name}.{self.rank}"))
        else:
            own = Address(own.host)
        listener = Listener(own, self._token)
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
        """Raise the group's failure where rank 0 knows of one; a follower ends with rank 0."""
        if isinstance(self._group, Leader):
            self._group.check()

    def abort_with(self, abort: Callable[[], object], *, has_limit: bool = False) -> None:
        """Have ``abort``, which must not wait, called from another thread where the group fails, or
        ends. Unless what a rank waits for there ``has_limit`` of its own, rank 0 ends a group of
        which a step takes `LOADING_SECONDS`.
        """
        if isinstance(self._group, Leader):
            self._group.abort_with(abort)
            if not has_limit:
                self._group.step_limit_s = LOADING_SECONDS
