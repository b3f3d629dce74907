"""Markdown for PERF.md: headings, tables, text, and replaceable blocks between markers.

Excludes the contents of tables.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from tilewright.errors import ConfigError

_BLANKS = " \t\r"
_HEADING = re.compile(r"(#{1,6})[ \t]+([^\n]*)")
_RULE = re.compile(r":?-+:?")
_PIPE = re.compile(r"(?<!\\)\|")
_FENCE = re.compile(r"(`{3,})[^`]*$|(~{3,})")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
_MARKER = re.compile(r"<!-- tilewright:(begin|end) ([A-Za-z0-9][A-Za-z0-9_-]{0,63}) -->")


@dataclass(frozen=True, slots=True)
class Text:
    """Unchanged lines that are neither headings nor tables."""

    text: str


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading with ``level`` 1 to 6, in line number ``line``."""

    level: int
    title: str
    line: int


@dataclass(frozen=True, slots=True)
class TableLine:
    """A table line: its trimmed cells and its line number."""

    cells: tuple[str, ...]
    line: int


@dataclass(frozen=True, slots=True)
class TableBlock:
    """A table: header cells, header line, and rows with the same cell count."""

    columns: tuple[str, ...]
    rows: tuple[TableLine, ...]
    line: int


Block = Text | Heading | TableBlock


def parse_blocks(text: str, *, name: str) -> tuple[Block, ...]:
    """Split a text into headings, tables and remaining text.

    A line that starts with a bar belongs to a table, except in a fenced code block.

    Raises:
        ConfigError: Names ``name`` and the line. A table has no rule line or a wrong number of
            cells, or a fence is not closed.
    """
    blocks: list[Block] = []
    plain: list[str] = []
    table: list[TableLine] = []
    fence, fence_line = "", 0

    def close() -> None:
        """End the current text or table. At most one is open."""
        if plain:
            blocks.append(Text("".join(plain)))
        if table:
            blocks.append(_table(table, name=name))
        plain.clear()
        table.clear()

    for number, line in enumerate(_lines(text), start=1):
        core = line.strip(_BLANKS + "\n")
        is_table = not fence and core.startswith("|")
        heading = None if fence else _HEADING.match(line)
        if heading or (plain if is_table else table):
            close()
        if is_table:
            table.append(_table_line(line, number=number, name=name))
        elif heading:
            title = heading[2].strip(_BLANKS)
            blocks.append(Heading(len(heading[1]), title, number))
        else:
            plain.append(line)
            if fence:
                fence = "" if _closes(fence, core) else fence
            elif opened := _FENCE.match(core):
                fence, fence_line = opened[1] or opened[2], number
    close()
    if fence:
        raise ConfigError(f"{name}:{fence_line}: code fence {fence[:20]!r} is not closed")
    return tuple(blocks)


def _closes(fence: str, core: str) -> bool:
    return core.startswith(fence) and not core.strip(fence[0])


def _lines(text: str) -> list[str]:
    """Return lines with their ends, split at line feeds only (unlike str.splitlines)."""
    lines = text.split("\n")
    return [f"{line}\n" for line in lines[:-1]] + ([lines[-1]] if lines[-1] else [])


def _table_line(line: str, *, number: int, name: str) -> TableLine:
    core = line.rstrip(_BLANKS + "\n")
    start = core.index("|")
    if len(core) - start < 2 or not core.endswith("|") or core.endswith("\\|"):
        raise ConfigError(f"{name}:{number}: a table's line begins and ends with '|'")
    cells = _PIPE.split(core[start + 1 : -1])
    return TableLine(tuple(cell.strip(_BLANKS) for cell in cells), number)


def _table(lines: Sequence[TableLine], *, name: str) -> TableBlock:
    header, *rest = lines
    if not rest or not all(_RULE.fullmatch(cell) for cell in rest[0].cells):
        raise ConfigError(
            f"{name}:{header.line + 1}: missing the line |---| below a table's header"
        )
    for line in rest:
        if len(line.cells) != len(header.cells):
            raise ConfigError(
                f"{name}:{line.line}: {len(line.cells)} cells in a table of "
                f"{len(header.cells)} columns"
            )
    return TableBlock(header.cells, tuple(rest[1:]), header.line)


def merge(existing: str, name: str, rendered: str, *, file: str = "PERF.md") -> str:
    """Return ``existing`` with ``rendered`` between the markers for ``name``.

    A text without these markers gets the block at its end. Line ends follow the existing text.

    Raises:
        ConfigError: Names ``file`` and the line. Markers are malformed, unbalanced, nested or
            duplicate, or ``rendered`` contains a marker.
    """
    if not _NAME.fullmatch(name):
        raise ConfigError(f"block name {name!r}; allowed: letters, digits, '-', '_'")
    if find_markers(rendered, file=f"block {name!r}"):
        raise ConfigError(f"block {name!r}: its text holds markers itself")
    end = "\r\n" if "\r\n" in existing else "\n"
    body = rendered.replace("\r\n", "\n").replace("\r", "\n").strip("\n").replace("\n", end)
    begin_line = f"<!-- tilewright:begin {name} -->{end}"
    inner = f"{end}{body}{end}{end}" if body else ""
    spans = find_markers(existing, file=file)
    if name in spans:
        first, last = spans[name]
        lines = _lines(existing)
        return "".join([*lines[:first], inner, *lines[last - 1 :]])
    gap = "" if not existing else end if existing.endswith("\n") else end + end
    return f"{existing}{gap}{begin_line}{inner}<!-- tilewright:end {name} -->{end}"


def find_markers(text: str, *, file: str) -> dict[str, tuple[int, int]]:
    """Return the line numbers (from 1) of every block's begin and end marker.

    Raises:
        ConfigError: See `merge`.
    """
    spans: dict[str, tuple[int, int]] = {}
    begun: tuple[str, int] | None = None
    for number, line in enumerate(_lines(text), start=1):
        if "tilewright:begin" not in line and "tilewright:end" not in line:
            continue
        place = f"{file}:{number}"
        found = _MARKER.fullmatch(line.rstrip(_BLANKS + "\n"))
        if not found:
            raise ConfigError(f"{place}: malformed marker; allowed: <!-- tilewright:begin NAME -->")
        word, name = found.groups()
        if word == "begin":
            if begun:
                raise ConfigError(
                    f"{place}: block {name!r} begins inside {begun[0]!r} of line {begun[1]}"
                )
            if name in spans:
                raise ConfigError(f"{place}: a second block {name!r}; the first: {spans[name][0]}")
            begun = name, number
            continue
        if not begun or begun[0] != name:
            raise ConfigError(f"{place}: block {name!r} ends, but has not begun")
        spans[name], begun = (begun[1], number), None
    if begun:
        raise ConfigError(f"{file}:{begun[1]}: block {begun[0]!r} begins and does not end")
    return spans
