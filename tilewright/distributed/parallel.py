"""Options for a group of ranks, before any rank exists.

Imports no torch, because command lines are read with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.errors import ConfigError, allowed

if TYPE_CHECKING:
    from tilewright.compiler.mesh import SplitPolicy

WIRES = ("fp32", "bf16", "q80")
"""Formats for partial sums on the link."""

PEERS, NCCL = "peers", "nccl"
EXCHANGES = (PEERS, NCCL)
"""Backends for collectives between GPUs: peer memory or NCCL."""

COLLECTIVE_BACKENDS = {"p2p": PEERS, "nccl": NCCL}
"""Names of the user for `EXCHANGES`."""

MOST_GPUS = 8
"""Maximum number of ranks with peer memory: the size of the kernels' address tables."""

RANKS, TENSOR, EXPERT = "r", "t", "e"
"""Names of axes: all ranks in a group, ranks with common experts, and ranks with different
experts.
"""


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """A tensor-parallel group: a program per rank.

    Attributes:
        tensor: Rank count. 1: no group.
        expert: Expert group count with ``tensor / expert`` ranks each. Each group has its own
            experts. None: automatic, so that an expert's width per rank is a multiple of 128.
        shares: Positive number per rank. Heads and columns are divided in proportion. Empty:
            evenly, in whole heads and blocks.
        wire: Format for partial sums on the link (`WIRES`). None: the target's default.
        devices: Device number per rank, without repetitions. Empty: from 0.
        peer_limit: Timeout for a silent rank in seconds.
        exchange: Backend for collectives between GPUs (`EXCHANGES`). None: peer memory if
            accessible, else NCCL.
    """

    tensor: int = 1
    expert: int | None = None
    shares: tuple[int, ...] = ()
    wire: str | None = None
    devices: tuple[int, ...] = ()
    peer_limit: float = 10.0
    exchange: str | None = None

    @property
    def policy(self) -> SplitPolicy:
        """Return the policy for dividing axes over all ranks."""
        from tilewright.compiler.mesh import UNEVEN, in_shares

        return in_shares(self.shares) if self.shares else UNEVEN

    def check(self) -> None:
        """Check the values, independently of a model.

        Raises:
            ConfigError: A number is invalid, a device is repeated, or a list has the wrong
                length.
        """
        if self.tensor < 1:
            raise ConfigError(f"{self.tensor} ranks; allowed: 1 or more")
        if self.expert is not None and (self.expert < 1 or self.tensor % self.expert):
            raise ConfigError(
                f"experts over {self.expert} parts of {self.tensor} ranks; allowed: "
                + ", ".join(str(n) for n in range(1, self.tensor + 1) if self.tensor % n == 0)
            )
        for what, given in (("shares", self.shares), ("devices", self.devices)):
            if given and len(given) != self.tensor:
                raise ConfigError(
                    f"{len(given)} {what} for {self.tensor} ranks; allowed: one a rank"
                )
        if any(share < 1 for share in self.shares):
            raise ConfigError(f"shares {_listed(self.shares)}; allowed: whole numbers from 1")
        if len(set(self.devices)) < len(self.devices) or any(each < 0 for each in self.devices):
            raise ConfigError(
                f"devices {_listed(self.devices)}; allowed: numbers from 0, each once"
            )
        if self.wire is not None and self.wire not in WIRES:
            raise ConfigError(f"wire {self.wire!r}; {allowed(WIRES, self.wire)}")
        if self.exchange is not None and self.exchange not in EXCHANGES:
            raise ConfigError(f"exchange {self.exchange!r}; {allowed(EXCHANGES, self.exchange)}")
        if not self.peer_limit > 0:
            raise ConfigError(f"a limit of {self.peer_limit} seconds; allowed: more than 0")


SINGLE_RANK = ParallelConfig()
"""A single device without a group."""


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


@dataclass(frozen=True, slots=True)
class RankAxes:
    """The axes of a group: ``count`` ranks in ``expert`` expert groups.

    Within an expert group, ``count / expert`` ranks share every expert.
    """

    count: int
    expert: int
    policy: SplitPolicy

    def size(self, over: str) -> int:
        """Return the number of shards along an axis."""
        return {RANKS: self.count, TENSOR: self.count // self.expert, EXPERT: self.expert}[over]

    def place(self, over: str, rank: int) -> int:
        """Return a rank's shard index along an axis."""
        tensor = self.count // self.expert
        return {RANKS: rank, TENSOR: rank % tensor, EXPERT: rank // tensor}[over]

    def policy_of(self, over: str) -> SplitPolicy:
        """Return the policy for dividing an axis. ``shares`` apply only to axes over all ranks."""
        from tilewright.compiler.mesh import UNEVEN

        return self.policy if self.size(over) == self.count else UNEVEN
