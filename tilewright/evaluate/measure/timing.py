"""Timed runs of a batch of prompts: what TTFT, prefill and decode rates are, how they are taken.

Warm-up is apart, every repeat is kept, and the first decode step does not count for t/s/u.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import Executable
from tilewright.evaluate.results.record import Repeat
from tilewright.runtime.loop import EngineLoop, OnToken
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig

_WARM_UP_TOKENS = 8
OFFLINE = SchedulerConfig(reuses=False, prompts_first=True)
"""How timed runs are scheduled: all prompts, each of them computed, then all decode together."""


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """One user's work: prompt token ids and how the answer is chosen."""

    prompt: tuple[int, ...]
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class TimedRun:
    """One repeat: its figures, and the tokens of each job, in the jobs' order."""

    repeat: Repeat
    outputs: tuple[tuple[int, ...], ...]


def sampling_text(sampling: SamplingParams) -> str:
    """How tokens are chosen, as a record says it; empty where each is the likeliest one."""
    if sampling.is_greedy:
        return ""
    return f"temperature {sampling.temperature:g}, top-k {sampling.top_k}, top-p {sampling.top_p:g}"


def time_jobs(
    executable: Executable,
    jobs: Sequence[TimedRequest],
    *,
    num_repeats: int,
    rotate: bool = False,
    on_token: Callable[[int, RequestState, int], None] | None = None,
) -> list[TimedRun]:
    """Serve all jobs at once, ``num_repeats`` times after a warm-up.

    ``rotate`` hands every prompt to the next user (request id) at each repeat. ``on_token(repeat,
    request, token)`` hears every token of the measured runs.
    """
    warm_up(executable, jobs)
    runs = []
    for number in range(num_repeats):
        shift = number if rotate else 0
        order = [(index + shift) % len(jobs) for index in range(len(jobs))]

        def hear(request: RequestState, token: int, number: int = number) -> None:
            if on_token is not None:
                on_token(number, request, token)

        runs.append(time_once(executable, jobs, order, hear))
    return runs


def warm_up(executable: Executable, jobs: Sequence[TimedRequest]) -> None:
    """A run with the same prompts and a few tokens, whose times nobody looks at."""
    fewest = [min(_WARM_UP_TOKENS, job.sampling.max_tokens) for job in jobs]
    requests = [
        RequestState(index, job.prompt, replace(job.sampling, max_tokens=count))
        for index, (job, count) in enumerate(zip(jobs, fewest, strict=True))
    ]
    EngineLoop(executable, policy=OFFLINE).generate(requests)


def time_once(
    executable: Executable, jobs: Sequence[TimedRequest], order: Sequence[int], on_token: OnToken
) -> TimedRun:
    """Time one run of all jobs, in which user ``i`` gets job ``order[i]``."""
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
    """The figures of finished requests that were all queued at ``started``.

    At a batch above 1 the TTFT is the time in which all users were prefilled, divided by their
    number. t/s/u is the mean over users of (steps - 1) / (their time), the first step left out.
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
