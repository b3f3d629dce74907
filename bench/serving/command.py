"""``tilewright compare-serve``: our server beside llama.cpp's on the CPU, in turn, A B A B."""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.options import Pair, read_pair
from bench.serving.servers import Contestant, in_turn, llama_cpp, ours, running
from tilewright.compiler.artifacts.places import cache_dir
from tilewright.compiler.bench.display import cell_text, decimal, span
from tilewright.compiler.bench.table import Table
from tilewright.compiler.child import PYTHON
from tilewright.compiler.commands.arguments import integer, option, parse
from tilewright.compiler.devices import describe_cpu
from tilewright.compiler.environment import environment
from tilewright.compiler.errors import ConfigError, TilewrightError
from tilewright.compiler.json_lines import check_writable
from tilewright.compiler.serve.load.client import connected
from tilewright.compiler.serve.load.plans import PLANS, streams
from tilewright.compiler.serve.load.shape import Shape

_FIGURES = {
    "output_tokens_per_second": "output t/s",
    "ttft_ms_p50": "TTFT p50 (ms)",
    "tpot_ms_p50": "TPOT p50 (ms)",
    "later_ttft_ms_p50": "later turns' TTFT p50 (ms)",
    "cached_percent_of_shareable": "cached of shareable (%)",
    "cached_percent_of_prompts": "cached of all prompts (%)",
}
_STORY = "Tell a long story of a lighthouse keeper, a storm and a ship, with all that is said."


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    llama_server: Path = option("llama.cpp's program", default=Path("llama-server"), type=Path)
    model: str | None = option("a GGUF file (default: SmolLM2-135M-Instruct)", metavar="PATH")
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
    threads: int | None = option("CPU threads (default: all cores)", type=integer(1, 1024))
    rounds: int = option("in turn", default=3, type=integer(1, 1000))
    results: str | None = option("add every row to a file of JSON lines", metavar="FILE")


def main(argv: list[str]) -> int:
    """Measure and print the medians; returns the exit code."""
    text = "Load our server and llama.cpp's, in turn, by one client."
    options = parse(_Options, argv, prog="tilewright compare-serve", description=text)
    if options.plan not in ("streams", "chat"):
        raise ConfigError(f"plan {options.plan!r}; allowed: streams, chat")
    if options.results is not None:
        check_writable(Path(options.results))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as logs:
        for pair in options.pairs:
            rows += _measure(options, pair, Path(logs))
    if options.results is not None:
        facts, host = environment(), describe_cpu().model_name
        with Path(options.results).open("a", encoding="utf-8") as file:
            for row in rows:
                taken = {"commit": facts.commit, "date": facts.timestamp, "host": host}
                file.write(json.dumps({**row, **taken}) + "\n")
    print(render(rows), end="")
    return 0


def _measure(options: _Options, pair: Pair, logs: Path) -> list[dict[str, Any]]:
    from bench.peers.gguf_copy import cached_gguf
    from tilewright.models import find_model, load_model

    path = find_model(options.model)
    if not isinstance(path, Path) or path.suffix != ".gguf":
        raise ConfigError(f"{options.model}: llama.cpp reads GGUF files; allowed: one of them")
    digest = load_model(path).checkpoint.content_hash()
    copy = cached_gguf(path, pair.kind, content_hash=digest, folder=cache_dir() / "peers")
    threads = options.threads or describe_cpu().num_cores
    most = max(options.users)
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
        await streams(client, Shape(requests=2, input_tokens=16, output_tokens=8))
        (row,) = await PLANS[plan].run(client, shape)
        return row


def _offline(model: str, precision: str, threads: int, num_tokens: int) -> float:
    """Tokens a second of ``tilewright run``, in a process of its own."""
    command = [*PYTHON, "-m", "tilewright.compiler.cli", "run", model, "--precision", precision]
    command += ["--threads", str(threads), "--max-tokens", str(num_tokens), "--json"]
    command += ["--prompt", _STORY]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise TilewrightError(f"tilewright run: {done.stderr.strip()[-300:]}")
    rate: float = json.loads(done.stdout)["timings"]["tokens_per_second"]
    return rate


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Medians over rounds with their spread, and each of ours over llama.cpp's, as Markdown."""
    keys = list(dict.fromkeys((row["pair"], row["users"]) for row in rows))
    lines = []
    for pair, users in keys:
        for name, title in _FIGURES.items():
            found = {
                server: [row[name] for row in rows if _is_of(row, server, pair, users, name)]
                for server in ("tilewright", "llama.cpp", "tilewright run")
            }
            if not found["tilewright"] or not found["llama.cpp"]:
                continue
            ours, theirs = (statistics.median(found[each]) for each in ("tilewright", "llama.cpp"))
            ratio = f"{ours / theirs:.2f} x" if theirs else ""
            cells = [_median_and_range(found[server]) for server in found]
            lines.append([cell_text(pair), str(users), title, *cells, ratio])
    heads = ["ours / theirs", "users", "figure", "tilewright", "llama.cpp", "run", "ratio"]
    return Table.of(heads, lines).markdown()


def _is_of(row: dict[str, Any], server: str, pair: str, users: int, name: str) -> bool:
    return (row["server"], row["pair"], row["users"]) == (server, pair, users) and name in row


def _median_and_range(values: Sequence[float]) -> str:
    if not values:
        return ""
    ends = span(min(values), max(values), joint=" to ", grouped=True)
    return f"{decimal(statistics.median(values), grouped=True)} ({ends})"
