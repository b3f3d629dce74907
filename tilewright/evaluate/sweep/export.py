"""Sweeps as documents, comma-separated values and result lines.

The caller writes the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from tilewright.compiler.precision import AUTO
from tilewright.evaluate.cases.cases import ACCURACY_TEXT
from tilewright.evaluate.report import table
from tilewright.evaluate.report.display import cell_text, decimal, listed, plain_line, span
from tilewright.evaluate.report.perf_tables import ORIGIN_LEGEND, plan_tables
from tilewright.evaluate.report.table import CsvValue, Table
from tilewright.evaluate.results import pareto, row
from tilewright.evaluate.results.record import Drafts, Result
from tilewright.evaluate.results.stats import MIN_ROUNDS
from tilewright.evaluate.sweep import summary
from tilewright.evaluate.sweep.journal import SweepState
from tilewright.evaluate.sweep.leaderboard import (
    LeaderboardEntry,
    by_place,
    make_leaderboard,
    place_name,
)
from tilewright.evaluate.sweep.summary import SweptRow
from tilewright.runtime.speculative.config import DRAFT_MODEL, NGRAM

_DRAFT_GROUP = re.compile(r"\b(draft_\w+: \w+)")
_ACCURACY = (row.TOP1, row.TOP1_INTERVAL, row.POSITIONS, row.TOP5, row.KL, row.PAIRED)
_SPEED, _COST = (row.SPEED, row.SPREAD), (row.TTFT, row.WEIGHTS)
SUMMARY_COLUMNS = (
    "Configuration",
    *_ACCURACY,
    *_SPEED,
    "Rounds (t/s/u)",
    *_COST,
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
uncorrected for the number of comparisons. Predicted speeds differ where they do by more than the
time model's own error.

{ORIGIN_LEGEND}"""


def markdown(state: SweepState, extra: str = "") -> str:
    """Return the sweep as a document. ``extra`` replaces its probes' sections."""
    found = summary.rows(state)
    if extra:  # contains the single layers
        found = [each for each in found if not all("." in s.cell.part for s in each.states)]
    shown = make_leaderboard(found)
    parts = [_introduction(state)]
    for members in by_place(shown):
        parts += _summary(members)
    parts += [_drafts(shown), _other_texts(shown), _unfinished(state), extra]
    tables = [each for each in found if not _is_probe(each)]
    plans = plan_tables(_pooled(tables, shown), has_surroundings=False)
    parts += [plan.render() for plan in plans]
    return "\n".join(part.strip("\n") + "\n" for part in parts if part)


def to_results(state: SweepState, known: Sequence[Result]) -> list[Result]:
    """Return the sweep's new records, one per case, without a sensitivity plan's probes.

    ``known`` has the existing records. A record has its accuracy.
    """
    found: list[Result] = []
    for each in summary.rows(state):
        for result in () if _is_probe(each) else each.results.values():
            if result not in known and result not in found:
                found.append(result)
    return found


def csv_text(*states: SweepState) -> str:
    """Return a line per configuration with unrounded values, under a single header.

    Standings are of the summary's rows (column ``row``). Further speed cases have their own
    columns.
    """
    return table.csv_text([line for state in states for line in _csv_lines(state)])


def _is_probe(each: SweptRow) -> bool:
    return all(state.cell.part for state in each.states)


def _introduction(state: SweepState) -> str:
    planned, cells = state.planned, state.cells.values()
    rounds = 1 + max((each.cell.round for each in cells), default=0)
    options = "".join(f", {key} {value}" for key, value in planned.options.items())
    versions = ", ".join(f"{name} {v}" for name, v in sorted(planned.versions.items()))
    is_extended = planned.plan == "sensitivity"
    predicted = ", but those in columns that say predicted" if is_extended else ""
    kinds = sorted({each.result.kind for each in cells if each.result is not None})
    lines = [
        f"- Planned {planned.timestamp}, commit {planned.commit or 'unknown'}{options}.",
        f"- Versions: {versions or 'unknown'}.",
        f"- Cells: {state.count('done')} of {len(cells)} done; "
        f"speed in {rounds} round{'s' if rounds > 1 else ''}, all configurations in turn.",
        f"- Every figure is {' or '.join(kinds) or 'measured'}{predicted}.",
    ]
    text = "\n".join(plain_line(line) for line in lines)
    return f"# Sweep: {plain_line(planned.plan)}\n\n{text}\n\n{_LEGEND}"


