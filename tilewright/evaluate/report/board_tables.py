"""Section in PERF.md for unavailable boards: emulated accuracy and predicted speed.

Every column names its origin. Values published by the vendor have separate columns.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tilewright.compiler.precision import list_precisions, load_precision
from tilewright.errors import ConfigError
from tilewright.evaluate.report import perf_md
from tilewright.evaluate.report.perf_md import (
    BOARDS_TITLE,
    EMULATED_TOP1,
    EMULATED_TOP5,
    PREDICTED_SPEED,
    PREDICTED_TTFT,
    PUBLISHED_SPEED,
    PUBLISHED_TOP1,
    PUBLISHED_TTFT,
    Document,
    PerfRow,
    Section,
)
from tilewright.evaluate.report.table import Table
from tilewright.evaluate.results import row, selection
from tilewright.evaluate.results.record import Result

__all__ = ["BOARDS_TITLE", "INTRO", "board_table", "published_row", "published_tables"]

TABLES = Path(__file__).parent / "published" / "tenstorrent.md"
"""Tables published by Tenstorrent."""

_FIGURES = {
    **{name: name for name in (row.MODEL, row.DEVICE, row.PRECISION, row.LENGTHS)},
    EMULATED_TOP1: row.TOP1,
    EMULATED_TOP5: row.TOP5,
    "Emulated top-1 95 % CI": row.TOP1_INTERVAL,
    row.POSITIONS: row.POSITIONS,
    "Emulated KL": row.KL,
    "Emulated vs base": row.PAIRED,
    PREDICTED_SPEED: row.SPEED,
    row.SPEED_ERROR: row.SPEED_ERROR,
    PREDICTED_TTFT: row.TTFT,
    row.TTFT_ERROR: row.TTFT_ERROR,
}
"""Column titles in this section, with the titles in tables of measurements."""
_ORIGIN = (row.DATE, row.COMMIT, row.COMMAND)
_PUBLISHED = {PUBLISHED_SPEED: "speed", PUBLISHED_TTFT: "ttft", PUBLISHED_TOP1: "top1"}

INTRO = """\
No board was available. Top-1, top-5 and KL are **emulated**: formats and matrix unit bit for bit,
small operators approximately. Speed and TTFT are **predicted** by a time model with constants from
published speeds ([docs/tenstorrent.md](docs/tenstorrent.md)). An error is the bound for nine of
ten predictions of models outside the fit. A prediction without an error is an extrapolation to a
smaller model. **Published** values are Tenstorrent's. No value of this section is measured."""


def board_table(results: Sequence[Result]) -> Table:
    """Return a table with a row for every group, batch and prompt length.

    Accuracy is in the first row for a group.
    """
    # Emulated and predicted values have different columns and share a row.
    figures = []
    shown = dict(_FIGURES)
    if any(result.calibration for result in results):
        shown[row.CALIBRATION] = row.CALIBRATION
    for group in selection.group_results(list(map(_named, results))):
        tables: list[selection.SpeedTable] = [
            selection.SHORT,
            selection.BATCH_32,
            *selection.context_lengths([group]),
        ]
        speeds = [found for table in tables if (found := group.speed(table)) is not None]
        for index, found in enumerate(speeds or [None]):
            figures.append((group, found, None if index else group.accuracy_result))
    rows = [
        (*row.cells(line, shown.values()), *_published(found), *row.cells(line, _ORIGIN))
        for line, (_, found, _) in zip(selection.table_rows(figures), figures, strict=True)
    ]
    return Table.of((*shown, *_PUBLISHED, *_ORIGIN), rows)


def _named(result: Result) -> Result:
    """Name a calibrated heading with blocks along out after its configuration, if one ships."""
    plain, axis, _ = result.heading.partition(", block_axis = out")
    name = _shipped_headings().get(plain) if result.calibration and axis else None
    if name is None:
        return result
    return dataclasses.replace(result, precision_name=f"{name}, blocks along out")


@functools.cache
def _shipped_headings() -> Mapping[str, str]:
    """Return the last name of each shipped heading without rules for layers."""
    names = {}
    for name in sorted(list_precisions()):
        try:
            names[load_precision(name).resolve(1).heading()] = name
        except ConfigError:  # a rule for another layer
            continue
    return names


def _published(result: Result | None) -> Iterable[str]:
    known = None if result is None else published_row(result)
    figures = (getattr(known, field, None) for field in _PUBLISHED.values())
    return ("" if figure is None else f"{figure:g}" for figure in figures)


@functools.cache
def published_tables() -> Document:
    """Return the parsed tables published by the vendor."""
    return perf_md.load(TABLES)


def published_row(result: Result) -> PerfRow | None:
    """Return the published row for a result's model, device, precision, batch and lengths, or None.

    Configurations match by name or heading, not by effective settings.
    """
    section = None if result.calibration else _section(result)
    if section is None:
        return None
    return perf_md.match_row(section.rows, result.model, result.device, dp=result.dp)


def _section(result: Result) -> Section | None:
    document = published_tables()
    is_performance = result.precision_name == "performance"
    table = selection.speed_table(result)
    if table == selection.BATCH_32:
        return document.find("batch_32") if is_performance else None
    if isinstance(table, int):
        return document.find("long_context", context_k=table) if is_performance else None
    if table != selection.SHORT and result.accuracy is None:
        return None
    if result.precision_name in ("performance", "accuracy"):
        return document.find("performance" if is_performance else "accuracy")
    sections = (s for s in document.sections if s.kind == "precision")
    return next((section for section in sections if section.title == result.heading), None)
