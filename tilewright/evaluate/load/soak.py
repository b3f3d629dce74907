"""A long test with whole, streamed, cancelled and malformed requests."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from tilewright.evaluate.load.client import COMPLETIONS, Client, ResponseTiming, at_most
from tilewright.evaluate.load.figures import Figures
from tilewright.evaluate.load.shape import LoadConfig

_CANCELLED, _MALFORMED = 0.2, 0.05
_MALFORMED_BODIES = (
    b"",
    b"{",
    b"[]",
    b"\xff\xfe",
    b'{"prompt": "a", "max_tokens": -1}',
    b'{"prompt": [99999999]}',
    b'{"prompt": 5}',
    b'{"messages": []}',
)


async def soak(client: Client, shape: LoadConfig) -> AsyncIterator[Figures]:
    """Send a tenth of the requests, then the rest, and yield the growth between the two.

    No request may be left over, and memory may grow only within its noise.
    """
    tenth = max(1, shape.requests // 10)
    first = await _stretch(client, shape, 0, tenth)
    before = await _left(client)
    rest = await _stretch(client, shape, tenth, shape.requests)
    after = await _left(client)
    grown = {f"{name}_growth": after[name] - before[name] for name in before}
    yield {**rest, "failed": float(first["failed"]) + float(rest["failed"]), **after, **grown}


async def _stretch(client: Client, shape: LoadConfig, begin: int, end: int) -> Figures:
    refused = 0

    async def malformed(number: int) -> ResponseTiming:
        nonlocal refused
        body = _MALFORMED_BODIES[number % len(_MALFORMED_BODIES)]
        status = await client.status(COMPLETIONS, body)
        refused += status == 400
        return ResponseTiming(error="" if status == 400 else f"status {status} for {body!r}")

    jobs: list[Callable[[], Awaitable[ResponseTiming]]] = []
    num_cancelled = 0
    for number in range(begin, end):
        chooser = random.Random(shape.seed + number)
        draw = chooser.random()
        if draw < _MALFORMED:
            jobs.append(partial(malformed, number))
            continue
        body = shape.body(
            chooser,
            num_input=chooser.randint(1, shape.input_tokens),
            num_output=chooser.randint(1, shape.output_tokens),
        )
        if draw < _MALFORMED + _CANCELLED:
            num_cancelled += 1
            jobs.append(partial(client.stream, COMPLETIONS, body, 1))
        elif draw < 0.6:
            jobs.append(partial(client.stream, COMPLETIONS, body))
        else:
            jobs.append(partial(client.whole, COMPLETIONS, body))
    heard, seconds = await at_most(shape.concurrency, jobs)
    failed = [each.error for each in heard if each.error]
    return {
        "requests": len(jobs),
        "cancelled": num_cancelled,
        "malformed_refused": refused,
        "seconds": seconds,
        "requests_per_second": len(jobs) / seconds,
        "failed": len(failed),
        **({"why": failed[0]} if failed else {}),
    }


async def _left(client: Client) -> dict[str, float]:
    """Return the idle server's requests, pages, snapshots, and memory of processes."""
    found = await client.metrics()
    names = ["num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"]
    names.append("snapshots_used")
    sizes = {name: found[name] for name in names if name in found}
    for process in ("process", "engine_process"):
        if f"{process}_open_fds" in found:
            sizes[f"{process}_mb"] = found[f"{process}_resident_memory_bytes"] / 1e6
            sizes[f"{process}_descriptors"] = found[f"{process}_open_fds"]
    return sizes