def _summary(members: Sequence[LeaderboardEntry]) -> list[str]:
    """Return the table of a place with notes on its standings, empty without values."""
    lines = [_summary_line(each) for each in members if each.row.accuracies or each.row.results]
    if not lines:
        return []
    first = members[0].row
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
    text = _table(SUMMARY_COLUMNS, lines, is_emulated=first.is_emulated)
    parts = [f"## {place_name(first)}\n", " ".join(about), text]
    if notes:
        parts.append("What is not proven:\n\n" + "".join(notes))
    return parts


def _table(columns: Sequence[str], lines: Sequence[Sequence[str]], *, is_emulated: bool) -> str:
    """Return Markdown. A board's columns are marked as emulated or predicted."""
    if is_emulated:
        columns = [_board_column(name) for name in columns]
    return Table.of(columns, [tuple(map(cell_text, line)) for line in lines]).markdown()


def _board_column(name: str) -> str:
    if name.startswith(("Top-", "KL")):
        return f"{name}, emulated"
    return f"{name}, predicted" if name.startswith(("Speed", "TTFT", "Weights")) else name


def _summary_line(entry: LeaderboardEntry) -> tuple[str, ...]:
    figures, rounds = entry.row.figures(), entry.row.rounds
    low_high = "" if len(rounds) < 2 else span(min(rounds), max(rounds))
    measured = row.cells(figures, (*_ACCURACY, *_SPEED))
    return (entry.names, *measured, low_high, *row.cells(figures, _COST), entry.standing)


DRAFT_COLUMNS = (
    *("Model", SUMMARY_COLUMNS[0], "Method", "Draft precision"),
    *("Drafts", "Tokens per verification", "Accepted by position (%)"),
)


def draft_precision(drafts: Drafts, heading: str) -> str:
    """Return a draft model's configuration, or the formats of a draft layer's own groups."""
    if drafts.method == NGRAM:
        return ""
    if drafts.method == DRAFT_MODEL:
        return drafts.precision or AUTO
    return ", ".join(_DRAFT_GROUP.findall(heading)) or "as the model"


def _drafts(shown: Sequence[LeaderboardEntry]) -> str:
    """Return the acceptance of drafts by configuration, empty without drafts."""
    lines = []
    for member in shown:
        swept = member.row
        if (drafts := swept.drafts) is not None:
            shares = " ".join(decimal(100 * share) for share in drafts.shares)
            precision = draft_precision(drafts, swept.cell.heading)
            about = (swept.cell.model_name, member.names, drafts.method, precision)
            lines.append((*about, str(drafts.num_drafts), decimal(drafts.length, 2), shares))
    return f"## Drafts\n\n{_table(DRAFT_COLUMNS, lines, is_emulated=False)}" if lines else ""


def _other_texts(shown: Sequence[LeaderboardEntry]) -> str:
    """Return the accuracies on texts outside the summary."""
    lines = [
        (each.row.cell.model_name, each.names, accuracy.text, *row.cells(figures, _ACCURACY))
        for each in shown
        for accuracy in each.row.accuracies.values()
        for figures in (row.ResultRow.of(accuracy=accuracy),)
        if accuracy is not each.row.accuracy
    ]
    columns = ("Model", SUMMARY_COLUMNS[0], "Text", *_ACCURACY)
    text = _table(columns, lines, is_emulated=any(each.row.is_emulated for each in shown))
    return f"## Other texts\n\n{text}" if lines else ""


