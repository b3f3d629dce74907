"""Rank 0 starts the others, or waits for those that torchrun and other machines start."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from tilewright.distributed.channel import (
    Address,
    Channel,
    ChannelClosedError,
    Listener,
    call,
)
from tilewright.distributed.group import (
    LOADING_SECONDS,
    Follower,
    Leader,
    Member,
)
from tilewright.distributed.processes import is_stopped
from tilewright.distributed.world import Machines, Place, forbid_multicast, local_place
from tilewright.errors import ConfigError, RankError
from tilewright.utils.child_process import PYTHON, Child

_LOOK_SECONDS, _WORKER_SECONDS = 0.2, 10.0


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


Start = Callable[[Place], dict[int, Child]]
"""Has the other ranks started, given rank 0's place; returns those that are processes of ours."""


def gather(place: Place, begin: Start, *, limit_s: float, names: Sequence[str] = ()) -> Ranks:
    """The group of all ranks, with this process as rank 0.

    Args:
        place: rank 0's; where its port is 0, any that is free.
        begin: called once rank 0 listens.
        names: what each rank runs on (``GPU 1``), for people.

    Raises:
        ConfigError: where not all ranks came in time.
        RankError: where one ended at once.
    """
    forbid_multicast()
    children: dict[int, Child] = {}
    listener = Listener(place.address, place.token)
    try:
        place = replace(place, address=listener.address, limit_s=limit_s)
        children = begin(place)
        channels = _wait(listener, place.size, children, limit_s)
        members = [_member(rank, channels, children, names) for rank in range(1, place.size)]
    except BaseException:
        for child in children.values():
            child.kill()
            child.close()
        raise
    finally:
        listener.close()
    return Ranks(Leader(members, place.address, limit_s), place.token, contextlib.ExitStack())


def gather_here(
    size: int, command: Sequence[str], *, limit_s: float, names: Sequence[str] = ()
) -> Ranks:
    """A group of this machine alone: ``command`` (what follows ``python``) is started for every
    other rank. Raises as `gather`.
    """
    with contextlib.ExitStack() as files:
        folder = Path(files.enter_context(tempfile.TemporaryDirectory(prefix="tilewright-")))

        def begin(place: Place) -> dict[int, Child]:
            return start_all(place, range(1, size), command)

        ranks = gather(local_place(folder, size), begin, limit_s=limit_s, names=names)
        ranks.files.push(files.pop_all())
    return ranks


def start_all(place: Place, ranks: Sequence[int], command: Sequence[str]) -> dict[int, Child]:
    """A process for each of the ranks, which are of one machine; the first is its ``local_rank``
    1, behind rank 0.
    """
    found: dict[int, Child] = {}
    try:
        for rank in ranks:
            found[rank] = start(replace(place, rank=rank, local_rank=rank), command)
    except ConfigError:
        for child in found.values():
            child.kill()
            child.close()
        raise
    return found


def call_workers(place: Place, workers: Sequence[Address]) -> dict[int, Child]:
    """Tell workers, ranks 1 and on in their order, to join the group.

    Raises:
        ConfigError: for one that does not answer.
    """
    for rank, worker in enumerate(workers, start=1):
        other = f"rank {rank}, a worker"
        channel = Channel(call(worker, 0, place.token, seconds=_WORKER_SECONDS, other=other))
        host = place.address.host or channel.connection.getsockname()[0]
        address = str(Address(host, place.address.port))
        channel.send(0, 0, msgspec.json.encode((rank, place.size, address)))
        channel.close()
    return {}


def start(place: Place, command: Sequence[str]) -> Child:
    """A process that is a rank of its own."""
    environment = place.environment()
    return Child([*PYTHON, *command], environment=environment, what=f"rank {place.rank}")


def join(place: Place) -> Follower:
    """This process as a follower of the group it was started for.

    Raises:
        ConfigError: where rank 0 is not to be reached.
        RankError: where it has been stopped for as long as it may be.
    """
    forbid_multicast()
    address, limit_s = place.address, place.limit_s
    connection = call(address, place.rank, place.token, seconds=LOADING_SECONDS, limit_s=limit_s)
    channel = Channel(connection)
    channel.send(0, os.getpid())
    if address.path is None:
        address = Address(connection.getsockname()[0])
    follower = Follower(place.rank, place.size, channel, address)
    follower.limit_s = limit_s
    return follower


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


def _wait(
    listener: Listener, size: int, children: dict[int, Child], limit_s: float
) -> dict[int, Channel]:
    """The channels of all ranks, once every one has come."""
    found: dict[int, Channel] = {}
    ran = dict.fromkeys(children, time.monotonic())
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
            if not is_stopped(child.pid):
                ran[rank] = time.monotonic()
            elif time.monotonic() - ran[rank] > limit_s:
                raise RankError(f"rank {rank} has been stopped at its start for {limit_s:g} s")
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
