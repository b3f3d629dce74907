"""A table of text: columns, rows and the notes below; as Markdown, and as comma-separated values.

Cells are made by `row` and `display`; what a table says is not known here.
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
tabulate.WIDE_CHARS_MODE = False  # a column's width is counted in characters, wherever it is made

T = TypeVar("T")
Columns = Mapping[str, Callable[[T], str]]
"""What each column of a table says of a row, by the column's title."""

CsvValue = str | float | int | None
_MIN_WIDTH = 3
_FORMULA = ("=", "+", "-", "@")
"""What a spreadsheet would take a cell that begins with it for."""


@dataclass(frozen=True, slots=True)
class Table:
    """Columns by their titles, rows of as many cells, and what is to be said below them."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, columns: Sequence[str], rows: Iterable[Sequence[str]], *notes: str) -> Table:
        """Make a table of any sequences of cells."""
        return cls(tuple(columns), tuple(map(tuple, rows)), notes)

    @classmethod
    def by(cls, columns: Columns[T], rows: Iterable[T], *notes: str) -> Table:
        """A table of what columns say of rows."""
        lines = ([each(row) for each in columns.values()] for row in rows)
        return cls.of(list(columns), lines, *notes)

    def markdown(self) -> str:
        """The table, each column as wide as its widest cell, and then its notes as a list.

        Cells are free of line ends and bars; the caller sees to that.
        """
        lines = [self.columns, *self.rows]
        assert all(len(line) == len(self.columns) for line in lines), lines
        assert not any("|" in cell or "\n" in cell for line in lines for cell in line), lines
        headers = [title.ljust(_MIN_WIDTH) for title in self.columns]
        text = tabulate.tabulate(self.rows, headers, tablefmt="github", disable_numparse=True)
        notes = "".join(f"- {note}\n" for note in self.notes)
        return f"{text}\n\n{notes}" if notes else f"{text}\n"


def csv_text(lines: Sequence[Mapping[str, CsvValue]]) -> str:
    """Comma-separated values with one header: the union of the lines' keys, in order of meeting.

    Figures stand unrounded. Text that a spreadsheet would run becomes text that it shows.
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
