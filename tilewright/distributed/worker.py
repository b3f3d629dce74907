"""A worker: a machine that waits for calls from rank 0 and runs a follower for each call."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import msgspec

from tilewright.distributed.channel import Address, Channel, ChannelClosedError, RankListener
from tilewright.distributed.launch import start
from tilewright.distributed.parallel import SINGLE_RANK
from tilewright.distributed.processes import is_stopped
from tilewright.distributed.world import RankInfo, shared_token
from tilewright.errors import ConfigError
from tilewright.utils.child_process import Child, ChildExit

_FOREVER = 365 * 86_400.0
_SECONDS, _LOOK_SECONDS = 30.0, 0.5


def read_workers(given: Sequence[str]) -> tuple[Address, ...]:
    """Parse worker addresses ``HOST:PORT``.

    Raises:
        ConfigError: An address is invalid.
    """
    try:
        return tuple(Address.parse(f"tcp:{each}") for each in given)
    except ConfigError:
        raise ConfigError(f"workers {' '.join(given)}; allowed: HOST:PORT of each") from None


def serve_worker(host: str, port: int, follow: Sequence[str]) -> int:
    """Wait for rank 0, run a follower process, and repeat.

    Args:
        host: Address to listen on.
        port: Port to listen on.
        follow: Arguments after ``python`` for the follower.

    Raises:
        ConfigError: The address is not on this machine, or the token is missing.
    """
    token = shared_token(host, True, os.environ)
    listener = RankListener(Address(host, port), token)
    print(f"tilewright: waits at {host}:{port}", file=sys.stderr, flush=True)
    try:
        while True:
            came = listener.accept(time.monotonic() + _FOREVER)
            if came is None:
                continue
            place = _receive(Channel(came[1]), token)
            if place is None:
                continue
            with start(place, follow) as child:
                ended = wait_for(child)
            if ended.code:
                said = ended.last.removeprefix("tilewright: ") or f"ended by {ended.how}"
                print(f"tilewright: as rank {place.rank}: {said}", file=sys.stderr, flush=True)
    finally:
        listener.close()


def wait_for(child: Child, limit_s: float = 2 * SINGLE_RANK.peer_limit) -> ChildExit:
    """Return how a rank ended. Kill a process stopped for longer than ``limit_s``.

    A stopped process does not end with its group and would block the machine.
    """
    ran = time.monotonic()
    while (ended := child.wait(_LOOK_SECONDS)) is None:
        if not is_stopped(child.pid):
            ran = time.monotonic()
        elif time.monotonic() - ran > limit_s:
            return child.kill()
    return ended


def _receive(channel: Channel, token: bytes) -> RankInfo | None:
    """Receive this machine's rank from rank 0."""
    try:
        message = channel.receive(_SECONDS)
        rank, size, address = msgspec.json.decode(
            b"" if message is None else message.payload, type=tuple[int, int, str]
        )
        return RankInfo(rank, size, 0, Address.parse(address), token)
    except (ChannelClosedError, msgspec.DecodeError, ConfigError):
        return None
    finally:
        channel.close()
