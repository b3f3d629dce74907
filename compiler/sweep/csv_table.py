"""A sweep as a comma-separated table: a line a configuration, all figures unrounded."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from tilewright.compiler.bench.record import Accuracy
from tilewright.compiler.sweep import summary
from tilewright.compiler.sweep.journal import SweepState
from tilewright.compiler.sweep.standings import ranked
from tilewright.compiler.sweep.summary import Row

CsvValue = str | float | int | None

_ACCURACY_COLUMNS = (
    "accuracy_text",
    "reference_id",
    "positions",
    "top1_positions",
    "top1_percent",
    "top1_low_percent",
    "top1_high_percent",
    "top5_positions",
    "top5_percent",
    "top5_low_percent",
    "top5_high_percent",
    "kl_nats",
    "kl_standard_error_nats",
    "base",
    "only_base_positions",
    "only_this_positions",
    "mcnemar_p",
)
_FORMULA = ("=", "+", "-", "@")
"""What a spreadsheet would take a cell that begins with it for."""


def csv_text(*states: SweepState) -> str:
    """A line a configuration, unrounded; a comma-separated table with one header.

    Standings are those of the summary's rows (column ``row``). Speed cases beyond the first have
    columns of their own behind the others.
    """
    lines = [line for state in states for line in _csv_lines(state)]
    columns = list(dict.fromkeys(column for line in lines for column in line))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_csv_cell(line.get(column)) for column in columns] for line in lines)
    return buffer.getvalue()


def _csv_lines(state: SweepState) -> Iterator[dict[str, CsvValue]]:
    found = summary.rows(state)
    owners = {id(s): each for each in ranked(found) for s in each.row.states}
    for row in found:
        owner = owners[id(row.states[0])]
        yield {
            "plan": state.planned.plan,
            **_csv_identity(row),
            **_csv_accuracy(row.accuracy),
            **_csv_speed(row),
            "row": owner.label,
            "standing": None if owner.placed is None else owner.placed.standing,
            "dominated_by": None if owner.placed is None else owner.placed.dominated_by,
            "notes": None if owner.placed is None else "; ".join(owner.placed.notes),
            **_csv_other_cases(row),
        }


def _csv_identity(row: Row) -> dict[str, CsvValue]:
    cell = row.cell
    results = list(row.results.values())
    statuses = [state.status for state in row.states]
    newest = max(results, key=lambda result: result.when, default=None)
    return {
        "model": cell.model_name,
        "model_hash": cell.model_hash,
        "target": cell.target,
        "device": cell.device,
        "compute": cell.compute,
        "kind": "emulated, predicted" if row.is_emulated else newest.kind if newest else None,
        "configuration": row.name,
        "part": cell.part,
        "precision_id": cell.precision_id,
        "effective_id": row.effective_id,
        "heading": cell.heading,
        "cells": len(statuses),
        "cells_done": statuses.count("done"),
        "commit": newest.commit if newest else None,
        "timestamp": newest.timestamp if newest else None,
        "weight_bytes": row.measured_bytes,
        "estimated_weight_bytes": cell.weight_bytes,
    }


def _csv_accuracy(accuracy: Accuracy | None) -> dict[str, CsvValue]:
    if accuracy is None:
        return dict.fromkeys(_ACCURACY_COLUMNS)
    n, paired = accuracy.num_positions, accuracy.paired
    values: tuple[CsvValue, ...] = (
        accuracy.text,
        accuracy.reference_id,
        n,
        accuracy.num_top1,
        100 * accuracy.num_top1 / n,
        *(100 * bound for bound in accuracy.top1_interval),
        accuracy.num_top5,
        100 * accuracy.num_top5 / n,
        *(100 * bound for bound in accuracy.top5_interval),
        accuracy.kl_mean,
        accuracy.kl_error,
        *((paired.base, paired.b, paired.c, paired.p) if paired else (None,) * 4),
    )
    return dict(zip(_ACCURACY_COLUMNS, values, strict=True))


def _csv_speed(row: Row) -> dict[str, CsvValue]:
    speed = row.speed_result
    return {
        "speed_case": speed.case if speed else None,
        "rounds": len(row.rounds),
        "repeats": len(speed.repeats) if speed else None,
        "decode_tokens_per_s": row.speed,
        "decode_spread_fraction": speed.spread if speed else None,
        "decode_rounds_tokens_per_s": " ".join(map(repr, row.rounds)),
        "ttft_ms": speed.ttft_ms if speed else None,
        "ttft_spread_fraction": speed.ttft_spread if speed else None,
        "prefill_tokens_per_s": speed.prefill_tps if speed else None,
        "peak_memory_bytes": speed.peak_memory_bytes if speed else None,
        "cache_bytes": speed.cache_bytes if speed else None,
    }


def _csv_other_cases(row: Row) -> dict[str, CsvValue]:
    found: dict[str, CsvValue] = {}
    for case, result in row.results.items():
        if result.accuracy is None and result is not row.speed_result:
            found[f"{case}_decode_tokens_per_s"] = result.decode_tsu
            found[f"{case}_all_users_tokens_per_s"] = result.tps
            found[f"{case}_ttft_ms"] = result.ttft_ms
    return found


def _csv_cell(value: CsvValue) -> CsvValue:
    """Text that a spreadsheet would run becomes text that it shows; all of it on one line."""
    if not isinstance(value, str):
        return value
    text = "".join(each if each.isprintable() else "\ufffd" for each in value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text
