"""Rank 0 starts the others, or waits for those that torchrun and other machines start."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from tilewright.compiler.child import PYTHON, Child
from tilewright.compiler.distributed.channel import (
    Address,
    Channel,
    ChannelClosedError,
    Listener,
    call,
)
from tilewright.compiler.distributed.group import LOADING_SECONDS, Follower, Leader, Member
from tilewright.compiler.distributed.world import Machines, Place, local_place
from tilewright.compiler.errors import ConfigError, RankError

_LOOK_SECONDS = 0.2


@dataclass(slots=True)
class Ranks:
    """A group that rank 0 has gathered, and what goes with it when it ends."""

    leader: Leader
    token: bytes
    files: contextlib.ExitStack

    def close(self) -> None:
        """End the group."""
        self.leader.close()
        self.files.close()


def gather(
    size: int,
    command: Sequence[str],
    *,
    machines: Machines,
    token: bytes | None,
    limit_s: float,
    place: Place | None = None,
    places: Sequence[str] = (),
) -> Ranks:
    """The group of ``size`` ranks, with this process as rank 0.

    Args:
        size: ranks; those of this machine are started with ``command`` (what follows ``python``),
            as many as the machine's share.
        token: of groups over machines. place: this process's, where something else has started
            all ranks (torchrun): none is started.
        places: what each rank runs on (``GPU 1``), for people.

    Raises:
        ConfigError: where not all ranks came in time.
        RankError: where one ended at once.
    """
    files = contextlib.ExitStack()
    children: dict[int, Child] = {}
    try:
        if place is None and machines.count == 1:
            folder = Path(files.enter_context(tempfile.TemporaryDirectory(prefix="tilewright-")))
            place, wanted = local_place(folder, size), range(1, size)
        elif place is None:
            assert token is not None
            place = Place(0, size, 0, machines.address(), token)
            wanted = range(1, size // machines.count)
        else:
            wanted = range(0)
        listener = Listener(place.address, place.token)
        files.callback(listener.close)
        for rank in wanted:
            children[rank] = start(replace(place, rank=rank, local_rank=rank), command)
        channels = _wait(listener, size, children)
        members = [_member(rank, channels, children, places) for rank in range(1, size)]
    except BaseException:
        for child in children.values():
            child.kill()
            child.close()
        files.close()
        raise
    return Ranks(Leader(members, place.address, limit_s), place.token, files)


def start(place: Place, command: Sequence[str]) -> Child:
    """A process that is a rank of its own."""
    environment = place.environment()
    return Child([*PYTHON, *command], environment=environment, what=f"rank {place.rank}")


def join(place: Place) -> Follower:
    """This process as a follower of the group it was started for.

    Raises:
        ConfigError: where rank 0 is not to be reached.
    """
    connection = call(place.address, place.rank, place.token, seconds=LOADING_SECONDS)
    channel = Channel(connection)
    channel.send(0, os.getpid())
    address = place.address
    if address.path is None:
        address = Address(connection.getsockname()[0])
    return Follower(place.rank, place.size, channel, address)


def serve_machine(machines: Machines, size: int, command: Sequence[str], token: bytes) -> int:
    """Start this further machine's ranks and wait for their end; the exit code of the first that
    failed.
    """
    count = size // machines.count
    first = machines.rank * count
    place = Place(0, size, 0, machines.address(), token)
    children = [
        start(replace(place, rank=first + local, local_rank=local), command)
        for local in range(count)
    ]
    try:
        while True:
            ended = [each.poll() for each in children]
            failed = next((each for each in ended if each is not None and each.code), None)
            if failed is not None:
                raise RankError(f"rank {first + ended.index(failed)}: {failed.last or failed.how}")
            if all(each is not None for each in ended):
                return 0
            time.sleep(_LOOK_SECONDS)
    finally:
        for child in children:
            child.kill()
            child.close()


def _wait(listener: Listener, size: int, children: dict[int, Child]) -> dict[int, Channel]:
    """The channels of all ranks, once every one has come."""
    found: dict[int, Channel] = {}
    deadline = time.monotonic() + LOADING_SECONDS
    while len(found) < size - 1:
        came = listener.accept(min(deadline, time.monotonic() + _LOOK_SECONDS))
        if came is not None:
            rank, connection = came
            if not 1 <= rank < size or rank in found:
                raise ConfigError(f"rank {rank} came twice or to {size} ranks; allowed: each once")
            found[rank] = Channel(connection)
        for rank, child in children.items():
            ended = child.poll()
            if ended is not None:
                raise RankError(f"rank {rank} ended at its start: {ended.last or ended.how}")
        if time.monotonic() > deadline:
            missing = ", ".join(str(r) for r in range(1, size) if r not in found)
            raise ConfigError(
                f"ranks {missing} of {size} did not come within {LOADING_SECONDS:g} s; allowed: "
                "all of them started with the same --tensor-parallel and --master-addr"
            )
    return found


def _member(
    rank: int, channels: dict[int, Channel], children: dict[int, Child], places: Sequence[str]
) -> Member:
    try:
        message = channels[rank].receive(LOADING_SECONDS)
    except ChannelClosedError as error:
        raise RankError(f"rank {rank} left at its start ({error})") from None
    if message is None:
        raise RankError(f"rank {rank} did not say who it is within {LOADING_SECONDS:g} s")
    where = places[rank] if rank < len(places) else ""
    return Member(rank, message.number, where, channels[rank], children.get(rank))


def pack(value: object) -> bytes:
    """Plain values as bytes, for a channel."""
    return msgspec.msgpack.encode(value, enc_hook=dict)
