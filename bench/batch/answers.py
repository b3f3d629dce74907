"""``python -m bench batch-answers``: rows of a batch beside the same rows one at a time, greedily.

Where they part, the gap tells whether it was a near-tie: how much likelier, by its logarithm, the
token was that was chosen alone than the one that was chosen in the batch.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.batch.made import RowOptions
from tilewright.cli.main import main as tilewright
from tilewright.errors import TilewrightError
from tilewright.evaluate.report.table import Table
from tilewright.options.arguments import (
    CHECKPOINT_PRECISION,
    ModelArguments,
    Parser,
    add_options,
    values_of,
)
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.request import Request
from tilewright.runtime.sampling import MAX_LOGPROBS, SamplingParams
from tilewright.runtime.scheduling.request_state import Policy

_MODEL = ("model", "target", "precision", "compute")


@dataclass(frozen=True, slots=True)
class Parting:
    """Where a row's answer in the batch parts from its answer alone; ``gap`` is None where the
    batch's token was not even among the likeliest.
    """

    row: int
    position: int
    alone: int
    batched: int
    gap: float | None


def main(argv: list[str]) -> int:
    """Answer the rows twice and list where they part; returns the exit code."""
    parser = Parser(
        prog="python -m bench batch-answers",
        description="Compare a batch's greedy answers with those of one row at a time.",
    )
    add_options(parser, ModelArguments, RowOptions, without=("backend", "dump"))
    arguments = parser.parse_args(list(argv))
    options = RowOptions(**values_of(RowOptions, arguments))
    words: list[str] = []
    for name in _MODEL:
        if getattr(arguments, name) is not None:
            words += [f"--{name}", getattr(arguments, name)]
    rows = options.made()
    batched = _batched(rows, words, options.seats)
    partings, total = _compare(rows, batched, arguments)
    print(render(partings, len(rows), total), end="")
    return 0


def _batched(rows: list[dict[str, Any]], words: list[str], seats: int) -> list[list[int]]:
    """The token ids of every answer of one batch."""
    with tempfile.TemporaryDirectory() as folder:
        data, out = Path(folder) / "rows.jsonl", Path(folder) / "out.jsonl"
        told = [{**row, "body": {**row["body"], "return_token_ids": True}} for row in rows]
        data.write_text("".join(f"{json.dumps(row)}\n" for row in told), encoding="utf-8")
        code = tilewright(["batch", str(data), "-o", str(out), *words, "--max-seats", str(seats)])
        if code:
            raise TilewrightError("tilewright batch failed")
        lines = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    return [line["response"]["body"]["choices"][0]["token_ids"] for line in lines]


def _compare(
    rows: list[dict[str, Any]], batched: list[list[int]], arguments: Any
) -> tuple[list[Parting], int]:
    from tilewright.llm import LLM

    model = {name: getattr(arguments, name) for name in _MODEL}
    model["precision"] = model["precision"] or CHECKPOINT_PRECISION
    partings, total = [], 0
    with LLM(model.pop("model"), **model, max_seats=1) as llm:
        loop = EngineLoop(llm.compiled.executable, policy=Policy(reuses=False))
        for number, (row, answer) in enumerate(zip(rows, batched, strict=True)):
            body = row["body"]
            sampling = SamplingParams(max_tokens=body["max_tokens"], logprobs=MAX_LOGPROBS)
            request = Request(number, tuple(body["prompt"]), sampling)
            loop.generate([request])
            total += len(answer)
            found = first_parting(number, request, answer)
            partings += [] if found is None else [found]
    return partings, total


def first_parting(row: int, alone: Request, batched: list[int]) -> Parting | None:
    """The first position at which two answers differ; None where they are equal."""
    for at, (one, other) in enumerate(zip(alone.output, batched, strict=True)):
        if one != other:
            scores = alone.logprobs[at]
            known = dict(scores.top)
            gap = scores.chosen - known[other] if other in known else None
            return Parting(row, at, one, other, gap)
    return None


def render(partings: list[Parting], num_rows: int, num_tokens: int) -> str:
    """How many rows are equal, and the others' first differences, as Markdown."""
    equal = num_rows - len(partings)
    lines = [f"{equal} of {num_rows} rows are equal, of {num_tokens:,} tokens\n"]
    if partings:
        heads = ["row", "position", "alone", "in the batch", "logit gap"]
        cells = [
            [
                *map(str, (each.row, each.position, each.alone, each.batched)),
                f"above the {MAX_LOGPROBS} likeliest" if each.gap is None else f"{each.gap:.4f}",
            ]
            for each in partings
        ]
        lines.append(Table.of(heads, cells).markdown())
    return "".join(lines)
