"""Text tables: columns, rows and notes, as Markdown or comma-separated values.

`row` and `display` make the cells.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import tabulate

from tilewright.evaluate.report.display import printable

tabulate.MIN_PADDING = 0
tabulate.PRESERVE_WHITESPACE = True
tabulate.WIDE_CHARS_MODE = False  # widths are counted in characters on every machine

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], str]]
"""Functions from a row to the text of a cell, by column title."""

CsvValue = str | float | int | None
_MIN_WIDTH = 3
_FORMULA = ("=", "+", "-", "@")
"""First characters of a formula in a spreadsheet."""


@dataclass(frozen=True, slots=True)
class Table:
    """Column titles, rows of cells, and notes below the table."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, columns: Sequence[str], rows: Iterable[Sequence[str]], *notes: str) -> Table:
        """Return a table from cell sequences."""
        return cls(tuple(columns), tuple(map(tuple, rows)), notes)

    @classmethod
    def by(cls, columns: Columns[T], rows: Iterable[T], *notes: str) -> Table:
        """Return a table with each column's text for each row."""
        lines = ([each(row) for each in columns.values()] for row in rows)
        return cls.of(list(columns), lines, *notes)

    def markdown(self) -> str:
        """Return the table as aligned Markdown, then its notes as a list.

        Cells must not contain newlines or bars.
        """
        lines = [self.columns, *self.rows]
        assert all(len(line) == len(self.columns) for line in lines), lines
        assert not any("|" in cell or "\n" in cell for line in lines for cell in line), lines
        headers = [title.ljust(_MIN_WIDTH) for title in self.columns]
        text = tabulate.tabulate(self.rows, headers, tablefmt="github", disable_numparse=True)
        notes = "".join(f"- {note}\n" for note in self.notes)
        return f"{text}\n\n{notes}" if notes else f"{text}\n"


def csv_text(lines: Sequence[Mapping[str, CsvValue]]) -> str:
    """Return comma-separated values. The header is the keys' union, in order of occurrence.

    Numbers are unrounded. Text that a spreadsheet would run is quoted.
    """
    columns = list(dict.fromkeys(column for line in lines for column in line))
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_csv_cell(line.get(column)) for column in columns] for line in lines)
    return buffer.getvalue()


def _csv_cell(value: CsvValue) -> CsvValue:
    if not isinstance(value, str):
        return value
    text = printable(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text
