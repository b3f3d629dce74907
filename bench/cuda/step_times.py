"""A step's kernels by GPU time, and its host time, on the CUDA target."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import Executable
from tilewright.evaluate.measure.timing import OFFLINE, TimedRequest
from tilewright.evaluate.report.table import Table
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState

_PROMPT, _STEPS, _PROFILED, _MAX_KERNELS, _MAX_NAME = 100, 150, 16, 25, 60
_SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}


def profile(executable: Executable, jobs: Sequence[TimedRequest], *, is_decode: bool) -> str:
    """Return kernels by time from torch's profiler, for `_PROFILED` decode steps or a prompt."""
    import torch
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    # Captured graphs fail at exit after a teardown of CUPTI.
    os.environ["TEARDOWN_CUPTI"] = "0"
    loop = EngineLoop(executable, policy=OFFLINE)
    requests = [RequestState(at, job.prompt, job.sampling) for at, job in enumerate(jobs)]
    for request in requests:
        loop.add(request)
    while is_decode and not all(len(request.output) > 3 for request in requests):
        loop.step()
    has_gpu = torch.cuda.is_available()
    activity = ProfilerActivity.CUDA if has_gpu else ProfilerActivity.CPU
    with record(activities=[activity]) as recorded:
        for _ in range(_PROFILED if is_decode else 1):
            loop.step()
        if has_gpu:
            torch.cuda.synchronize()
    for request in requests:
        loop.cancel(request)
    spans = [
        (each.name, each.time_range.start, each.time_range.end)
        for each in recorded.events() or ()
        if not has_gpu or each.device_type.name == "CUDA"
    ]
    return by_kernel(spans)


def by_kernel(spans: Iterable[tuple[str, float, float]]) -> str:
    """Return kernels by time, from names, starts and ends in microseconds.

    A dependent launch starts early and then waits. Therefore a kernel has only the time in which no
    earlier kernel ran, in the order of their ends. The total is the GPU's busy time.
    """
    counts, times, covered = dict[str, int](), dict[str, float](), list[tuple[float, float]]()
    for name, start, end in sorted(spans, key=lambda span: span[2]):
        first, own = start, end - start
        while covered and covered[-1][1] > start:
            begin, until = covered.pop()
            own -= until - max(begin, start)
            first = min(first, begin)
        covered.append((first, end))
        counts[name] = counts.get(name, 0) + 1
        times[name] = times.get(name, 0.0) + own
    total = sum(times.values()) or 1.0
    names = sorted(times, key=lambda name: -times[name])[:_MAX_KERNELS]
    rows = (
        (
            name[:_MAX_NAME].replace("|", "/"),
            f"{counts[name]:,}",
            f"{times[name] / counts[name]:,.1f}",
            f"{times[name] / 1000:,.2f}",
            f"{100 * times[name] / total:.1f}",
        )
        for name in names
    )
    return Table.of(("kernel", "launches", "us a launch", "ms", "%"), rows).markdown()


def host_times(executable: Executable, num_slots: int, *, samples: bool = True) -> Iterator[str]:
    """Yield the host time of a step (us), for equal and for changing requests."""
    EngineLoop(executable).warm_up()
    for params in ({}, _SAMPLED) if samples else ({},):
        for changes in (False, True):
            yield _host_time(executable, num_slots, params, changes=changes)


def _host_time(
    executable: Executable, num_slots: int, params: dict[str, float], *, changes: bool
) -> str:
    """Measure steps. ``changes``: in each step a request ends and another begins."""
    loop, number = EngineLoop(executable), 0

    def add(max_tokens: int) -> None:
        nonlocal number
        sampling = SamplingParams(max_tokens=max_tokens, seed=number, **params)  # type: ignore[arg-type]
        loop.add(RequestState(number, (3 + number % 1000,) * _PROMPT, sampling))
        number += 1

    for at in range(num_slots):
        add(num_slots + at if changes else 4 * _STEPS)
    more = add if changes else None
    for _ in range(num_slots + 20):
        _step(loop, more, num_slots)
    before = {key: (sum(each.counts), each.total) for key, each in loop.stats.found.items()}
    with _timed_graphs() as graph_seconds:
        began = time.perf_counter()
        for _ in range(_STEPS):
            _step(loop, more, num_slots)
        took = 1e6 * (time.perf_counter() - began) / _STEPS
    parts = [f"graphs {1e6 * sum(graph_seconds) / _STEPS:,.0f}"] if graph_seconds else []
    for key, tally in loop.stats.found.items():
        count, total = before.get(key, (0, 0.0))
        if (steps := sum(tally.counts) - count) and "host" in key:
            parts.append(f"{key} {1e6 * (tally.total - total) / steps:,.0f}")
    for each in [*loop.scheduler.running]:
        loop.cancel(each)
    loop.generate([])
    what = "changing" if changes else "unchanged"
    return f"{what}, {'sampled' if params else 'greedy'}: {took:,.0f} us a step; {', '.join(parts)}"


@contextmanager
def _timed_graphs() -> Iterator[list[float]]:
    """Collect the launch times of captured graphs in seconds."""
    from tilewright.compiler.targets.cuda.graphs.capture import CapturedGraph

    launch, seconds = CapturedGraph.__call__, list[float]()

    def timed(graph: CapturedGraph) -> None:
        began = time.perf_counter()
        launch(graph)
        seconds.append(time.perf_counter() - began)

    CapturedGraph.__call__ = timed  # type: ignore[method-assign,assignment]
    try:
        yield seconds
    finally:
        CapturedGraph.__call__ = launch  # type: ignore[method-assign]


def _step(loop: EngineLoop, add: Callable[[int], None] | None, num_slots: int) -> None:
    loop.step()
    if add is not None and len(loop.scheduler.running) < num_slots:
        add(num_slots)
