"""``python -m bench compare-serve``: servers loaded by the same client, in turn.

By default these are ``tilewright serve`` and ``llama-server`` on the CPU. ``--server NAME=COMMAND``
adds a server with ``--host`` and ``--port``, for example vLLM, SGLang or several replicas. Results
have the start time and the KV pages. Example for two limits of concurrent requests:
``--server "8=tilewright serve M --max-num-seqs 8" "auto=tilewright serve M"``.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.common import (
    CompareOptions,
    Pair,
    Server,
    keeper,
    llama_cpp,
    model_and_copy,
    own_server,
    read_pair,
    run_json,
    running,
)
from tilewright.errors import ConfigError, TilewrightError
from tilewright.evaluate.load.client import connected
from tilewright.evaluate.load.figures import rows_of
from tilewright.evaluate.load.scenarios import SCENARIOS, streams
from tilewright.evaluate.load.shape import LoadConfig
from tilewright.evaluate.report.comparisons import servers_table
from tilewright.options.arguments import integer, option, parse

_STORY = "Tell a long story of a lighthouse keeper, a storm and a ship, with all that is said."
_PAIRS = ("all-q80=Q8_0", "all-q40=Q4_0")


def _server(text: str) -> Server:
    name, separator, command = text.partition("=")
    if not separator or not name or not command.split():
        raise ConfigError(f"--server {text!r}; allowed: NAME=COMMAND")
    return Server(name, tuple(shlex.split(command)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options(CompareOptions):
    pairs: tuple[Pair, ...] = option(
        "a configuration and the GGUF type for llama.cpp",
        default=tuple(map(read_pair, _PAIRS)),
        metavar="PRECISION=TYPE",
        type=read_pair,
    )
    server: tuple[Server, ...] = option(
        "load these servers instead; the first has the name tilewright for ratios",
        default=(),
        metavar="NAME=COMMAND",
        type=_server,
    )
    scenario: str = option("streams or chat", default="streams", aliases=("--plan",))
    users: tuple[int, ...] = option(
        "concurrent users", default=(1, 4, 8, 16), type=integer(1, 1024)
    )
    answers: int = option("requests per user and round", default=3, type=integer(1, 1000))
    input_tokens: int = option("prompt tokens", default=128, type=integer(1, 1 << 20))
    output_tokens: int = option("answer tokens", default=128, type=integer(1, 1 << 20))
    long_tokens: int = option(
        "system prompt tokens in chats", default=256, type=integer(1, 1 << 20)
    )
    turns: int = option("turns in a chat", default=8, type=integer(1, 1000))


def main(argv: list[str]) -> int:
    """Load the servers and print medians. Return the exit code."""
    words = "Load several servers in turn, by the same client."
    options = parse(_Options, argv, prog="python -m bench compare-serve", description=words)
    if options.scenario not in ("streams", "chat"):
        raise ConfigError(f"scenario {options.scenario!r}; allowed: streams, chat")
    keep, rows = keeper(options.results), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as logs:
        for row in _measure_all(options, Path(logs)):
            keep(row)  # at once: a run can be cut
            rows.append(row)
    print(servers_table(rows).markdown(), end="")
    return 0


def _measure_all(options: _Options, logs: Path) -> Iterator[dict[str, Any]]:
    if options.server:
        yield from _measure(options, "", options.server, logs)
        return
    for pair in options.pairs:
        yield from _measure(options, str(pair), _defaults(options, pair), logs, pair)


def _defaults(options: _Options, pair: Pair) -> tuple[Server, ...]:
    path, copy = model_and_copy(options.model, pair.gguf_type)
    grown = options.long_tokens + options.turns * (options.input_tokens + options.output_tokens)
    needed = (
        options.input_tokens + options.output_tokens if options.scenario == "streams" else grown
    )
    sizes: dict[str, Any] = {"users": max(options.users), "context": needed + 64}
    sizes["threads"] = options.num_threads
    ours = own_server(str(path), pair.precision, **sizes)
    return ours, llama_cpp(options.llama_server, copy, **sizes)


def _measure(
    options: _Options,
    title: str,
    servers: tuple[Server, ...],
    logs: Path,
    pair: Pair | None = None,
) -> Iterator[dict[str, Any]]:
    for number in range(options.rounds):
        if pair is not None and options.scenario == "streams":
            rate = _offline(options, pair)
            row = {"server": "tilewright run", "users": 1, "output_tokens_per_second": rate}
            yield {"pair": title, "round": number, **row}
        for server in servers:
            for found in _load(options, server, logs):
                yield {"pair": title, "round": number, **found}


def _load(options: _Options, server: Server, logs: Path) -> Iterator[dict[str, Any]]:
    began = time.perf_counter()
    with running(server, logs / f"{server.name}.log") as url:
        facts = {"start_s": time.perf_counter() - began}
        if any("tilewright" in word for word in server.command):
            facts["num_pages"] = asyncio.run(_num_pages(url))
        print(server.name, facts, file=sys.stderr)
        for users in options.users:
            shape = LoadConfig(
                requests=users * options.answers,
                concurrency=users,
                input_tokens=options.input_tokens,
                output_tokens=options.output_tokens,
                long_tokens=options.long_tokens,
                turns=options.turns,
            )
            row = asyncio.run(_ask(url, options.scenario, shape))
            if row.get("failed"):
                raise TilewrightError(f"{server.name}: {row.get('why', 'a request failed')}")
            yield {"server": server.name, "users": users, **facts, **row}


async def _ask(url: str, scenario: str, shape: LoadConfig) -> dict[str, float | str]:
    async with connected(url, "") as client:
        await client.take_model()
        await rows_of(streams(client, LoadConfig(requests=2, input_tokens=16, output_tokens=8)))
        (row,) = await rows_of(SCENARIOS[scenario](client, shape))
        return row


async def _num_pages(url: str) -> float:
    async with connected(url, "") as client:
        return float((await client.fetch("/props"))["num_pages"])


def _offline(options: _Options, pair: Pair) -> float:
    """Return tokens per second of ``tilewright run``."""
    path, _ = model_and_copy(options.model, pair.gguf_type)
    words = ("run", str(path), "--precision", pair.precision, "--threads")
    length = ("--max-tokens", str(options.output_tokens), "--prompt", _STORY)
    found = run_json(*words, str(options.num_threads), *length)
    rate: float = found["timings"]["tokens_per_second"]
    return rate
