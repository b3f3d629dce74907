"""Tables as text: sorted columns and lines that fit a width, or Markdown.

Knows nothing of sweeps, except a line's cells.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.report import table
from tilewright.evaluate.sweep.journal import TrialState

MIN_NAME_WIDTH = 8


def shorten(text: str, width: int) -> str:
    """Shorten a name by cutting its middle, because related names differ at their ends."""
    if len(text) <= width:
        return text
    num_kept = max(0, width - 3)
    return text[: (num_kept + 1) // 2] + "..." + text[len(text) - num_kept // 2 :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column of a table.

    Attributes:
        key: name in JSON and for sorting.
        title: heading for 80 columns.
        full: heading in Markdown.
        highest_first: whether the first sort is descending.
    """

    key: str
    title: str
    full: str = ""
    text: Callable[[Any], str] = str
    is_number: bool = False
    highest_first: bool = False

    def show(self, line: ScreenLine) -> str:
        """Return a line's text in this column."""
        value = line.values[self.key]
        return "" if value is None else self.text(value)

    def fit(self, text: str, width: int) -> str:
        """Cut and align a title or a cell to ``width`` characters."""
        text = shorten(text, width)
        return text.rjust(width) if self.is_number else text.ljust(width)


@dataclass(frozen=True, slots=True)
class ScreenLine:
    """A line and its cells. ``key`` is constant while the values change.

    ``values`` has a value per column key, None if unknown.
    """

    key: str
    states: tuple[TrialState, ...]
    values: dict[str, Any]

    @property
    def name(self) -> str:
        """The complete name of the configuration."""
        return str(self.values["name"])


@dataclass(frozen=True, slots=True)
class Listing:
    """Columns, lines, and the notes below them."""

    columns: tuple[Column, ...]
    lines: tuple[ScreenLine, ...]
    notes: tuple[str, ...] = ()

    def sorted_by(self, key: str | None, *, is_reversed: bool = False) -> Listing:
        """Return the lines sorted by a column, or as planned for None. Unknown values are last.

        Raises:
            ConfigError: for an unknown column.
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
        """Return each column's width. The name column shrinks to fit ``room``."""
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
        """Return the table as Markdown, then its notes as a list."""
        lines = [
            [each.show(line).replace("|", "/") for each in self.columns] for line in self.lines
        ]
        titles = [column.full or column.title for column in self.columns]
        return table.Table.of(titles, lines, *self.notes).markdown()


def _order(value: Any) -> Any:
    """Return a sort key with numbers inside names as numbers: 2.ff2 before 12.ff2."""
    if not isinstance(value, str):
        return value
    parts = re.split(r"([0-9]+)", value)
    return [int(part) if index % 2 else part for index, part in enumerate(parts)]
