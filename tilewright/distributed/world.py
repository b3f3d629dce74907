"""This process's rank, from its environment or from the command line.

torchrun or rank 0 start a process as a rank. On a further machine of a group (`--nnodes`,
LeaderWorkerSet), this process starts the machine's ranks.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tilewright.distributed.channel import Address
from tilewright.distributed.parallel import SINGLE_RANK
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
"""Environment variables of every rank before its first GPU access. They prevent changes of NVLink
switch state, which outlives a process.
"""


def forbid_multicast() -> None:
    """Set the variables in `NO_MULTICAST` unless they are already set."""
    for name, value in NO_MULTICAST.items():
        os.environ.setdefault(name, value)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """A rank's record.

    Attributes:
        rank: Rank number.
        size: Rank count.
        local_rank: Index on its machine.
        address: Address of rank 0.
        token: Secret of the run, known to all its ranks.
        limit_s: Maximum time rank 0 may be stopped before its first message, in seconds.
    """

    rank: int
    size: int
    local_rank: int
    address: Address
    token: bytes
    limit_s: float = SINGLE_RANK.peer_limit

    def environment(self) -> dict[str, str]:
        """Return the environment variables for a process with this rank."""
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
    """A group over ``count`` machines. This machine has the number ``rank``.

    ``host`` and ``port`` belong to rank 0's machine. ``count`` 1 means this machine only.
    """

    count: int = 1
    rank: int = 0
    host: str = ""
    port: int = _PORT

    def address(self) -> Address:
        """Return rank 0's listening address.

        Raises:
            ConfigError: The host is missing.
        """
        if not self.host:
            raise ConfigError(
                f"{self.count} machines without --master-addr; allowed: the address of rank 0's"
            )
        return Address(self.host, self.port)


def local_place(folder: Path, size: int) -> RankInfo:
    """Return rank 0's record for a group on this machine only, with a socket in a private
    directory.
    """
    token = secrets.token_hex(32).encode()
    return RankInfo(0, size, 0, Address(path=folder / "ranks"), token)


def place_of(environ: Mapping[str, str] = os.environ) -> RankInfo | None:
    """Return this process's record if a parent process started it as a rank, else None.

    Raises:
        ConfigError: A variable is not a number, or a remote group has no token.
    """
    if _RANK in environ:
        address = Address.parse(environ.get(_MEET, ""))
        token = environ.get(_TOKEN, "").encode()
        rank, size, local = (_number(environ, name) for name in (_RANK, _SIZE, _LOCAL))
        return RankInfo(rank, size, local, address, token, _seconds(environ, _LIMIT))
    if not all(name in environ for name in _TORCHRUN) or _number(environ, "WORLD_SIZE") < 2:
        return None
    rank, size, local, local_size, _, port = (
        0 if name == "MASTER_ADDR" else _number(environ, name) for name in _TORCHRUN
    )
    if rank >= size:
        raise ConfigError(f"RANK={rank} of WORLD_SIZE={size}; allowed: 0 to {size - 1}")
    host = environ["MASTER_ADDR"]
    # torchrun's own store uses its port.
    shared = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address = Address(host, port + 1 if shared else port)
    return RankInfo(rank, size, local, address, shared_token(host, local_size == size, environ))


def machines_of(given: Machines | None, environ: Mapping[str, str] = os.environ) -> Machines:
    """Return the machines from the command line, else from LeaderWorkerSet's variables.

    Raises:
        ConfigError: A variable is not a number, or the rank is invalid.
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
    """Return ``TILEWRIGHT_TOKEN``, for ranks without a common parent. On a loopback address none is
    needed.

    Raises:
        ConfigError: Other machines can reach rank 0, and there is no token.
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
    text = environ.get(name, str(SINGLE_RANK.peer_limit))
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{name}={text!r}; allowed: a number of seconds") from None


def _number(environ: Mapping[str, str], name: str) -> int:
    text = environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"{name}={text!r}; allowed: a whole number")
    return int(text)
