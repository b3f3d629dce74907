"""``python -m bench compare-serve``: our server beside llama.cpp's on the CPU, in turn, A B A B."""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.in_turn import BesideLlama, answer_of, keeper, model_and_copy
from bench.peers.options import Pair, read_pair
from bench.serving.servers import Contestant, in_turn, llama_cpp, ours, running
from bench.serving.tables import render
from tilewright.errors import ConfigError, TilewrightError
from tilewright.evaluate.load.client import connected
from tilewright.evaluate.load.figures import rows_of
from tilewright.evaluate.load.plans import PLANS, streams
from tilewright.evaluate.load.shape import Shape
from tilewright.options.arguments import integer, option, parse

_STORY = "Tell a long story of a lighthouse keeper, a storm and a ship, with all that is said."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options(BesideLlama):
    pairs: tuple[Pair, ...] = option(
        "a configuration and the GGUF type beside it",
        default=(Pair("all-q80", "Q8_0"), Pair("all-q40", "Q4_0")),
        metavar="PRECISION=TYPE",
        type=read_pair,
    )
    plan: str = option("streams or chat", default="streams")
    users: tuple[int, ...] = option("at a time", default=(1, 4, 8, 16), type=integer(1, 1024))
    answers: int = option("of each user, in a round", default=3, type=integer(1, 1000))
    input_tokens: int = option("of each prompt", default=128, type=integer(1, 1 << 20))
    output_tokens: int = option("of each answer", default=128, type=integer(1, 1 << 20))
    long_tokens: int = option("of chats' system prompt", default=256, type=integer(1, 1 << 20))
    turns: int = option("of each chat", default=8, type=integer(1, 1000))


def main(argv: list[str]) -> int:
    """Measure and print the medians; returns the exit code."""
    text = "Load our server and llama.cpp's, in turn, by one client."
    options = parse(_Options, argv, prog="python -m bench compare-serve", description=text)
    if options.plan not in ("streams", "chat"):
        raise ConfigError(f"plan {options.plan!r}; allowed: streams, chat")
    keep, rows = keeper(options.results), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as logs:
        for pair in options.pairs:
            rows += _measure(options, pair, Path(logs))
    for row in rows:
        keep(row)
    print(render(rows), end="")
    return 0


def _measure(options: _Options, pair: Pair, logs: Path) -> list[dict[str, Any]]:
    path, copy = model_and_copy(options.model, pair.kind)
    threads, most = options.num_threads, max(options.users)
    grown = options.long_tokens + options.turns * (options.input_tokens + options.output_tokens)
    needed = options.input_tokens + options.output_tokens if options.plan == "streams" else grown
    sizes = {"users": most, "context": needed + 64, "threads": threads}
    both = (
        ours(str(path), pair.precision, **sizes),
        llama_cpp(options.llama_server, copy, **sizes),
    )
    rows: list[dict[str, Any]] = []
    for number, contestant in in_turn(both, options.rounds):
        if contestant is both[0] and options.plan == "streams":
            rate = _offline(str(path), pair.precision, threads, options.output_tokens)
            row = {"server": "tilewright run", "users": 1, "output_tokens_per_second": rate}
            rows.append({"pair": f"{pair.precision} | {pair.kind}", "round": number, **row})
        for found in _one(options, contestant, logs):
            rows.append({"pair": f"{pair.precision} | {pair.kind}", "round": number, **found})
    return rows


def _one(options: _Options, contestant: Contestant, logs: Path) -> list[dict[str, Any]]:
    log = logs / f"{contestant.name}.log"
    rows: list[dict[str, Any]] = []
    with running(contestant, log) as url:
        for users in options.users:
            shape = Shape(
                requests=users * options.answers,
                concurrency=users,
                input_tokens=options.input_tokens,
                output_tokens=options.output_tokens,
                long_tokens=options.long_tokens,
                turns=options.turns,
            )
            row = asyncio.run(_ask(url, options.plan, shape))
            if row.get("failed"):
                raise TilewrightError(f"{contestant.name}: {row.get('why', 'a request failed')}")
            rows.append({"server": contestant.name, "users": users, **row})
    return rows


async def _ask(url: str, plan: str, shape: Shape) -> dict[str, float | str]:
    async with connected(url, "any") as client:
        await rows_of(streams(client, Shape(requests=2, input_tokens=16, output_tokens=8)))
        (row,) = await rows_of(PLANS[plan].run(client, shape))
        return row


def _offline(model: str, precision: str, threads: int, num_tokens: int) -> float:
    """Tokens a second of ``tilewright run``, in a process of its own."""
    words = ("run", model, "--precision", precision, "--threads", str(threads))
    found = answer_of(*words, "--max-tokens", str(num_tokens), "--prompt", _STORY)
    rate: float = found["timings"]["tokens_per_second"]
    return rate
