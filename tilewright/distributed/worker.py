"""A worker: a machine that waits until a rank 0 calls it, follows that, and waits again."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence

import msgspec

from tilewright.distributed.channel import Address, Channel, ChannelClosedError, Listener
from tilewright.distributed.launch import start
from tilewright.distributed.parallel import ALONE
from tilewright.distributed.processes import is_stopped
from tilewright.distributed.world import Place, shared_token
from tilewright.errors import ConfigError
from tilewright.utils.child_process import Child, Ended

_FOREVER = 365 * 86_400.0
_SECONDS, _LOOK_SECONDS = 30.0, 0.5


def read_workers(given: Sequence[str]) -> tuple[Address, ...]:
    """The addresses of workers, ``HOST:PORT`` each.

    Raises:
        ConfigError: for one that is none.
    """
    try:
        return tuple(Address.parse(f"tcp:{each}") for each in given)
    except ConfigError:
        raise ConfigError(f"workers {' '.join(given)}; allowed: HOST:PORT of each") from None


def serve_worker(host: str, port: int, follow: Sequence[str]) -> int:
    """Wait for rank 0, follow it with a process, and wait again.

    Args:
        follow: what starts a follower, behind ``python``.

    Raises:
        ConfigError: for an address that is not this machine's, or no token.
    """
    token = shared_token(host, True, os.environ)
    listener = Listener(Address(host, port), token)
    print(f"tilewright: waits at {host}:{port}", file=sys.stderr, flush=True)
    try:
        while True:
            came = listener.accept(time.monotonic() + _FOREVER)
            if came is None:
                continue
            place = _hear(Channel(came[1]), token)
            if place is None:
                continue
            with start(place, follow) as child:
                ended = wait_for(child)
            if ended.code:
                said = ended.last.removeprefix("tilewright: ") or f"ended by {ended.how}"
                print(f"tilewright: as rank {place.rank}: {said}", file=sys.stderr, flush=True)
    finally:
        listener.close()


def wait_for(child: Child, limit_s: float = 2 * ALONE.peer_limit) -> Ended:
    """How a rank ended. One that has been stopped for so long, in which its group misses it, is
    killed: it does not end with its group, and the machine would follow nobody else.
    """
    ran = time.monotonic()
    while (ended := child.wait(_LOOK_SECONDS)) is None:
        if not is_stopped(child.pid):
            ran = time.monotonic()
        elif time.monotonic() - ran > limit_s:
            return child.kill()
    return ended


def _hear(channel: Channel, token: bytes) -> Place | None:
    """The place in the group that rank 0 gives this machine."""
    try:
        message = channel.receive(_SECONDS)
        rank, size, address = msgspec.json.decode(
            b"" if message is None else message.payload, type=tuple[int, int, str]
        )
        return Place(rank, size, 0, Address.parse(address), token)
    except (ChannelClosedError, msgspec.DecodeError, ConfigError):
        return None
    finally:
        channel.close()
