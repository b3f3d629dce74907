"""Who this process is among the ranks: from what started it, or from the command line.

A process is a rank of its own where torchrun or rank 0 has started it; on further machines of a
group (`--nnodes`, LeaderWorkerSet) it starts that machine's ranks.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tilewright.distributed.channel import Address
from tilewright.distributed.parallel import ALONE
from tilewright.errors import ConfigError

_PORT = 29_500
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_RANK, _SIZE, _MEET = "TILEWRIGHT_RANK", "TILEWRIGHT_RANKS", "TILEWRIGHT_MEET"
_LOCAL, _TOKEN, _LIMIT = "TILEWRIGHT_LOCAL_RANK", "TILEWRIGHT_TOKEN", "TILEWRIGHT_PEER_LIMIT"
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

NO_MULTICAST = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
}
"""What every process of a group has in its environment before it touches a GPU: libraries then
leave the switches of NVLink alone, whose state outlives a process.
"""


def forbid_multicast() -> None:
    """Say so in this process's environment, where nothing else is said."""
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True, slots=True)
class Place:
    """One rank's place: ``rank`` of ``size``, the ``local_rank``-th on its machine, and where rank
    0 is met. ``token``: what all ranks of the run know and nobody else. ``limit_s``: how long rank
    0 may be stopped before it has said anything.
    """

    rank: int
    size: int
    local_rank: int
    address: Address
    token: bytes
    limit_s: float = ALONE.peer_limit

    def environment(self) -> dict[str, str]:
        """The variables that tell a process that it is this rank."""
        return {
            _RANK: str(self.rank),
            _SIZE: str(self.size),
            _LOCAL: str(self.local_rank),
            _MEET: str(self.address),
            _TOKEN: self.token.decode(),
            _LIMIT: str(self.limit_s),
            **NO_MULTICAST,
        }


@dataclass(frozen=True, slots=True)
class Machines:
    """A group over ``count`` machines, this being the ``rank``-th; ``count`` 1: this one alone.

    ``host`` and ``port`` are those of rank 0's machine.
    """

    count: int = 1
    rank: int = 0
    host: str = ""
    port: int = _PORT

    def address(self) -> Address:
        """Where rank 0 listens.

        Raises:
            ConfigError: where no host is named.
        """
        if not self.host:
            raise ConfigError(
                f"{self.count} machines without --master-addr; allowed: the address of rank 0's"
            )
        return Address(self.host, self.port)


def local_place(folder: Path, size: int) -> Place:
    """Rank 0's place in a group of this machine alone, which meets in a private folder."""
    token = secrets.token_hex(32).encode()
    return Place(0, size, 0, Address(path=folder / "ranks"), token)


def place_of(environ: Mapping[str, str] = os.environ) -> Place | None:
    """This process's place where another has started it as a rank; None where nobody has.

    Raises:
        ConfigError: for variables that are no numbers, or other machines without a token.
    """
    if _RANK in environ:
        address = Address.parse(environ.get(_MEET, ""))
        token = environ.get(_TOKEN, "").encode()
        rank, size, local = (_number(environ, name) for name in (_RANK, _SIZE, _LOCAL))
        return Place(rank, size, local, address, token, _seconds(environ, _LIMIT))
    if not all(name in environ for name in _TORCHRUN) or _number(environ, "WORLD_SIZE") < 2:
        return None
    rank, size, local, local_size, _, port = (
        0 if name == "MASTER_ADDR" else _number(environ, name) for name in _TORCHRUN
    )
    if rank >= size:
        raise ConfigError(f"RANK={rank} of WORLD_SIZE={size}; allowed: 0 to {size - 1}")
    host = environ["MASTER_ADDR"]
    # torchrun's own store listens on its port
    shared = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = Address(host, port + 1 if shared else port)
    return Place(rank, size, local, address, shared_token(host, local_size == size, environ))


def machines_of(given: Machines | None, environ: Mapping[str, str] = os.environ) -> Machines:
    """The machines of the command line, else those that LeaderWorkerSet's variables name.

    Raises:
        ConfigError: for variables that are no numbers, or a rank outside of them.
    """
    found = given
    if found is None and "LWS_GROUP_SIZE" in environ:
        found = Machines(
            _number(environ, "LWS_GROUP_SIZE"),
            _number(environ, "LWS_WORKER_INDEX"),
            environ.get("LWS_LEADER_ADDRESS", ""),
        )
    found = found or Machines()
    if not 0 <= found.rank < found.count:
        raise ConfigError(
            f"machine {found.rank} of {found.count}; allowed: 0 to {found.count - 1} (--node-rank)"
        )
    return found


def shared_token(host: str, is_local: bool, environ: Mapping[str, str] = os.environ) -> bytes:
    """The token of ranks that do not start each other: ``TILEWRIGHT_TOKEN``, or, on the loopback
    of one machine, none at all.

    Raises:
        ConfigError: where other machines can reach rank 0 and there is no token.
    """
    token = environ.get(_TOKEN, "").encode()
    if not token and is_local and host in _LOOPBACK:
        return b"loopback"
    if not token:
        raise ConfigError(
            f"ranks meet at {host} without a token; allowed: TILEWRIGHT_TOKEN, the same secret on "
            "every machine"
        )
    return token


def _seconds(environ: Mapping[str, str], name: str) -> float:
    text = environ.get(name, str(ALONE.peer_limit))
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}; allowed: a number of seconds") from None


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r}; allowed: a whole number")
    return int(text)
