"""Load scenarios by name. Each sends requests to a server and yields rows of figures."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from itertools import pairwise

from tilewright.evaluate.load.chats import chats
from tilewright.evaluate.load.client import (
    COMPLETIONS,
    Client,
    arriving,
    at_most,
)
from tilewright.evaluate.load.contest import contest
from tilewright.evaluate.load.figures import Figures, summary
from tilewright.evaluate.load.invariant import invariant
from tilewright.evaluate.load.schemas import schemas
from tilewright.evaluate.load.shape import LoadConfig
from tilewright.evaluate.load.soak import soak

SETTLE_SECONDS = 1.0
"""Time that streams run before the intruder starts."""

Scenario = Callable[[Client, LoadConfig], AsyncIterator[Figures]]
"""Sends requests to a server and yields rows of figures."""


async def streams(client: Client, shape: LoadConfig) -> AsyncIterator[Figures]:
    """Send completions with random token ids in a closed loop, or in an open loop with a rate."""
    chooser = random.Random(shape.seed)
    jobs = [partial(client.stream, COMPLETIONS, shape.body(chooser)) for _ in range(shape.requests)]
    if shape.rate:
        heard, seconds = await arriving(shape.rate, shape.seed, jobs)
    else:
        heard, seconds = await at_most(shape.concurrency, jobs)
    yield summary(heard, seconds)


async def intruder(client: Client, shape: LoadConfig) -> AsyncIterator[Figures]:
    """Send a long prompt during streams. Report their longest gap with and without the prompt."""
    chooser = random.Random(shape.seed)
    # Generate all bodies first: work of this process during streams would look like a gap.
    bodies = [shape.body(chooser) for _ in range(shape.concurrency)]
    body = shape.body(chooser, num_input=shape.long_tokens, num_output=2)
    streams = [asyncio.create_task(client.stream(COMPLETIONS, each)) for each in bodies]
    await asyncio.sleep(SETTLE_SECONDS)
    long = await client.stream(COMPLETIONS, body)
    heard = await asyncio.gather(*streams)
    for each in (long, *heard):
        if each.error:
            yield {"failed": 1, "why": each.error}
            return
    start, end = long.began, long.began + long.first
    before, beside = 0.0, 0.0
    for each in heard:
        at = [each.began + time for time in each.times]
        for one, other in pairwise(at):
            if one < end and other > start:
                beside = max(beside, other - one)
            elif other <= start:
                before = max(before, other - one)
    yield {
        "streams": len(heard),
        "long_prompt_tokens": shape.long_tokens,
        "long_prompt_ttft_ms": 1e3 * long.first,
        "longest_gap_before_ms": 1e3 * before,
        "longest_gap_beside_ms": 1e3 * beside,
        "failed": 0,
    }


async def overhead(client: Client, shape: LoadConfig) -> AsyncIterator[Figures]:
    """Send streams with a user and with all users. Report the server's own host times, too."""
    for users in sorted({1, shape.concurrency}):
        before = await client.metrics()
        chooser = random.Random(shape.seed)
        bodies = [shape.body(chooser) for _ in range(max(2 * users, 4))]
        jobs = [partial(client.stream, COMPLETIONS, body) for body in bodies]
        heard, seconds = await at_most(users, jobs)
        after = await client.metrics()
        yield {"users": users, **summary(heard, seconds), **_host(before, after, seconds)}


def _host(before: dict[str, float], after: dict[str, float], seconds: float) -> Figures:
    """Return mean host times of a step by part, and the share of time without device work."""
    spent = {name: value - before.get(name, 0.0) for name, value in after.items()}
    steps = sum(v for name, v in spent.items() if name.startswith("step_seconds_count"))
    if not steps:
        return {}
    found: Figures = {"steps_per_second": steps / seconds}
    for name, value in sorted(spent.items()):
        if name.startswith("host_seconds_sum"):
            found[f"host_us_a_step{name.removeprefix('host_seconds_sum')}"] = 1e6 * value / steps
        elif name.startswith("device_idle_seconds_sum"):
            found["device_idle_percent"] = 100 * value / seconds
    return found


SCENARIOS: Mapping[str, Scenario] = {
    "streams": streams,
    "overhead": overhead,
    "intruder": intruder,
    "chat": chats,
    "contest": contest,
    "json": schemas,
    "invariant": invariant,
    "soak": soak,
}
