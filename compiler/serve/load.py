"""A client that loads a server with streams of completions and notes when their chunks come.

Any server with OpenAI's completions over token ids will do; it knows nothing of ours.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec

_HEAD = b"data: "
_DONE = b"data: [DONE]"


@dataclass(slots=True)
class Heard:
    """One answer. ``times``: seconds from the request to each chunk with text; ``count``: tokens
    as the server counts them; ``error`` is empty where it came to its end.
    """

    times: list[float] = field(default_factory=list)
    count: int = 0
    error: str = ""

    @property
    def first(self) -> float:
        """Time to the first chunk (TTFT)."""
        return self.times[0]

    @property
    def per_token(self) -> float:
        """Mean time of a token behind the first (TPOT)."""
        return (self.times[-1] - self.times[0]) / max(1, self.count - 1)

    def gaps(self) -> list[float]:
        """Between chunks (ITL), each divided by the mean tokens of a chunk."""
        share = max(1.0, (self.count - 1) / max(1, len(self.times) - 1))
        ends = zip(self.times, self.times[1:], strict=False)
        return [(after - before) / share for before, after in ends]


async def _ask(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> Heard:
    heard, began = Heard(), time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                heard.error = f"status {answer.status}: {(await answer.text())[:200]}"
                return heard
            has_ended = False
            async for line in answer.content:
                if line.startswith(_DONE):
                    has_ended = True
                elif line.startswith(_HEAD):
                    _take(heard, line, time.perf_counter() - began)
            heard.error = heard.error or ("" if has_ended and heard.times else "no whole answer")
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError) as error:
        heard.error = str(error) or type(error).__name__
    return heard


def _take(heard: Heard, line: bytes, now: float) -> None:
    event = msgspec.json.decode(line.removeprefix(_HEAD))
    if "error" in event:
        heard.error = str(event["error"])
        return
    if any(choice.get("text") for choice in event["choices"]):
        heard.times.append(now)
    if event.get("usage"):
        heard.count = event["usage"]["completion_tokens"]


async def run_load(
    url: str, bodies: Sequence[dict[str, Any]], *, concurrency: int, rate: float, seed: int
) -> tuple[list[Heard], float]:
    """Ask for all of ``bodies``; returns what was heard, in their order, and the seconds it took.

    ``rate`` 0: at most ``concurrency`` at a time; else so many arrive a second, as Poisson's do.
    """
    chooser, gate = random.Random(seed), asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:

        async def ask(body: dict[str, Any], after: float) -> Heard:
            if rate:
                await asyncio.sleep(after)
                return await _ask(session, url, body)
            async with gate:
                return await _ask(session, url, body)

        arrival, jobs = 0.0, []
        began = time.perf_counter()
        for body in bodies:
            arrival += chooser.expovariate(rate) if rate else 0.0
            jobs.append(ask(body, arrival))
        found = await asyncio.gather(*jobs)
        return list(found), time.perf_counter() - began
