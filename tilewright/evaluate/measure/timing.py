"""Timed runs with a batch: definition and measurement of TTFT, prefill and decode rates.

The warm-up is excluded and every repeat is stored. The first decode step does not count for t/s/u.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tilewright.compiler.sampling.params import SamplingParams, plain_names
from tilewright.compiler.targets.interface.base import Executable
from tilewright.evaluate.results.record import Repeat
from tilewright.runtime.loop import EngineLoop, OnToken
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig

_WARM_UP_TOKENS = 8
_NEUTRAL = SamplingParams()
OFFLINE = SchedulerConfig(reuses=False, prompts_first=True)
"""Scheduling of timed runs: compute all prompts without a prefix cache, then decode together."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """Prompt token ids and sampling parameters for a user."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One repeat: its metrics, and each request's output in request order."""

    repeat: Repeat
    outputs: tuple[tuple[int, ...], ...]


def sampling_text(sampling: SamplingParams) -> str:
    """Return the sampling parameters as text for a record. Empty: greedy, without penalties."""
    if sampling.is_greedy and not sampling.is_penalised:
        return ""
    shown = [f"temperature {sampling.temperature:g}", f"top-k {sampling.top_k}"]
    shown += [f"top-p {sampling.top_p:g}"]
    for name in plain_names():
        value = getattr(sampling, name)
        if name not in ("temperature", "top_k", "top_p") and value != getattr(_NEUTRAL, name):
            shown.append(f"{name.replace('_', '-')} {value:g}")
    return ", ".join(shown)


def time_jobs(
    executable: Executable,
    jobs: Sequence[TimedRequest],
    *,
    num_repeats: int,
    rotate: bool = False,
    on_token: Callable[[int, RequestState, int], None] | None = None,
) -> list[TimedRun]:
    """Run all requests concurrently, ``num_repeats`` times after a warm-up.

    Args:
        rotate: Give every prompt to the next user (request id) in each repeat.
        on_token: Called with repeat, request and token, for every token of the measured runs.
    """
    warm_up(executable, jobs)
    runs = []
    for number in range(num_repeats):
        shift = number if rotate else 0
        order = [(index + shift) % len(jobs) for index in range(len(jobs))]

        def notify(request: RequestState, token: int, number: int = number) -> None:
            if on_token is not None:
                on_token(number, request, token)

        runs.append(time_once(executable, jobs, order, notify))
    return runs


def warm_up(executable: Executable, jobs: Sequence[TimedRequest]) -> None:
    """Run the same prompts with a few output tokens, without timing."""
    fewest = [min(_WARM_UP_TOKENS, job.sampling.max_tokens) for job in jobs]
    requests = [
        RequestState(index, job.prompt, replace(job.sampling, max_tokens=count))
        for index, (job, count) in enumerate(zip(jobs, fewest, strict=True))
    ]
    EngineLoop(executable, policy=OFFLINE).generate(requests)


def time_once(
    executable: Executable, jobs: Sequence[TimedRequest], order: Sequence[int], on_token: OnToken
) -> TimedRun:
    """Time one run of all requests. User ``i`` gets request ``order[i]``."""
    requests = [
        RequestState(user, jobs[index].prompt, jobs[index].sampling)
        for user, index in enumerate(order)
    ]
    started = time.perf_counter()
    EngineLoop(executable, policy=OFFLINE).generate(requests, on_token)
    by_job = dict(zip(order, requests, strict=True))
    ordered = [by_job[index] for index in range(len(jobs))]
    return TimedRun(
        figures(requests, started),
        tuple(tuple(request.output) for request in ordered),
    )


def figures(requests: Sequence[RequestState], started: float) -> Repeat:
    """Return the metrics of finished requests, all queued at ``started``.

    In a batch, TTFT is the time to prefill all users, divided by their number. t/s/u is the mean
    over users of (steps - 1) / time, without the first step.
    """
    firsts = [request.token_times[0] - started for request in requests]
    prompt_tokens = sum(len(request.prompt) for request in requests)
    prefill_seconds = max(firsts)
    rates = [
        (len(times) - 2) / (times[-1] - times[1])
        for request in requests
        if len(times := request.token_times) > 2
    ]
    decoded = sum(len(request.output) - 1 for request in requests)
    decode_seconds = max(r.token_times[-1] for r in requests) - started - prefill_seconds
    many = len(requests) > 1
    return Repeat(
        ttft_ms=1e3 * prefill_seconds / len(requests),
        prefill_tps=prompt_tokens / prefill_seconds,
        decode_tsu=statistics.mean(rates) if rates else None,
        tps=decoded / decode_seconds if decoded and decode_seconds > 0 else None,
        ttft_first_ms=1e3 * min(firsts) if many else None,
        ttft_median_ms=1e3 * statistics.median(firsts) if many else None,
        ttft_last_ms=1e3 * prefill_seconds if many else None,
    )
