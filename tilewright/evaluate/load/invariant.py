"""Checks whether an answer depends on other requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from tilewright.evaluate.load.client import COMPLETIONS, Client, at_most
from tilewright.evaluate.load.figures import Figures
from tilewright.evaluate.load.shape import LoadConfig


async def invariant(client: Client, shape: LoadConfig) -> AsyncIterator[Figures]:
    """Send requests of different lengths in turn, then concurrently, then in turn again.

    The concurrent requests have another order, and further requests are cancelled meanwhile. The
    last requests use the prefix cache. Half of the requests sample with seeds. A different answer
    is a failure if the server promises equal answers for this concurrency.
    """
    chooser = random.Random(shape.seed)
    bodies = [_body(shape, chooser, number) for number in range(shape.requests)]
    alone, _ = await at_most(1, [partial(client.whole, COMPLETIONS, each) for each in bodies])
    order = list(range(len(bodies)))
    chooser.shuffle(order)
    cancels = asyncio.create_task(_disturb(client, shape))
    try:
        shuffled = [partial(client.whole, COMPLETIONS, bodies[at]) for at in order]
        found, _ = await at_most(shape.concurrency, shuffled)
    finally:
        cancels.cancel()
        await asyncio.gather(cancels, return_exceptions=True)
    warm, _ = await at_most(1, [partial(client.whole, COMPLETIONS, each) for each in bodies])
    together = dict(zip(order, found, strict=True))
    failed = [each.error for each in (*alone, *found, *warm) if each.error]
    num_different = sum(one.text != together[at].text for at, one in enumerate(alone))
    num_warm = sum(one.text != other.text for one, other in zip(alone, warm, strict=True))
    props = await client.fetch("/props")
    promised = props.get("invariant", "none")
    if (most := props.get("invariant_requests")) and shape.concurrency + 1 > most:
        promised = "none"  # the disturbing request counts, too
    if promised != "none":
        failed += ["an answer differs"] * (num_different + num_warm)
    yield {
        "requests": len(bodies),
        "concurrency": shape.concurrency,
        "promised": promised,
        "answers_that_differ": num_different,
        "answers_that_differ_warm": num_warm,
        "failed": len(failed),
        **({"why": failed[0]} if failed else {}),
    }


def _body(shape: LoadConfig, chooser: random.Random, number: int) -> dict[str, Any]:
    body = shape.body(
        chooser,
        num_input=chooser.randint(1, shape.input_tokens),
        num_output=chooser.randint(1, shape.output_tokens),
    )
    return body | ({"temperature": 1.0, "seed": number} if number % 2 else {})


async def _disturb(client: Client, shape: LoadConfig) -> None:
    """Run other requests, with cancellations, until the task is canceled."""
    chooser = random.Random(shape.seed + 1)
    while True:
        await client.stream(COMPLETIONS, shape.body(chooser), most=chooser.randint(1, 4))
