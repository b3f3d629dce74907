"""Assigns GPUs, or cores and threads, to the replicas of ``tilewright serve``."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeVar

from tilewright.compiler.devices import num_gpus, usable_cpus
from tilewright.distributed.grouping import Grouping
from tilewright.errors import ConfigError
from tilewright.serve.web.server_log import say
from tilewright.serve.web.settings import Replica

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ALONE = ("--replicas", "1")
"""Follows the user's options, so that each engine is a single replica."""
_T = TypeVar("_T")


def replicas_of(
    count: int,
    target: str,
    grouping: Grouping,
    *,
    devices: tuple[int, ...] = (),
    threads: int | None = None,
) -> tuple[Replica, ...]:
    """Distribute the GPUs or cores of this machine over replicas.

    Args:
        count: replicas to start.
        target: target name.
        grouping: each replica's ranks.
        devices: GPUs for all replicas. Empty: from 0.
        threads: CPU threads of all replicas. None: all cores.

    Raises:
        ConfigError: if there are fewer GPUs or threads than replicas, or if a replica needs several
            machines.
    """
    if count == 1:
        return (Replica(),)
    if grouping.machines.count > 1 or grouping.place is not None:
        raise ConfigError(
            f"--replicas {count} of a group that others start too; allowed: a server a group"
        )
    ranks = grouping.parallel.tensor
    if target == "cuda":
        return _with_gpus(count, ranks, devices)
    if devices:
        raise ConfigError(
            f"--replicas {count} with --devices {_listed(devices)}: target {target} has cores; "
            "allowed: --target cuda"
        )
    return _with_cores(count, ranks, threads)


def _with_gpus(count: int, ranks: int, devices: tuple[int, ...]) -> tuple[Replica, ...]:
    """Return replicas that see their own GPUs only, numbered from 0, with a GPU per rank."""
    there, needed = num_gpus(), count * ranks
    devices = devices or tuple(range(needed))
    if len(set(devices)) != needed or len(devices) != needed:
        raise ConfigError(
            f"--devices {_listed(devices)} for {count} replicas of {ranks} ranks; allowed: "
            f"{needed} numbers, each once"
        )
    if not 0 <= min(devices) <= max(devices) < there:
        raise ConfigError(
            f"--replicas {count} on devices {_listed(devices)}: this machine has {there} GPUs; "
            f"allowed: devices 0 to {there - 1}, {ranks} a replica"
        )
    named = os.environ.get(_VISIBLE, "").split(",")
    visible = named if named != [""] else [str(each) for each in range(there)]
    return tuple(
        Replica(
            arguments=(*_ALONE, "--devices", _listed(range(ranks))),
            environment={_VISIBLE: ",".join(visible[each] for each in own)},
        )
        for own in _slices(devices, count)
    )


def _with_cores(count: int, ranks: int, threads: int | None) -> tuple[Replica, ...]:
    """Return replicas with their own cores and a thread per core, shared by the ranks.

    With fewer cores than replicas, all replicas share the cores, and a note is printed.
    """
    cores = usable_cpus()
    threads = threads or len(cores)
    if threads < count * ranks:
        most = threads // ranks
        raise ConfigError(
            f"--replicas {count} of {ranks} ranks with {threads} threads; allowed: up to {most} "
            "replicas, or more --num-threads"
        )
    own = _slices(cores[:threads], count)
    if len(cores) < count:
        say(f"{count} replicas share {len(cores)} cores")
        own = [()] * count
    return tuple(
        Replica(arguments=(*_ALONE, "--num-threads", str(len(mine) // ranks)), cores=pinned)
        for mine, pinned in zip(_slices(range(threads), count), own, strict=True)
    )


def _slices(things: Sequence[_T], count: int) -> list[tuple[_T, ...]]:
    """Return ``count`` consecutive slices of almost equal size, larger slices first."""
    sizes = [len(things) // count + (at < len(things) % count) for at in range(count)]
    ends = accumulate(sizes, initial=0)
    return [tuple(things[first:last]) for first, last in pairwise(ends)]


def _listed(numbers: Sequence[int]) -> str:
    return ",".join(str(number) for number in numbers)
