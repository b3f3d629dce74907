"""The one place where figures and foreign text become text: decimals, shares, intervals, sizes,
counts that differ, and names that are safe to print.

A figure that is not known (None) becomes `none`, which is blank unless a caller says otherwise.
Knows neither records nor tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])"
)
_ODD = "\ufffd"


def decimal(value: float | None, digits: int = 1, *, none: str = "", grouped: bool = False) -> str:
    """A figure with so many digits behind the point; ``grouped`` sets commas between thousands."""
    if value is None:
        return none
    return f"{value:,.{digits}f}" if grouped else f"{value:.{digits}f}"


def percent(share: float | None, digits: int = 1, *, none: str = "") -> str:
    """A share (0.5) in percent ("50.0"), without the sign."""
    return none if share is None else decimal(100 * share, digits)


def significant(value: float | None, digits: int = 3, *, none: str = "") -> str:
    """A figure with so many significant digits, such as a KL divergence in nats."""
    return none if value is None else f"{value:.{digits}g}"


def megabytes(
    num_bytes: float | None, digits: int = 0, *, none: str = "", grouped: bool = False
) -> str:
    """A size in 10^6 bytes, without the unit."""
    return decimal(
        None if num_bytes is None else num_bytes / 1e6, digits, none=none, grouped=grouped
    )


def with_spread(text: str, spread: float | None, digits: int = 1, *, word: str = "") -> str:
    """A figure's text and, where it has one, its spread, a share: "12.3 (50.0 %)"."""
    return text if spread is None else f"{text} ({word}{percent(spread, digits)} %)"


def span(
    low: float | None,
    high: float | None,
    digits: int = 1,
    *,
    joint: str = "-",
    grouped: bool = False,
) -> str:
    """An interval or a range, such as "90.1-93.2"; blank where an end is not known."""
    if low is None or high is None:
        return ""
    ends = (decimal(end, digits, grouped=grouped) for end in (low, high))
    return joint.join(ends)


def discordant(won: int | None, lost: int | None, p: float | None, *, base: str = "") -> str:
    """Positions that only this one (+) and only the base (-) got right, and the exact McNemar p:
    "bf16 +3 -10 p=0.092". Blank where there is no comparison.
    """
    if won is None or lost is None or p is None:
        return ""
    return f"{cell_text(base)} +{won} -{lost} p={p:.2g}".strip()


def listed(names: Iterable[str]) -> str:
    """Names in a sentence of Markdown, each in backticks."""
    return ", ".join(f"`{name}`" for name in names)


def printable(text: str, odd: str = _ODD) -> str:
    """The text with ``odd`` in place of every character that is not printable."""
    return "".join(each if each.isprintable() else odd for each in text)


def plain_line(text: str, odd: str = _ODD) -> str:
    """Foreign text as part of one line: blanks for line ends, ``odd`` for what has no shape."""
    return printable(" ".join(text.split()), odd)


def cell_text(text: str) -> str:
    """Foreign text as a cell of a Markdown table: one line without bars."""
    return " ".join(text.replace("|", "/").split())


def short_commit(commit: str | None, *, none: str = "unknown") -> str:
    """Ten digits of a commit, and whether there were changes beside it: "18d3c11496-dirty"."""
    head, dirty, _ = (commit or none).partition("-dirty")
    return f"{head[:10]}{dirty}"


def plain_text(text: str) -> str:
    """What a terminal would show of a log: escapes are gone, line ends stay, and of a line that was
    written over stands what was seen last.
    """
    lines = _ESCAPES.sub("", text).replace("\r\n", "\n").split("\n")
    seen = (line.rstrip("\r").rpartition("\r")[2].expandtabs() for line in lines)
    return "\n".join(printable(line, "") for line in seen)
