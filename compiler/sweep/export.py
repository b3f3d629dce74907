"""A sweep as a document, as CSV and as lines for a results file.

Knows figures and how they are written down; where they are written to is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.compiler.bench import pareto
from tilewright.compiler.bench.cases import ACCURACY_TEXT
from tilewright.compiler.bench.perf_tables import (
    cell_text,
    decimal,
    interval_text,
    listed,
    paired_text,
    plan_tables,
)
from tilewright.compiler.bench.record import Accuracy, Result
from tilewright.compiler.bench.stats import MIN_ROUNDS
from tilewright.compiler.bench.table import Table
from tilewright.compiler.sweep import summary
from tilewright.compiler.sweep.csv_table import csv_text
from tilewright.compiler.sweep.journal import CellState, SweepState
from tilewright.compiler.sweep.standings import (
    Ranked,
    by_place,
    place_name,
    plain,
    ranked,
)
from tilewright.compiler.sweep.summary import Row

__all__ = ["csv_text", "markdown", "to_results"]

SUMMARY_COLUMNS = (
    "Configuration",
    "Top-1 (%)",
    "Top-1 95 % CI",
    "Positions",
    "Top-5 (%)",
    "KL",
    "vs base",
    "Speed (t/s/u)",
    "Spread (%)",
    "Rounds (t/s/u)",
    "TTFT (ms)",
    "Weights (MB)",
    "Standing",
)
_LEGEND = f"""\
Configurations that come to the same numbers on the target are one row, their repeats taken
together. Top-1 and Top-5: the share of teacher-forced positions where the first guess is the fp32
reference's first, or among its five. `KL`: mean divergence from the reference in nats. `vs base`:
positions that only this configuration (+) and only the base (-) got right, with the exact McNemar
p. Speed: the median over the repeats of all rounds; `Spread (%)`: (max - min) / median of these;
`Rounds`: the lowest and the highest median of a round. `Standing`: a point is dominated if another
one is better and the difference in speed or in top-1 is beyond the noise (top-1: McNemar; speed:
the ratio round by round, from {MIN_ROUNDS} rounds on), each at {100 * pareto.ALPHA:.0f} %,
uncorrected for the number of comparisons.
"""


def markdown(state: SweepState, extra: str = "") -> str:
    """The sweep as a document; ``extra``: sections that stand for those of its probes."""
    found = summary.rows(state)
    if extra:
        found = [row for row in found if not _is_single_layer(row)]
    shown = ranked(found)
    parts = [_introduction(state)]
    for members in by_place(shown):
        parts += _summary(members)
    parts += [_other_texts(shown), _unfinished(state), extra]
    tables = [row for row in found if not _is_probe(row)]
    plans = plan_tables(_pooled(tables, shown), has_surroundings=False)
    parts += [plan.render() for plan in plans]
    return "\n".join(part.strip("\n") + "\n" for part in parts if part)


def to_results(state: SweepState, known: Sequence[Result]) -> list[Result]:
    """The sweep's records that ``known`` has not yet; none of what a sensitivity plan lowers."""
    found: list[Result] = []
    rows = [row for row in summary.rows(state) if not _is_probe(row)]
    for result in summary.records(rows):
        if result not in known and result not in found:
            found.append(result)
    return found


def _is_probe(row: Row) -> bool:
    return all(state.cell.part for state in row.states)


def _is_single_layer(row: Row) -> bool:
    return all("." in state.cell.part for state in row.states)


def _introduction(state: SweepState) -> str:
    planned, cells = state.planned, state.cells.values()
    rounds = 1 + max((each.cell.round for each in cells), default=0)
    asked = "".join(f", {key} {value}" for key, value in planned.options.items())
    versions = ", ".join(f"{name} {v}" for name, v in sorted(planned.versions.items()))
    is_extended = planned.plan == "sensitivity"
    predicted = ", but those in columns that say predicted" if is_extended else ""
    kinds = sorted({each.result.kind for each in cells if each.result is not None})
    lines = [
        f"- Planned {planned.timestamp}, commit {planned.commit or 'unknown'}{asked}.",
        f"- Versions: {versions or 'unknown'}.",
        f"- Cells: {state.count('done')} of {len(cells)} done; "
        f"speed in {rounds} round{'s' if rounds > 1 else ''}, all configurations in turn.",
        f"- Every figure is {' or '.join(kinds) or 'measured'}{predicted}.",
    ]
    text = "\n".join(plain(line) for line in lines)
    return f"# Sweep: {plain(planned.plan)}\n\n{text}\n\n{_LEGEND}"


