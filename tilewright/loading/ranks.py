"""Models over several ranks: rank 0 sends the job, and all ranks compare their settings."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tilewright.compiler.artifacts.digests import sources_digest
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.compiled import Compiled
from tilewright.compiler.targets.ranks.sharded import ShardedExecutable, meet
from tilewright.distributed import handshake
from tilewright.distributed.channel import Address, own_address
from tilewright.distributed.group import JOB, Follower, Leader
from tilewright.distributed.grouping import Grouping
from tilewright.distributed.launch import (
    LaunchedRanks,
    call_workers,
    gather,
    gather_here,
    pack,
    start_all,
)
from tilewright.distributed.parallel import PEERS
from tilewright.distributed.peers import SetupCollectives
from tilewright.distributed.world import RankInfo, shared_token
from tilewright.utils.environment import versions

FOLLOW = ("-m", f"{__package__}.follower")
"""Arguments of ``python`` for a follower: a module that imports this module."""
_KERNELS = (".cu", ".cuh", ".cpp", ".h", ".inl")


@dataclass(frozen=True, slots=True)
class RankConfig:
    """The model and options of rank 0. A follower may use another ``path``."""

    path: str
    target: str
    precision: PrecisionConfig | None
    options: CompileOptions
    use_cache: bool


def compile_ranks(
    job: RankConfig,
    grouping: Grouping,
    facts: Mapping[str, str],
    run: Callable[[CompileOptions, Callable[[], None]], Compiled],
    *,
    ends_process: bool = False,
) -> Compiled:
    """Compile on all ranks and return the executable, with this process as leader.

    Args:
        job: model and options.
        grouping: ranks and machines.
        facts: settings that must be equal on all ranks, in addition to `compare`'s.
        run: compiles rank 0's program. It calls its second argument regularly, which raises after
            the failure of another rank.
        ends_process: see `Leader`.

    Raises:
        ConfigError: if ranks are missing or differ.
        RankError: if a rank fails.
    """
    parallel = grouping.parallel
    ranks = _gather(grouping, job.target)
    leader = ranks.leader
    leader.ends_process = ends_process
    try:
        leader.tell(JOB, pack(job))
        compare(leader, facts, job.options)
        compiled = run(job.options, leader.check)
        meet(compiled.executable, SetupCollectives(leader, ranks.token, parallel.peer_limit))
        executable = ShardedExecutable(compiled.executable, ranks)
    except handshake.RanksDifferError:
        ranks.close()  # all ranks report the difference, so no rank has failed
        raise
    except BaseException:
        failure = leader.failure
        ranks.close()
        if failure is not None:
            raise failure from None
        raise
    return dataclasses.replace(compiled, executable=executable)


def read_job(data: bytes) -> RankConfig:
    """Decode the job of rank 0."""
    return msgspec.msgpack.decode(data, type=RankConfig)


def compare(group: Leader | Follower, facts: Mapping[str, str], options: CompileOptions) -> None:
    """Check on all ranks that their settings are equal.

    Raises:
        RanksDifferError: on every rank, with the differences' names.
    """
    own = {
        handshake.CODE: sources_digest(),
        handshake.TORCH: versions(("torch",))["torch"],
        handshake.KERNELS: _kernels_digest(),
        handshake.MESH: f"1x{options.parallel.tensor}",
        handshake.OPTIONS: hashlib.sha256(pack(dataclasses.replace(options, rank=0))).hexdigest(),
        **facts,
    }
    found = group.all_gather(msgspec.json.encode(own))
    handshake.check_equal([msgspec.json.decode(each, type=dict[str, str]) for each in found])


@functools.cache
def _kernels_digest() -> str:
    digest, root = hashlib.sha256(), Path(__file__).parents[1] / "compiler"
    for path in sorted(each for each in root.rglob("*") if each.suffix in _KERNELS):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _gather(grouping: Grouping, target: str) -> LaunchedRanks:
    parallel, machines = grouping.parallel, grouping.machines
    size, limit_s = parallel.tensor, parallel.peer_limit
    local = size // machines.count
    devices = parallel.devices or tuple(rank % local for rank in range(size))
    names = [f"GPU {each}" for each in devices] if target == "cuda" else []
    if names and parallel.exchange == PEERS:  # before any rank loads
        from tilewright.compiler.targets.cuda.collectives import peer_memory as peers

        peers.check_access(devices)
    if grouping.workers:
        first = grouping.workers[0]
        token = shared_token(first.host, True)
        place = RankInfo(0, size, 0, Address(own_address(first)), token)
        begin = functools.partial(call_workers, workers=grouping.workers)
        return gather(place, begin, limit_s=limit_s, names=names)
    if grouping.place is not None:  # another program has started all ranks
        return gather(grouping.place, lambda place: {}, limit_s=limit_s, names=names)
    if machines.count > 1:
        place = RankInfo(0, size, 0, machines.address(), shared_token(machines.host, False))
        own = range(1, size // machines.count)
        begin = functools.partial(start_all, ranks=own, command=FOLLOW)
        return gather(place, begin, limit_s=limit_s, names=names)
    return gather_here(size, FOLLOW, limit_s=limit_s, names=names)
