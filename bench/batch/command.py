"""``tilewright compare-batch``: a batch of ours beside llama.cpp's server on the CPU, in turn."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.batch.made import make_rows, token_rows
from bench.batch.sides import Bodies, Sizes, ours, theirs
from bench.peers.options import Pair, read_pair
from tilewright.compiler.artifacts.places import cache_dir
from tilewright.compiler.bench.display import decimal
from tilewright.compiler.bench.table import Table
from tilewright.compiler.commands.arguments import integer, option, parse
from tilewright.compiler.devices import describe_cpu
from tilewright.compiler.environment import environment
from tilewright.compiler.errors import ConfigError
from tilewright.compiler.json_lines import append_lines, check_writable

VOCABULARY = 32_000
"""Ids of prompts are below, unless it is said: the models that are compared have as many."""

OURS, THEIRS = "tilewright batch", "llama.cpp"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    llama_server: Path = option("llama.cpp's program", default=Path("llama-server"), type=Path)
    model: str | None = option("a GGUF file (default: SmolLM2-135M-Instruct)", metavar="PATH")
    pair: Pair = option(
        "a configuration and the GGUF type beside it",
        default=Pair("all-q80", "Q8_0"),
        metavar="PRECISION=TYPE",
        type=read_pair,
    )
    rows: int = option("of make-batch", default=200, type=integer(1, 1 << 20))
    seed: int = option("of make-batch", default=0, type=integer(0, 1 << 31))
    shrink: int = option("divide all lengths", default=1, type=integer(1, 64))
    vocabulary: int = option("ids of prompts are below", default=VOCABULARY, type=integer(2))
    seats: int = option("rows at a time", default=16, type=integer(1, 1024))
    threads: int | None = option("CPU threads (default: all cores)", type=integer(1, 1024))
    rounds: int = option("in turn", default=3, type=integer(1, 1000))
    results: Path | None = option("add every row to a file of JSON lines", type=Path)


def main(argv: list[str]) -> int:
    """Measure and print the medians; returns the exit code."""
    text = "Answer a batch with ours and with llama.cpp's server, in turn, to the same lengths."
    options = parse(_Options, argv, prog="tilewright compare-batch", description=text)
    if options.results is not None:
        check_writable(options.results)
    facts, host = environment(), describe_cpu().model_name
    taken = {"commit": facts.commit, "date": facts.timestamp, "host": host}
    found = []
    for row in _measure(options):
        found.append(row)
        if options.results is not None:
            append_lines(options.results, json.dumps({**row, **taken}).encode() + b"\n")
    print(render(found), end="")
    return 0


def _measure(options: _Options) -> Iterator[dict[str, Any]]:
    """The figures of each side in turn, as they come."""
    from bench.peers.gguf_copy import cached_gguf
    from tilewright.models import find_model, load_model

    path = find_model(options.model)
    if not isinstance(path, Path) or path.suffix != ".gguf":
        raise ConfigError(f"{options.model}: llama.cpp reads GGUF files; allowed: one of them")
    digest = load_model(path).checkpoint.content_hash()
    pair = options.pair
    copy = cached_gguf(path, pair.kind, content_hash=digest, folder=cache_dir() / "peers")
    asked = shrunk_rows(
        options.rows,
        seed=options.seed,
        shrink=options.shrink,
        vocabulary=options.vocabulary,
    )
    bodies: Bodies = [row["body"] for row in asked]
    longest = max(len(body["prompt"]) + int(body["max_tokens"]) for body in bodies)
    sizes = Sizes(
        seats=options.seats,
        context=longest + 8,
        threads=options.threads or describe_cpu().num_cores,
    )
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "rows.jsonl"
        file.write_text("".join(f"{json.dumps(row)}\n" for row in asked), encoding="utf-8")
        for number in range(options.rounds):
            for name in (OURS, THEIRS):
                if name == OURS:
                    figures = ours(file, str(path), pair.precision, sizes)
                else:
                    figures = theirs(bodies, options.llama_server, copy, sizes)
                facts = {"side": name, "round": number, "seats": sizes.seats}
                pairing = {"pair": f"{pair.precision} | {pair.kind}", "shrink": options.shrink}
                yield {**facts, **pairing, **figures}


def shrunk_rows(
    count: int, *, seed: int, shrink: int, vocabulary: int = VOCABULARY
) -> list[dict[str, Any]]:
    """Requests of random ids; lengths are those of the data set, divided."""
    rows = [
        (text, max(1, prompt // shrink), max(1, output // shrink))
        for text, prompt, output in make_rows(count, seed=seed)
    ]
    return token_rows(rows, vocabulary)


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Medians of both sides and their ratio, as Markdown."""
    lines = []
    for name, title in (
        ("output_tokens_per_second", "output t/s"),
        ("requests_per_second", "requests/s"),
        ("seconds", "seconds"),
    ):
        one, other = (
            statistics.median(row[name] for row in rows if row["side"] == side)
            for side in (OURS, THEIRS)
        )
        values = [decimal(each, grouped=True) for each in (one, other)]
        lines.append([title, *values, f"{one / other:.2f} x"])
    mine = [row for row in rows if row["side"] == OURS]
    for name, title in (("mean_batch", "mean batch"), ("tail_seconds", "tail (s)")):
        found = [float(row[name]) for row in mine if name in row]
        if found:
            lines.append([title, decimal(statistics.median(found)), "", ""])
    return Table.of(["", OURS, THEIRS, "ours / theirs"], lines).markdown()
