"""``python -m bench compare-batch``: a batch and llama.cpp's server on the CPU, in turn."""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.batch.made import RowOptions
from bench.common import (
    CompareOptions,
    Pair,
    Server,
    check_program,
    keeper,
    llama_cpp,
    model_and_copy,
    read_pair,
    run_json,
    running,
)
from tilewright.errors import TilewrightError
from tilewright.evaluate.load.client import COMPLETIONS, at_most, connected
from tilewright.evaluate.report.display import decimal
from tilewright.evaluate.report.table import Table
from tilewright.options.arguments import integer, option, parse

OURS, THEIRS = "tilewright batch", "llama.cpp"
_FIGURES = {
    "output_tokens_per_second": "output t/s",
    "requests_per_second": "requests/s",
    "seconds": "seconds",
}
_OWN_FIGURES = {"mean_batch": "mean batch", "tail_seconds": "tail (s)"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options(CompareOptions, RowOptions):
    pair: Pair = option(
        "a configuration and the GGUF type beside it",
        default=Pair("all-q80", "Q8_0"),
        metavar="PRECISION=TYPE",
        type=read_pair,
    )
    rows: int = option("of make-batch", default=200, type=integer(1, 1 << 20))


def main(argv: list[str]) -> int:
    """Measure both sides and print medians. Return the exit code."""
    text = "Answer a batch with ours and with llama.cpp's server, in turn, to the same lengths."
    options = parse(_Options, argv, prog="python -m bench compare-batch", description=text)
    check_program(options.llama_server)  # before our side, which takes minutes
    keep, found = keeper(options.results), []
    for row in _measure(options):
        found.append(row)
        keep(row)
    print(render(found), end="")
    return 0


def _measure(options: _Options) -> Iterator[dict[str, Any]]:
    """Yield the figures of each side in turn."""
    asked, seats = options.made(), options.seats
    path, copy = model_and_copy(options.model, options.pair.gguf_type)
    bodies = [row["body"] for row in asked]
    context = max(len(body["prompt"]) + int(body["max_tokens"]) for body in bodies) + 8
    sizes: dict[str, Any] = {"users": seats, "context": context, "threads": options.num_threads}
    words = ["--model", str(path), "--precision", options.pair.precision, "--max-seats", str(seats)]
    words += ["--threads", str(options.num_threads), "--max-context", str(context)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in asked), encoding="utf-8")
        for number in range(options.rounds):
            for side in (OURS, THEIRS):
                if side == OURS:
                    figures = run_json("batch", str(file), *words)
                else:
                    server = llama_cpp(options.llama_server, copy, **sizes)
                    figures = serve_rows(server, bodies, seats)
                facts = {"side": side, "round": number, "seats": seats, "shrink": options.shrink}
                yield {**facts, "pair": str(options.pair), **figures}


def serve_rows(server: Server, bodies: Sequence[dict[str, Any]], seats: int) -> dict[str, float]:
    """Send all rows to a server, the longest first, ``seats`` at a time.

    Raises:
        TilewrightError: if the server does not start, or refuses a row.
    """
    longest = sorted(bodies, key=lambda body: -int(body["max_tokens"]))

    async def ask(url: str) -> tuple[int, float]:
        async with connected(url, "any") as client:
            warm = {**bodies[0], "max_tokens": 4, "cache_prompt": False}
            await client.whole(COMPLETIONS, warm)
            jobs = [
                partial(client.whole, COMPLETIONS, {**body, "cache_prompt": False})
                for body in longest
            ]
            began = time.perf_counter()
            heard, _ = await at_most(seats, jobs)
            if failed := [each.error for each in heard if each.error]:
                raise TilewrightError(f"{server.name}: {failed[0]}")
            return sum(each.count for each in heard), time.perf_counter() - began

    with (
        tempfile.TemporaryDirectory() as folder,
        running(server, Path(folder) / "server.log") as url,
    ):
        count, seconds = asyncio.run(ask(url))
    rates = {
        "output_tokens_per_second": count / seconds,
        "requests_per_second": len(bodies) / seconds,
    }
    return {"rows": len(bodies), "seconds": seconds, "output_tokens": count, **rates}


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Return medians of both sides and their ratio, as Markdown."""
    lines = []
    for name, title in _FIGURES.items():
        one, other = (
            statistics.median(row[name] for row in rows if row["side"] == side)
            for side in (OURS, THEIRS)
        )
        values = [decimal(each, grouped=True) for each in (one, other)]
        lines.append([title, *values, f"{one / other:.2f} x"])
    for name, title in _OWN_FIGURES.items():
        found = [float(row[name]) for row in rows if row["side"] == OURS and name in row]
        if found:
            lines.append([title, decimal(statistics.median(found)), "", ""])
    return Table.of(["", OURS, THEIRS, "ours / theirs"], lines).markdown()
