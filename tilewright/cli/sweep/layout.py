"""A table as text: columns and lines, sorted, made to fit, as Markdown; text made fit to print.

Knows nothing of sweeps but that a line is made of cells.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.report import table
from tilewright.evaluate.report.display import plain_text
from tilewright.evaluate.sweep.journal import CellState

MIN_NAME_WIDTH = 8


def plain_line(text: str) -> str:
    """What a log's text shows, in one line: escapes and characters without a shape are gone."""
    return " ".join(plain_text(text).split())


def shorten(text: str, width: int) -> str:
    """Shorten a name by cutting its middle, for related names differ at their ends."""
    if len(text) <= width:
        return text
    num_kept = max(0, width - 3)
    return text[: (num_kept + 1) // 2] + "..." + text[len(text) - num_kept // 2 :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table: ``key`` names it in JSON and when sorting; ``title`` is for 80 columns,
    ``full`` for Markdown. ``highest_first``: the order it is first sorted in.
    """

    key: str
    title: str
    full: str = ""
    text: Callable[[Any], str] = str
    is_number: bool = False
    highest_first: bool = False

    def show(self, line: ScreenLine) -> str:
        """The text that a line shows in this column."""
        value = line.values[self.key]
        return "" if value is None else self.text(value)

    def fit(self, text: str, width: int) -> str:
        """Cut and align a text (the title or a cell's) to so many characters."""
        text = shorten(text, width)
        return text.rjust(width) if self.is_number else text.ljust(width)


@dataclass(frozen=True, slots=True)
class ScreenLine:
    """A line and the cells it is made of; ``key`` stays while its figures change.

    ``values`` by the columns' keys, None for what is not known.
    """

    key: str
    states: tuple[CellState, ...]
    values: dict[str, Any]

    @property
    def name(self) -> str:
        """The configuration's name, whole."""
        return str(self.values["name"])


@dataclass(frozen=True, slots=True)
class Listing:
    """Columns, lines, and what is to be said below them."""

    columns: tuple[Column, ...]
    lines: tuple[ScreenLine, ...]
    notes: tuple[str, ...] = ()

    def sorted_by(self, key: str | None, *, is_reversed: bool = False) -> Listing:
        """Sort by a column, or as planned where it is None; what is not known comes last.

        Raises:
            ConfigError: for a column that is not there.
        """
        if key is None:
            return replace(self, lines=self.lines[::-1]) if is_reversed else self
        column = next((each for each in self.columns if each.key == key), None)
        if column is None:
            keys = [each.key for each in self.columns]
            raise ConfigError(f"no column {key[:60]!r} to sort by; {allowed(keys, key)}")
        known = [line for line in self.lines if line.values[key] is not None]
        known.sort(
            key=lambda line: _order(line.values[key]),
            reverse=column.highest_first is not is_reversed,
        )
        unknown = [line for line in self.lines if line.values[key] is None]
        return replace(self, lines=(*known, *unknown))

    def widths(self, room: int | None = None) -> list[int]:
        """How wide each column is; the names' shrinks so that all, with blanks, fit ``room``."""
        found = [
            max(len(column.title), *(len(column.show(line)) for line in self.lines), 0)
            for column in self.columns
        ]
        excess = 0 if room is None else sum(found) + len(found) - 1 - room
        if excess > 0:
            name = [column.key for column in self.columns].index("name")
            found[name] = max(min(MIN_NAME_WIDTH, found[name]), found[name] - excess)
        return found

    def markdown(self) -> str:
        """The table, then its notes as a list."""
        lines = [
            [each.show(line).replace("|", "/") for each in self.columns] for line in self.lines
        ]
        titles = [column.full or column.title for column in self.columns]
        return table.Table.of(titles, lines, *self.notes).markdown()


def _order(value: Any) -> Any:
    """Numbers inside names count as numbers: 2.ff2 before 12.ff2."""
    if not isinstance(value, str):
        return value
    parts = re.split(r"([0-9]+)", value)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]
