"""How a model is spread over ranks: what a user may ask for, before any rank exists.

Imports no torch: command lines are read with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.errors import ConfigError, allowed

if TYPE_CHECKING:
    from tilewright.compiler.mesh import Policy

WIRES = ("fp32", "bf16", "q80")
"""Formats in which partial sums travel."""

PEERS, NCCL = "peers", "nccl"
EXCHANGES = (PEERS, NCCL)
"""How GPUs exchange: through each other's memory, or through NCCL."""

MOST_GPUS = 8
"""Ranks that exchange through each other's memory; their kernels hold so many addresses."""

RANKS, TENSOR, EXPERT = "r", "t", "e"
"""Names of what an axis is dealt over: all ranks of a group; those that share each expert; those
that hold different experts."""


@dataclass(frozen=True, slots=True)
class Parallel:
    """A tensor-parallel group: one program a rank.

    Attributes:
        tensor: ranks of the group; 1: no group.
        expert: of how many parts, each of ``tensor / expert`` ranks, each holds whole experts of
            its own; None: as few as leave every expert's width in pieces of 128, at least.
        shares: one positive number a rank, in proportion to which heads and columns are dealt;
            empty: as evenly as whole heads and blocks allow.
        wire: the format in which partial sums travel (`WIRES`); None: the target's own.
        devices: the number of each rank's device, none twice; empty: those from 0 on.
        peer_limit: seconds after which a rank that waits for another gives up.
        exchange: how GPUs exchange (`EXCHANGES`); None: through each other's memory where they
            reach it, else through NCCL.
    """

    tensor: int = 1
    expert: int | None = None
    shares: tuple[int, ...] = ()
    wire: str | None = None
    devices: tuple[int, ...] = ()
    peer_limit: float = 10.0
    exchange: str | None = None

    @property
    def policy(self) -> Policy:
        """How axes are dealt over all ranks of the group."""
        from tilewright.compiler.mesh import UNEVEN, in_shares

        return in_shares(self.shares) if self.shares else UNEVEN

    def check(self) -> None:
        """Refuse what no model could be spread over.

        Raises:
            ConfigError: a number out of range, a device named twice, or lists of another length
                than there are ranks.
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


ALONE = Parallel()
"""One device, and no group."""


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a group as the axes that a model is dealt over: all ``count`` of them; and for
    experts ``expert`` parts, in each of which ``count / expert`` share every expert.
    """

    count: int
    expert: int
    policy: Policy

    def size(self, over: str) -> int:
        """The number of shares along an axis."""
        return {RANKS: self.count, TENSOR: self.count // self.expert, EXPERT: self.expert}[over]

    def place(self, over: str, rank: int) -> int:
        """Which share along an axis is a rank's."""
        tensor = self.count // self.expert
        return {RANKS: rank, TENSOR: rank % tensor, EXPERT: rank // tensor}[over]

    def policy_of(self, over: str) -> Policy:
        """How sizes are dealt along an axis; shares are one a rank, and say nothing of parts."""
        from tilewright.compiler.mesh import UNEVEN

        return self.policy if self.size(over) == self.count else UNEVEN
