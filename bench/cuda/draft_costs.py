"""Cost of verified drafts as a table, from the results of ``python -m bench speculative``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tilewright.evaluate.report.comparisons import read_rows
from tilewright.evaluate.report.display import short_commit
from tilewright.evaluate.report.table import Table

ACCEPTANCE = (0.8, 0.7, 0.6)
"""Published shares of drafts with an accepted token, by position, for MTP heads."""
PROMPT = 128
"""Prompt tokens of each request."""
COST = "cost"
"""Kind of the records with the time of a step."""

Record = Mapping[str, Any]


def costs_table(records: Iterable[Record], *notes: str) -> Table:
    """Return the cost of verification by model and users. The last record of a cost counts."""
    steps: dict[tuple[str, str, int], dict[int, Record]] = {}
    for record in records:
        workload = record["model"], record["precision"], record["users"]
        steps.setdefault(workload, {})[record["rows"]] = record
    counts = sorted({rows for costs in steps.values() for rows in costs if rows > 1})
    gained = [rows for rows in counts if rows - 1 <= len(ACCEPTANCE)]
    titles = ["model", "precision", "users", "plain step (ms)"]
    titles += [f"{rows} rows (ratio)" for rows in counts]
    titles += [f"predicted gain, {rows - 1} drafts (x)" for rows in gained]
    lines = []
    for (model, precision, users), costs in steps.items():
        ratios = {rows: costs[rows]["ratio"] for rows in counts if rows in costs}
        gains = {rows: (1 + sum(ACCEPTANCE[: rows - 1])) / ratios[rows] for rows in ratios}
        cells = [*map(ratios.get, counts), *map(gains.get, gained)]
        texts = ("-" if cell is None else f"{cell:.2f}" for cell in cells)
        lines.append([model, precision, str(users), f"{costs[1]['ms']:.3f}", *texts])
    shares = ", ".join(map(str, ACCEPTANCE))
    return Table.of(
        titles,
        lines,
        f"A plain step starts before the previous output is read. Context from {PROMPT} tokens.",
        f"Predicted: acceptance by position {shares}, without the time to draft.",
        *notes,
    )


def render_costs(results: Path, name: str) -> str:
    """Return the costs in ``results/speculative/NAME.jsonl`` as Markdown."""
    path = results / "speculative" / f"{name}.jsonl"
    if not path.exists():
        return "No results yet.\n"
    records = [row for row in read_rows(path, "speculative") if row["figure"] == COST]
    origins = dict.fromkeys(
        f"{row['device']}, {row['date'][:10]}, commit {short_commit(row['commit'])}"
        for row in records
    )
    return costs_table(records, f"Random weights. {'; '.join(origins)}.").markdown()
