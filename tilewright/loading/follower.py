"""A follower process: loads its share of a model and runs the leader's steps.

The leader (`--tensor-parallel-size`), torchrun or another machine of a group starts the process.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import warnings
from pathlib import Path

from tilewright.distributed.channel import ChannelClosedError
from tilewright.distributed.group import JOB, Follower
from tilewright.distributed.launch import join
from tilewright.distributed.peers import SetupCollectives
from tilewright.distributed.world import RankInfo, place_of
from tilewright.errors import RankError, TilewrightError, one_line
from tilewright.utils.garbage import run_process


def main(argv: list[str]) -> int:
    """Follow the leader until the end of the group. Return the exit code.

    Args:
        argv: the model's path on this machine, if different from the leader's path.
    """
    place = place_of()
    assert place is not None, "started by rank 0, or torchrun"
    return _follow(place, argv[0] if argv else None)


def _follow(place: RankInfo, path: str | None) -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only rank 0 handles the signal
    follower = join(place)
    follower.ends_process = True
    try:
        _serve(follower, place, path)
    except RankError as error:
        follower.fail(str(error), of=getattr(error, "rank", -1))
        raise
    except ChannelClosedError as error:  # during loading
        raise RankError(f"rank 0 has ended ({error})") from None
    except TilewrightError as error:
        follower.refuse(str(error))
        raise
    except Exception as error:
        follower.fail(f"failed: {one_line(error, 1000)}")
        raise
    finally:
        follower.close()
    return 0


def _serve(follower: Follower, place: RankInfo, path: str | None) -> None:
    warnings.filterwarnings("ignore", module="torch")
    from tilewright.api import load
    from tilewright.compiler.artifacts.paths import is_compiled
    from tilewright.compiler.targets.interface.compiled import silent
    from tilewright.compiler.targets.ranks.sharded import meet, serve_steps
    from tilewright.loading.program import compile_alone, facts_of
    from tilewright.loading.ranks import compare, read_job
    from tilewright.models import find_model_or_shape
    from tilewright.options.engine_config import EngineConfig
    from tilewright.options.resolve import ResolvedConfig

    message = follower.receive()
    assert message.kind == JOB, "rank 0 begins with a job"
    job = read_job(message.payload)
    follower.limit_s = job.options.parallel.peer_limit
    named = path or job.path
    found = Path(named).expanduser() if is_compiled(named) else find_model_or_shape(named)
    source = load(found, rank=follower.rank)
    options = dataclasses.replace(job.options, rank=follower.rank)
    config = EngineConfig(compute=options.compute, use_cache=job.use_cache)
    resolved = ResolvedConfig(
        config=config, path=source.path, target=job.target, precision=job.precision
    )
    compare(follower, facts_of(source, resolved), options)
    compiled = compile_alone(source, resolved, options, silent)
    executable = compiled.executable
    try:
        meet(executable, SetupCollectives(follower, place.token, options.parallel.peer_limit))
        serve_steps(executable, follower)
    finally:
        executable.close()


if __name__ == "__main__":
    try:
        sys.exit(run_process(lambda: main(sys.argv[1:])))
    except TilewrightError as error:
        print(f"tilewright: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
