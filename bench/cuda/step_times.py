"""Kernels of a step by GPU time, and host time of a step of the CUDA target."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import Executable
from tilewright.evaluate.measure.timing import OFFLINE, TimedRequest
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.scheduling.request_state import RequestState

_PROMPT, _STEPS, _PROFILED, _MAX_KERNELS = 100, 150, 16, 25
_SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50}


def profile(executable: Executable, jobs: Sequence[TimedRequest], *, is_decode: bool) -> str:
    """Return a table of the kernels of decode steps, or of a prompt, from torch's profiler."""
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
    rows = recorded.key_averages()
    return rows.table(sort_by="self_device_time_total", row_limit=_MAX_KERNELS)


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
