"""How long the host takes to schedule and to launch steps of the CUDA target, and where that goes.

``python -m bench.cuda.launch_time [ROW]`` (a row of ``bench-cuda``, which says shape, precision and
users) prints microseconds of the host a step: unchanged, and with one request that ends and another
that comes each step, greedy and drawing; then the functions that took longest. ``prepare`` is how
long the captures of all steps take.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from dataclasses import replace

from bench.cuda.measure import Bench
from bench.cuda.rows import find_rows
from tilewright.compiler.targets.interface.base import Executable
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.request import Request
from tilewright.runtime.sampling import SamplingParams

_PROMPT, _STEPS = 100, 150
_DRAWN = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}


def measured(
    executable: Executable, num_seats: int, kind: dict[str, float], *, changes: bool
) -> str:
    """A line of figures; ``changes``: whether a request ends and another comes each step."""
    loop = EngineLoop(executable)
    number = 0

    def add(wanted: int) -> None:
        nonlocal number
        params = SamplingParams(max_tokens=wanted, seed=number, **kind)  # type: ignore[arg-type]
        loop.add(Request(number, (3 + number % 1000,) * _PROMPT, params))
        number += 1

    for at in range(num_seats):
        add(num_seats + at if changes else 4 * _STEPS)
    for _ in range(num_seats + 20):
        _next(loop, add if changes else None, num_seats)
    before = {key: (sum(each.counts), each.total) for key, each in loop.tallies.found.items()}
    began = time.perf_counter()
    for _ in range(_STEPS):
        _next(loop, add if changes else None, num_seats)
    took = 1e6 * (time.perf_counter() - began) / _STEPS
    parts = []
    for key, tally in loop.tallies.found.items():
        count, total = before.get(key, (0, 0.0))
        if (more := sum(tally.counts) - count) and "host" in key:
            parts.append(f"{key} {1e6 * (tally.total - total) / more:,.0f}")
    for each in [*loop.scheduler.running]:
        loop.cancel(each.request)
    loop.generate([])
    what = "one ends, one comes" if changes else "unchanged"
    return f"{what}, {'drawing' if kind else 'greedy'}: {took:,.0f} a step; {', '.join(parts)}"


def _next(loop: EngineLoop, add: Callable[[int], None] | None, num_seats: int) -> None:
    loop.step()
    if add is not None and len(loop.scheduler.running) < num_seats:
        add(num_seats)


def main(argv: list[str]) -> int:
    """Print the figures of a row's shape and users."""
    (row,) = find_rows((argv[0] if argv else "8b-bf16-b64",))
    row = replace(row, prompt_length=1024)
    bench = Bench((row,), target="cuda", repeats=1, progress=lambda what, done, total: None)
    executable = bench.compiled.executable
    began = time.perf_counter()
    executable.prepare()
    print(f"{row.name}: prepare {time.perf_counter() - began:.1f} s; microseconds of the host:")
    EngineLoop(executable).warm_up()
    profile = cProfile.Profile()
    for kind in ({}, _DRAWN):
        for changes in (False, True):
            print(measured(executable, row.batch, kind, changes=changes), flush=True)
    profile.runcall(measured, executable, row.batch, {}, changes=True)
    pstats.Stats(profile).sort_stats("tottime").print_stats(25)
    bench.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
