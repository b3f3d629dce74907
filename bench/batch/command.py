"""``bench compare-batch``: a batch of ours beside llama.cpp's server on the CPU, in turn."""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.batch.made import RowOptions
from bench.batch.sides import Bodies, Sizes, ours, theirs
from bench.in_turn import BesideLlama, keeper, model_and_copy
from bench.peers.options import Pair, read_pair
from bench.serving.servers import check_program
from tilewright.evaluate.report.display import decimal
from tilewright.evaluate.report.table import Table
from tilewright.options.arguments import integer, option, parse

OURS, THEIRS = "tilewright batch", "llama.cpp"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options(BesideLlama, RowOptions):
    pair: Pair = option(
        "a configuration and the GGUF type beside it",
        default=Pair("all-q80", "Q8_0"),
        metavar="PRECISION=TYPE",
        type=read_pair,
    )
    rows: int = option("of make-batch", default=200, type=integer(1, 1 << 20))


def main(argv: list[str]) -> int:
    """Measure and print the medians; returns the exit code."""
    text = "Answer a batch with ours and with llama.cpp's server, in turn, to the same lengths."
    options = parse(_Options, argv, prog="python -m bench compare-batch", description=text)
    check_program(options.llama_server)  # now: our side takes minutes
    keep, found = keeper(options.results), []
    for row in _measure(options):
        found.append(row)
        keep(row)
    print(render(found), end="")
    return 0


def _measure(options: _Options) -> Iterator[dict[str, Any]]:
    """The figures of each side in turn, as they come."""
    pair, asked = options.pair, options.made()
    path, copy = model_and_copy(options.model, pair.kind)
    bodies: Bodies = [row["body"] for row in asked]
    longest = max(len(body["prompt"]) + int(body["max_tokens"]) for body in bodies)
    sizes = Sizes(seats=options.seats, context=longest + 8, threads=options.num_threads)
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
