"""``tilewright bench-serve``: loads a server with streams and says how fast they come."""

from __future__ import annotations

import asyncio
import json
import math
import random
import statistics
from dataclasses import asdict, dataclass
from typing import Any

from tilewright.compiler.commands.arguments import integer, option, parse, real
from tilewright.compiler.errors import TilewrightError


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    url: str = option("of the server", default="http://127.0.0.1:8000")
    model: str = option("the name to ask for", default="model")
    requests: int = option("in all", default=32, type=integer(1, 1 << 20))
    concurrency: int = option("closed loop: under way at a time", default=1, type=integer(1, 4096))
    rate: float = option("open loop: requests a second, Poisson", default=0.0, type=real(0, 1e6))
    input_tokens: int = option("of each prompt", default=128, type=integer(1, 1 << 20))
    output_tokens: int = option("of each answer", default=128, type=integer(1, 1 << 20))
    warm_up: int = option("requests before, not counted", default=2, type=integer(0, 1000))
    seed: int = option("of prompts and arrivals", default=0, type=integer(0, 1 << 31))
    vocabulary: int = option("ids of prompts are below", default=256, type=integer(2, 1 << 31))
    as_json: bool = option("print JSON", "--json", default=False)


def main(argv: list[str]) -> int:
    """Run the load; returns 1 where a request failed."""
    text = "Load a server with streams of completions."
    options = parse(_Options, argv, prog="tilewright bench-serve", description=text)
    from tilewright.compiler.serve.load import Heard, run_load

    def load(bodies: list[dict[str, Any]], rate: float) -> tuple[list[Heard], float]:
        return asyncio.run(
            run_load(
                options.url.rstrip("/"),
                bodies,
                concurrency=options.concurrency,
                rate=rate,
                seed=options.seed,
            )
        )

    if options.warm_up:
        load(_bodies(options, options.warm_up, seed=options.seed + 1), 0.0)
    heard, seconds = load(_bodies(options, options.requests, seed=options.seed), options.rate)
    good = [each for each in heard if not each.error]
    if not good:
        raise TilewrightError(f"{options.url}: every request failed ({heard[0].error})")
    count = sum(each.count for each in good)
    figures = {
        "failed": len(heard) - len(good),
        "seconds": seconds,
        "requests_per_second": len(good) / seconds,
        "output_tokens_per_second": count / seconds,
        "output_tokens": count,
        **_times("ttft", [each.first for each in good]),
        **_times("itl", [gap for each in good for gap in each.gaps()]),
        **_times("tpot", [each.per_token for each in good]),
    }
    if options.as_json:
        print(json.dumps({**asdict(options), **figures}))
    else:
        for name, value in figures.items():
            print(f"{name:<26} {value:.6g}")
    return int(len(good) < len(heard))


def _bodies(options: _Options, count: int, *, seed: int) -> list[dict[str, Any]]:
    chooser = random.Random(seed)
    return [
        {
            "model": options.model,
            "prompt": [chooser.randrange(options.vocabulary) for _ in range(options.input_tokens)],
            "max_tokens": options.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(count)
    ]


def _times(name: str, seconds: list[float]) -> dict[str, float]:
    """Median and 99th percentile, in milliseconds."""
    if not seconds:
        return {}
    return {
        f"{name}_ms_p50": 1e3 * statistics.median(seconds),
        f"{name}_ms_p99": 1e3 * sorted(seconds)[math.ceil(0.99 * len(seconds)) - 1],
    }