def _unfinished(state: SweepState) -> str:
    """Return the failed and cancelled cells with their reasons."""
    lines = [
        f"- {plain_line(f'`{cell.model_name} {cell.target} {cell.title()}`: {each.why}')}\n"
        for each in state.cells.values()
        for cell in (each.cell,)
        if each.status != "done" and not each.is_open
    ]
    return "## Cells without a result\n\n" + "".join(lines) if lines else ""


def _pooled(found: Sequence[SweptRow], shown: Sequence[LeaderboardEntry]) -> list[Result]:
    """Return the rows' records with the merged values of equal configurations."""
    owners = {id(state): each.row for each in shown for state in each.row.states}
    pooled = []
    for each in found:
        merged = owners[id(each.states[0])].results
        for case, result in each.results.items():
            pooled.append(summary.with_repeats(result, [merged.get(case, result)]))
    return pooled


def _csv_lines(state: SweepState) -> Iterator[dict[str, CsvValue]]:
    found = summary.rows(state)
    owners = {id(s): each for each in make_leaderboard(found) for s in each.row.states}
    for each in found:
        owner = owners[id(each.states[0])]
        yield {
            "plan": state.planned.plan,
            **_csv_identity(each),
            **row.accuracy_figures(each.accuracy),
            **_csv_speed(each),
            "row": owner.label,
            "standing": None if owner.placed is None else owner.placed.standing,
            "dominated_by": None if owner.placed is None else owner.placed.dominated_by,
            "notes": None if owner.placed is None else "; ".join(owner.placed.notes),
            **_csv_drafts(each),
            **_csv_other_cases(each),
        }


def _csv_identity(each: SweptRow) -> dict[str, CsvValue]:
    cell = each.cell
    statuses = [state.status for state in each.states]
    newest = max(each.results.values(), key=lambda result: result.when, default=None)
    shared = ("model_hash", "target", "device", "compute")
    return {
        "model": cell.model_name,
        **{name: getattr(cell, name) for name in shared},
        "kind": "emulated, predicted" if each.is_emulated else newest.kind if newest else None,
        "configuration": each.name,
        "calibration": cell.calibration,
        "part": cell.part,
        "precision_id": cell.precision_id,
        "effective_id": each.effective_id,
        "heading": cell.heading,
        "cells": len(statuses),
        "cells_done": statuses.count("done"),
        "commit": newest.commit if newest else None,
        "timestamp": newest.timestamp if newest else None,
        "weight_bytes": each.measured_bytes,
        "estimated_weight_bytes": cell.weight_bytes,
    }


def _csv_speed(each: SweptRow) -> dict[str, CsvValue]:
    figures = each.figures()
    return {
        "speed_case": figures.speed_case,
        "rounds": len(each.rounds),
        **figures.values(("repeats", "decode_tokens_per_s", "decode_spread_fraction")),
        "decode_rounds_tokens_per_s": " ".join(map(repr, each.rounds)),
        **figures.values(("ttft_ms", "ttft_spread_fraction", "prefill_tokens_per_s")),
        **figures.values(("peak_memory_bytes", "cache_bytes")),
    }


def _csv_drafts(swept: SweptRow) -> dict[str, CsvValue]:
    if (drafts := swept.drafts) is None:
        return {}
    return {
        "draft_method": drafts.method,
        "draft_precision": draft_precision(drafts, swept.cell.heading),
        "drafts": drafts.num_drafts,
        "tokens_per_verification": drafts.length,
        "accepted_by_position_fraction": " ".join(map(repr, drafts.shares)),
    }


def _csv_other_cases(swept: SweptRow) -> dict[str, CsvValue]:
    names = ("decode_tokens_per_s", "all_users_tokens_per_s", "ttft_ms")
    return {
        f"{case}_{name}": row.speed_figures(result)[name]
        for case, result in swept.results.items()
        if result.accuracy is None and result is not swept.speed_result
        for name in names
    }
