"""Starts the ranks, or waits for ranks started by torchrun or on other machines."""

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
    RankListener,
    call,
)
from tilewright.distributed.group import (
    LOADING_SECONDS,
    Follower,
    FollowerHandle,
    Leader,
)
from tilewright.distributed.processes import is_stopped
from tilewright.distributed.world import Machines, RankInfo, forbid_multicast, local_place
from tilewright.errors import ConfigError, RankError
from tilewright.utils.child_process import PYTHON, Child

_LOOK_SECONDS, _WORKER_SECONDS = 0.2, 10.0


@dataclass(slots=True)
class LaunchedRanks:
    """A group gathered by rank 0, and the files to remove at its end."""

    leader: Leader
    token: bytes
    files: contextlib.ExitStack

    def close(self) -> None:
        """End the group."""
        self.leader.close()
        self.files.close()


Start = Callable[[RankInfo], dict[int, Child]]
"""Has the other ranks started, given rank 0's place; returns those that are processes of ours."""


def gather(
    place: RankInfo, begin: Start, *, limit_s: float, names: Sequence[str] = ()
) -> LaunchedRanks:
    """Return the group of all ranks, with this process as rank 0.

    Args:
        place: Rank 0's record. Port 0 selects a free port.
        begin: Called after rank 0 listens.
        limit_s: Maximum silence of a rank in seconds.
        names: Device of each rank (``GPU 1``), for messages.

    Raises:
        ConfigError: Some ranks did not connect in time.
        RankError: A rank ended at once.
    """
    forbid_multicast()
    children: dict[int, Child] = {}
    listener = RankListener(place.address, place.token)
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
    return LaunchedRanks(
        Leader(members, place.address, limit_s), place.token, contextlib.ExitStack()
    )


def gather_here(
    size: int, command: Sequence[str], *, limit_s: float, names: Sequence[str] = ()
) -> LaunchedRanks:
    """Return a group on this machine only. Start ``command`` (arguments after ``python``) per
    further rank.

    Raise as `gather`.
    """
    with contextlib.ExitStack() as files:
        folder = Path(files.enter_context(tempfile.TemporaryDirectory(prefix="tilewright-")))

        def begin(place: RankInfo) -> dict[int, Child]:
            return start_all(place, range(1, size), command)

        ranks = gather(local_place(folder, size), begin, limit_s=limit_s, names=names)
        ranks.files.push(files.pop_all())
    return ranks


def start_all(place: RankInfo, ranks: Sequence[int], command: Sequence[str]) -> dict[int, Child]:
    """Start a process per rank on this machine. The first has ``local_rank`` 1, after rank 0."""
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


def call_workers(place: RankInfo, workers: Sequence[Address]) -> dict[int, Child]:
    """Call workers, from rank 1 in order, to join the group.

    Raises:
        ConfigError: A worker does not answer.
    """
    for rank, worker in enumerate(workers, start=1):
        other = f"rank {rank}, a worker"
        channel = Channel(call(worker, 0, place.token, seconds=_WORKER_SECONDS, other=other))
        host = place.address.host or channel.connection.getsockname()[0]
        address = str(Address(host, place.address.port))
        channel.send(0, 0, msgspec.json.encode((rank, place.size, address)))
        channel.close()
    return {}


def start(place: RankInfo, command: Sequence[str]) -> Child:
    """Start a process as a rank."""
    environment = place.environment()
    return Child([*PYTHON, *command], environment=environment, what=f"rank {place.rank}")


def join(place: RankInfo) -> Follower:
    """Connect this process to its group as a follower.

    Raises:
        ConfigError: Rank 0 cannot be reached.
        RankError: Rank 0 was stopped for too long.
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
    """Start the ranks of a further machine and wait for their end. Return the first failed exit
    code.
    """
    count = size // machines.count
    first = machines.rank * count
    place = RankInfo(0, size, 0, machines.address(), token)
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
    listener: RankListener, size: int, children: dict[int, Child], limit_s: float
) -> dict[int, Channel]:
    """Return the channels of all ranks after all have connected."""
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
                "all of them started with the same --tensor-parallel-size and --master-addr"
            )
    return found


def _member(
    rank: int, channels: dict[int, Channel], children: dict[int, Child], places: Sequence[str]
) -> FollowerHandle:
    try:
        message = channels[rank].receive(LOADING_SECONDS)
    except ChannelClosedError as error:
        raise RankError(f"rank {rank} left at its start ({error})") from None
    if message is None:
        raise RankError(f"rank {rank} did not say who it is within {LOADING_SECONDS:g} s")
    where = places[rank] if rank < len(places) else ""
    return FollowerHandle(rank, message.number, where, channels[rank], children.get(rank))


def pack(value: object) -> bytes:
    """Encode plain values for a channel."""
    return msgspec.msgpack.encode(value, enc_hook=dict)
