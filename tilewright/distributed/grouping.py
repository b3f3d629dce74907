"""The group of ranks from command-line options and environment variables, with checks."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from tilewright.distributed.channel import Address
from tilewright.distributed.parallel import (
    COLLECTIVE_BACKENDS,
    MOST_GPUS,
    PEERS,
    SINGLE_RANK,
    ParallelConfig,
)
from tilewright.distributed.world import Machines, RankInfo, machines_of, place_of
from tilewright.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Grouping:
    """The group of ranks, the machines, and this process's rank if a parent has started it.

    ``workers`` are addresses of waiting machines.
    """

    parallel: ParallelConfig = SINGLE_RANK
    machines: Machines = field(default_factory=Machines)
    place: RankInfo | None = None
    workers: tuple[Address, ...] = ()

    @property
    def is_alone(self) -> bool:
        """Return whether this is a single rank."""
        return self.parallel.tensor == 1

    @property
    def leads(self) -> bool:
        """Return whether this process is rank 0."""
        return self.machines.rank == 0 and (self.place is None or self.place.rank == 0)


def read_grouping(given: Any) -> Grouping:
    """Read and check the group from options and environment variables.

    Raises:
        ConfigError: The numbers are inconsistent.
    """
    place = place_of()
    named = [getattr(given, name, None) for name in ("nnodes", "node_rank", "master_addr")]
    machines = None
    if any(each is not None for each in named):
        port = given.master_port or Machines().port
        machines = Machines(given.nnodes or 1, given.node_rank or 0, given.master_addr or "", port)
    machines = Machines() if place is not None else machines_of(machines)
    tensor = getattr(given, "tensor_parallel_size", None)
    started = place.size if place is not None else None
    if tensor is None:
        tensor = started or machines.count
    if started is not None and tensor != started:
        raise ConfigError(
            f"--tensor-parallel-size {tensor} in {started} processes; allowed: {started}"
        )
    if machines.count > 1:
        machines.address()  # raises if the address is missing
    if tensor % machines.count:
        raise ConfigError(f"{tensor} ranks on {machines.count} machines; allowed: as many on each")
    parallel = ParallelConfig(
        tensor=tensor,
        expert=getattr(given, "expert_parallel_size", None),
        shares=getattr(given, "tensor_split", None) or (),
        wire=getattr(given, "comm_dtype", None),
        devices=getattr(given, "devices", None) or (),
        peer_limit=getattr(given, "rank_timeout", None) or SINGLE_RANK.peer_limit,
        exchange=COLLECTIVE_BACKENDS.get(getattr(given, "collective_backend", None) or ""),
    )
    parallel.check()
    if tensor == 1:
        _refuse_of_groups(given)
    return Grouping(parallel, machines, place)


def _refuse_of_groups(given: Any) -> None:
    for name in ("tensor_split", "comm_dtype", "rank_timeout", "collective_backend"):
        if getattr(given, name, None):
            raise ConfigError(
                f"--{name.replace('_', '-')} for a single rank; allowed: --tensor-parallel-size N"
            )


def check_devices(grouping: Grouping, num_devices: int) -> None:
    """Check that this machine has the GPUs and supports the collective backend.

    Raises:
        ConfigError: The machine has fewer GPUs, or the backend is unsupported.
    """
    parallel, machines = grouping.parallel, grouping.machines
    local = parallel.tensor // machines.count
    if grouping.place is not None:
        local = int(os.environ.get("LOCAL_WORLD_SIZE", local))
    if parallel.exchange == PEERS and local < parallel.tensor:
        raise ConfigError(
            f"--collective-backend p2p for {parallel.tensor} ranks over several machines: a rank "
            "writes into all GPUs of the group; allowed: ranks on a single machine, or "
            "--collective-backend nccl"
        )
    if parallel.exchange == PEERS and parallel.tensor > MOST_GPUS:
        raise ConfigError(
            f"--collective-backend p2p for {parallel.tensor} ranks; allowed: up to {MOST_GPUS}, or "
            "--collective-backend nccl"
        )
    wanted = max((*parallel.devices, local - 1)) + 1
    if wanted > num_devices:
        what = f"device {wanted - 1}" if parallel.devices else f"{local} ranks on target cuda"
        raise ConfigError(
            f"{what}: this machine has {num_devices} GPUs; allowed: up to {num_devices} ranks, "
            f"devices 0 to {num_devices - 1}"
        )
