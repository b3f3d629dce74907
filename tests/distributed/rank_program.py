"""A group of two that computes nothing, each rank a process: ``rank_program.py FOLDER PHASE RANK``.

In every phase each rank leaves a file with its pid; the rank named stays in the phase named.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

from tilewright.distributed import group, launch
from tilewright.distributed.peers import SetupCollectives
from tilewright.distributed.world import place_of
from tilewright.errors import TilewrightError

LOADING, LIMIT, STAYS = 60.0, 3.0, 90.0
_STEPS = ("capture", "prompt", "decode")
"""Phases that a follower may be in while rank 0 goes on."""
group.LOADING_SECONDS = launch.LOADING_SECONDS = LOADING  # type: ignore[misc, attr-defined]


def enter(rank: int, phase: str) -> None:
    """Say where a rank is, and stay there if it is this one's part."""
    folder, stays_in, who = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    (folder / f"{rank}.{phase}.new").write_text(str(os.getpid()))
    (folder / f"{rank}.{phase}.new").rename(folder / f"{rank}.{phase}")
    if (phase, rank) == (stays_in, who):
        time.sleep(STAYS)


def null(rank: int) -> Any:
    """An executable that says when its capture, a prompt, or a step of decode begins."""
    from tests.tiny import compiled, tiny_model

    executable: Any = compiled(tiny_model(num_layers=1), "null", max_batch=1)
    step, prepare = executable.step, executable.prepare

    def said(given: Any) -> Any:
        enter(rank, "decode" if given.decode else "prompt")
        return step(given)

    def prepared() -> None:
        enter(rank, "capture")
        prepare()

    executable.step, executable.prepare = said, prepared
    return executable


def lead() -> None:
    from tilewright.compiler.sampling.params import SamplingParams
    from tilewright.compiler.targets.interface.step import OpenSlot, PrefillChunk, Slot, Step
    from tilewright.compiler.targets.ranks.sharded import ShardedExecutable, meet

    def begin(*what: Any) -> Any:
        children = start_all(*what)
        enter(0, "join")
        return children

    enter(0, "hello")
    start_all, launch.start_all = launch.start_all, begin
    ranks = launch.gather_here(2, sys.argv, limit_s=LIMIT)
    ranks.leader.ends_process = True
    own = null(0)
    enter(0, "load")
    meet(own, SetupCollectives(ranks.leader, ranks.token, LIMIT))
    executable, slot = ShardedExecutable(own, ranks), Slot(0)
    opened = (OpenSlot(slot, SamplingParams()),)
    executable.prepare()
    executable.step(Step(edits=opened, prompts=(PrefillChunk(slot, 0, (1, 2), chooses=True),)))
    started = time.monotonic()
    # long enough for a rank that stays in the middle of a step to be hit and noticed
    while time.monotonic() - started < (STAYS if sys.argv[2] in _STEPS else 1.0):
        executable.step(Step(decode=(slot,)))
        if own.length(slot) > 60:
            executable.step(Step(edits=(OpenSlot(slot, SamplingParams(), keeps=2),)))
            executable.step(Step(prompts=(PrefillChunk(slot, 2, (3,), chooses=True),)))
        time.sleep(0.01)
    enter(0, "idle")
    while sys.argv[2] == "idle" and time.monotonic() - started < STAYS:
        executable.check()  # as a server that nobody asks anything does
        time.sleep(0.01)
    enter(0, "close")
    executable.close()


def follow(rank: int) -> None:
    from tilewright.compiler.targets.ranks.sharded import meet, serve_steps

    enter(rank, "hello")
    follower = launch.join(place_of())  # type: ignore[arg-type]
    enter(rank, "join")
    follower.ends_process, follower.limit_s = True, LIMIT
    executable = null(rank)
    enter(rank, "load")
    meet(executable, SetupCollectives(follower, b"", LIMIT))
    serve_steps(executable, follower)
    enter(rank, "close")
    follower.close()


if __name__ == "__main__":
    found = place_of()
    try:
        lead() if found is None else follow(found.rank)
    except TilewrightError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
