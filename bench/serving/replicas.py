"""``bench compare-replicas``: several replicas behind one server beside one alone, in turn.

Each is loaded by as many users a replica; on CPUs, one engine with all threads stands beside them.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

from bench.in_turn import TILEWRIGHT, InTurn, keeper, median_and_range
from bench.serving.servers import Contestant, in_turn, running
from tilewright.errors import TilewrightError
from tilewright.evaluate.load.client import COMPLETIONS, Heard, at_most, connected
from tilewright.evaluate.load.figures import summary
from tilewright.evaluate.load.shape import Shape
from tilewright.evaluate.report.display import decimal
from tilewright.evaluate.report.table import Table
from tilewright.options.arguments import integer, option, parse

_WARM_TOKENS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options(InTurn):
    model: str = option("as of tilewright serve", default="smollm2", metavar="PATH")
    target: str = option("of every server", default="cpu")
    precision: str = option("of every server", default="auto", metavar="NAME")
    replicas: int = option("behind one server", default=2, type=integer(2, 64))
    users: int = option("of each replica, at a time", default=4, type=integer(1, 4096))
    answers: int = option("of each user, in a round", default=3, type=integer(1, 1000))
    input_tokens: int = option("of each prompt", default=128, type=integer(1, 1 << 20))
    output_tokens: int = option("of each answer", default=128, type=integer(1, 1 << 20))
    styles: tuple[str, ...] = option(
        "how answers are asked for: stream, whole", default=("stream",), choices=("stream", "whole")
    )
    clients: int = option("processes that the users are dealt to", default=1, type=integer(1, 64))


@dataclass(frozen=True, slots=True)
class _Place:
    """A server, and how many users load it."""

    contestant: Contestant
    users: int


def main(argv: list[str]) -> int:
    """Measure and print the medians; returns the exit code."""
    text = "Load replicas behind one server and one engine alone, in turn."
    options = parse(_Options, argv, prog="python -m bench compare-replicas", description=text)
    keep, rows = keeper(options.results), list[dict[str, Any]]()
    places = _places(options)
    by_name = {each.contestant.name: each for each in places}
    with tempfile.TemporaryDirectory() as logs:
        for number, contestant in in_turn([each.contestant for each in places], options.rounds):
            found = _one(options, by_name[contestant.name], Path(logs))
            for row in found:
                row |= {"server": contestant.name, "round": number, "model": options.model}
                keep(row)
            rows += found
    print(render(rows), end="")
    return 0


def _places(options: _Options) -> list[_Place]:
    """The servers: one replica alone, on CPUs one engine with all threads, and the replicas."""
    count, users = options.replicas, options.users
    context = options.input_tokens + options.output_tokens + 64
    sizes = ["--max-context", str(context), "--no-prefix-cache"]

    def serve(name: str, seats: int, *more: str) -> Contestant:
        command = [*TILEWRIGHT, "serve", options.model]
        command += ["--target", options.target, "--precision", options.precision, *sizes]
        return Contestant(name, (*command, "--max-seats", str(seats), *more))

    if options.target == "cuda":
        both = serve(f"{count} replicas", users, "--replicas", str(count))
        return [_Place(serve("one", users), users), _Place(both, count * users)]
    threads = options.num_threads
    share = max(1, threads // count)
    cores = ("--replicas", str(count), "--threads", str(threads))
    return [
        _Place(serve(f"one, {share} threads", users, "--threads", str(share)), users),
        _Place(
            serve(f"one, {threads} threads", count * users, "--threads", str(threads)),
            count * users,
        ),
        _Place(serve(f"{count} replicas", users, *cores), count * users),
    ]


def _one(options: _Options, place: _Place, logs: Path) -> list[dict[str, Any]]:
    began = time.perf_counter()
    with running(place.contestant, logs / f"{place.contestant.name}.log") as url:
        ready = time.perf_counter() - began
        rows = load(options, url, place.users)
    return [{"start_seconds": ready, "users": place.users, **row} for row in rows]


def load(options: _Options, url: str, users: int) -> list[dict[str, float | str]]:
    """Load a server that is up, in every style, behind a short warm-up."""
    shape = Shape(input_tokens=options.input_tokens, output_tokens=options.output_tokens)
    warm = replace(shape, output_tokens=_WARM_TOKENS)
    clients = min(options.clients, users)
    kind = multiprocessing.get_context("spawn")
    meeting = kind.Barrier(clients)
    with ProcessPoolExecutor(clients, kind, initializer=_meet, initargs=(meeting,)) as pool:
        _load(pool, clients, partial(_ask, url, "stream", warm), users, 1)
        return [
            {
                "style": style,
                "clients": clients,
                **_load(pool, clients, partial(_ask, url, style, shape), users, options.answers),
            }
            for style in options.styles
        ]


def _meet(meeting: Barrier) -> None:
    """No process takes work before all are there, so that each takes its own, at once."""
    meeting.wait()


def _load(
    pool: ProcessPoolExecutor,
    clients: int,
    ask: Callable[[int, int, int], _Told],
    users: int,
    answers: int,
) -> dict[str, float | str]:
    """Users dealt to so many processes; the clock runs from the first question to the last end."""
    dealt = [len(range(client, users, clients)) for client in range(clients)]
    asked = [pool.submit(ask, count, answers, client) for client, count in enumerate(dealt)]
    told = [each.result() for each in asked]
    seconds = max(each.ended for each in told) - min(each.began for each in told)
    row = summary([heard for each in told for heard in each.heard], seconds)
    if row["failed"]:
        raise TilewrightError(str(row["why"]))
    cpu = sum(each.cpu_s for each in told)
    chunks = sum(len(heard.times) for each in told for heard in each.heard)
    return {**row, "client_us_per_chunk": 1e6 * cpu / chunks}


@dataclass(frozen=True, slots=True)
class _Told:
    """What one process of the client heard, when by the clock of all, and its own CPU time."""

    heard: list[Heard]
    began: float
    ended: float
    cpu_s: float


def _ask(url: str, style: str, shape: Shape, users: int, answers: int, client: int) -> _Told:
    return asyncio.run(_asked(url, style, shape, users, answers, client))


async def _asked(
    url: str, style: str, shape: Shape, users: int, answers: int, client: int
) -> _Told:
    chooser = random.Random(f"{shape.seed} {client}")
    async with connected(url, "any") as asks:
        ask = getattr(asks, style)
        bodies = [shape.body(chooser) for _ in range(users * answers)]
        began, spent = time.monotonic(), time.process_time()
        heard, _ = await at_most(users, [partial(ask, COMPLETIONS, body) for body in bodies])
        return _Told(heard, began, time.monotonic(), time.process_time() - spent)


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Medians over rounds with their spread, and each server over the first, as Markdown."""
    lines = []
    for style in dict.fromkeys(row["style"] for row in rows):
        first: float | None = None
        for name in dict.fromkeys(row["server"] for row in rows):
            own = [row for row in rows if (row["server"], row["style"]) == (name, style)]
            rates = [row["output_tokens_per_second"] for row in own]
            middle = statistics.median(rates)
            first = first or middle
            times = [
                decimal(statistics.median(row[each] for row in own), grouped=True)
                for each in ("ttft_ms_p50", "tpot_ms_p50")
            ]
            cells = [median_and_range(rates), *times]
            lines.append([style, name, str(own[0]["users"]), *cells, f"{middle / first:.2f} x"])
    times_of = ["TTFT p50 (ms)", "TPOT p50 (ms)"]
    heads = ["answers", "server", "users", "output t/s", *times_of, "of the first"]
    return Table.of(heads, lines).markdown()
