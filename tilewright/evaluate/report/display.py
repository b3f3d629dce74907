"""Text for numbers and untrusted strings: decimals, percentages, intervals, sizes, counts and
names.

A missing number (None) becomes `none`, which is empty by default. Excludes records and tables.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_ESCAPES = re.compile(
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?|[ -/]*[0-~])"
)
_ODD = "\ufffd"


def decimal(value: float | None, digits: int = 1, *, none: str = "", grouped: bool = False) -> str:
    """Return a number with ``digits`` decimals. ``grouped`` adds thousands separators."""
    if value is None:
        return none
    return f"{value:,.{digits}f}" if grouped else f"{value:.{digits}f}"


def percent(share: float | None, digits: int = 1) -> str:
    """Return a fraction (0.5) as a percentage ("50.0"), without the sign."""
    return "" if share is None else decimal(100 * share, digits)


def significant(value: float | None, digits: int = 3) -> str:
    """Return a number with ``digits`` significant digits, for example a KL divergence in nats."""
    return "" if value is None else f"{value:.{digits}g}"


def megabytes(
    num_bytes: float | None, digits: int = 0, *, none: str = "", grouped: bool = False
) -> str:
    """Return a size in 10^6 bytes, without the unit."""
    return decimal(
        None if num_bytes is None else num_bytes / 1e6, digits, none=none, grouped=grouped
    )


def with_spread(text: str, spread: float | None, digits: int = 1, *, word: str = "") -> str:
    """Return ``text`` with the spread, a fraction, if present: "12.3 (50.0 %)"."""
    return text if spread is None else f"{text} ({word}{percent(spread, digits)} %)"


def span(
    low: float | None,
    high: float | None,
    digits: int = 1,
    *,
    joint: str = "-",
) -> str:
    """Return an interval or a range, for example "90.1-93.2". Empty if an end is missing."""
    if low is None or high is None:
        return ""
    return joint.join(decimal(end, digits) for end in (low, high))


def discordant(won: int | None, lost: int | None, p: float | None, *, base: str = "") -> str:
    """Return discordant positions with the exact McNemar p: "bf16 +3 -10 p=0.092".

    ``won`` counts positions correct in this configuration only, and ``lost`` in the base only.
    Empty without a comparison.
    """
    if won is None or lost is None or p is None:
        return ""
    return f"{cell_text(base)} +{won} -{lost} p={p:.2g}".strip()


def listed(names: Iterable[str]) -> str:
    """Return names in backticks for a Markdown sentence."""
    return ", ".join(f"`{name}`" for name in names)


def printable(text: str, odd: str = _ODD) -> str:
    """Return the text with ``odd`` in place of nonprintable characters."""
    return "".join(each if each.isprintable() else odd for each in text)


def plain_line(text: str) -> str:
    """Return untrusted text as part of a line: `plain_text` with spaces for line ends."""
    return " ".join(plain_text(text).split())


def cell_text(text: str) -> str:
    """Return untrusted text as a Markdown table cell: a line without bars."""
    return " ".join(text.replace("|", "/").split())


def short_commit(commit: str | None, *, none: str = "unknown") -> str:
    """Return ten digits of a commit, with a suffix for uncommitted changes: "18d3c11496-dirty"."""
    head, dirty, _ = (commit or none).partition("-dirty")
    return f"{head[:10]}{dirty}"


def plain_text(text: str) -> str:
    """Return a log as a terminal shows it.

    Escape sequences are removed and line ends remain. After carriage returns, only the last text in
    a line remains.
    """
    lines = _ESCAPES.sub("", text).replace("\r\n", "\n").split("\n")
    seen = (line.rstrip("\r").rpartition("\r")[2].expandtabs() for line in lines)
    return "\n".join(printable(line, "") for line in seen)