def _summary(members: Sequence[Ranked]) -> list[str]:
    """The table of one place, and what its standings rest on; nothing without a figure."""
    table = [_summary_row(each) for each in members if each.row.accuracies or each.row.results]
    if not table:
        return []
    row = members[0].row
    cases = {each.row.speed_result.case for each in members if each.row.speed_result}
    texts = {each.row.accuracy.text for each in members if each.row.accuracy}
    about = [f"Speed: case {listed(sorted(cases))}."] if cases else []
    if texts - {ACCURACY_TEXT}:
        about.append(f"Accuracy: on the text {listed(sorted(texts))}.")
    notes = [
        f"- `{each.label}`, {each.standing}: {'; '.join(each.placed.notes)}.\n"
        for each in members
        if each.placed is not None and each.placed.notes
    ]
    columns = tuple(map(_board_column, SUMMARY_COLUMNS)) if row.is_emulated else SUMMARY_COLUMNS
    parts = [f"## {place_name(row)}\n", " ".join(about), Table.of(columns, table).markdown()]
    if notes:
        parts.append("What is not proven:\n\n" + "".join(notes))
    return parts


def _board_column(name: str) -> str:
    """A column's name where accuracy is emulated and speed predicted."""
    if name.startswith(("Top-", "KL")):
        return f"{name}, emulated"
    return f"{name}, predicted" if name.startswith(("Speed", "TTFT", "Weights")) else name


def _summary_row(each: Ranked) -> tuple[str, ...]:
    row, speed, accuracy = each.row, each.row.speed_result, each.row.accuracy
    low_high = "" if len(row.rounds) < 2 else f"{min(row.rounds):.1f}-{max(row.rounds):.1f}"
    spread = None if speed is None or speed.spread is None else 100 * speed.spread
    num_bytes = row.measured_bytes
    texts = (
        each.names,
        *_accuracy_cells(accuracy),
        decimal(row.speed),
        decimal(spread),
        low_high,
        decimal(speed.ttft_ms if speed else None),
        "" if num_bytes is None else decimal(num_bytes / 1e6),
        each.standing,
    )
    return tuple(map(cell_text, texts))


def _accuracy_cells(accuracy: Accuracy | None) -> tuple[str, ...]:
    if accuracy is None:
        return ("",) * 6
    n = accuracy.num_positions
    return (
        decimal(100 * accuracy.num_top1 / n),
        interval_text(accuracy.top1_interval),
        str(n),
        decimal(100 * accuracy.num_top5 / n),
        "" if accuracy.kl_mean is None else f"{accuracy.kl_mean:.3g}",
        paired_text(accuracy),
    )


def _other_texts(shown: Sequence[Ranked]) -> str:
    """Accuracies beside the one that the summary has."""
    lines = [
        (each.row.cell.model_name, each.names, accuracy.text, *_accuracy_cells(accuracy))
        for each in shown
        for accuracy in each.row.accuracies.values()
        if accuracy is not each.row.accuracy
    ]
    if not lines:
        return ""
    columns: tuple[str, ...] = ("Model", SUMMARY_COLUMNS[0], "Text", *SUMMARY_COLUMNS[1:7])
    if any(each.row.is_emulated for each in shown):
        columns = tuple(map(_board_column, columns))
    table = Table.of(columns, [tuple(map(cell_text, line)) for line in lines]).markdown()
    return f"## Other texts\n\n{table}"


def _unfinished(state: SweepState) -> str:
    """Cells that failed or were cancelled, each with its reason."""
    lines = [
        f"- {plain(f'`{_cell_name(each)}`: {each.status}: {each.reason}')}\n"
        for each in state.cells.values()
        if each.status != "done" and not each.is_open
    ]
    return "## Cells without a result\n\n" + "".join(lines) if lines else ""


def _cell_name(state: CellState) -> str:
    cell = state.cell
    number = f" round {cell.round + 1}" if cell.kind == "speed" else ""
    return f"{cell.model_name} {cell.target} {cell.precision} {cell.case}{number}"


def _pooled(found: Sequence[Row], shown: Sequence[Ranked]) -> list[Result]:
    """The rows' records with the figures of the summary: equal configurations have the same ones,
    whichever is printed.
    """
    owners = {id(state): each.row for each in shown for state in each.row.states}
    pooled = []
    for row in found:
        merged = owners[id(row.states[0])].results
        for case, result in row.results.items():
            pooled.append(summary.with_repeats(result, [merged.get(case, result)]))
    return pooled
