"""What Tenstorrent published of its boards: the tables kept with the package, and a row of them."""

from __future__ import annotations

import functools
from pathlib import Path

from tilewright.compiler.bench import perf_md
from tilewright.compiler.bench.perf_md import Document, PerfRow, Section
from tilewright.compiler.bench.record import Result
from tilewright.compiler.bench.selection import BATCH_32, SHORT, speed_table

TABLES = Path(__file__).parent / "published" / "tenstorrent.md"


@functools.cache
def published_tables() -> Document:
    """The tables, parsed."""
    return perf_md.load(TABLES)


def published_row(result: Result) -> PerfRow | None:
    """The published row of a result's model, device, precision, batch and lengths, if there is one.

    Configurations are matched by their name or their heading, never by what they come to.
    """
    section = _section(result)
    if section is None:
        return None
    return perf_md.match_row(section.rows, result.model, result.device, dp=result.dp)


def _section(result: Result) -> Section | None:
    document = published_tables()
    is_performance = result.precision_name == "performance"
    table = speed_table(result)
    if table == BATCH_32:
        return document.find("batch_32") if is_performance else None
    if isinstance(table, int):
        return document.find("long_context", context_k=table) if is_performance else None
    if table != SHORT and result.accuracy is None:
        return None
    if result.precision_name in ("performance", "accuracy"):
        return document.find("performance" if is_performance else "accuracy")
    sections = (s for s in document.sections if s.kind == "precision")
    return next((section for section in sections if section.title == result.heading), None)
