"""Which code a cell's figures were measured by, held against the code that runs now."""

from __future__ import annotations

from tilewright.compiler.bench.record import Result
from tilewright.compiler.environment import Environment

_COMMIT_DIGITS = 10


def difference(result: Result, now: Environment) -> str:
    """What a record's code has and this one has not: ``commit 18d3c11496, torch 2.12.0``; empty for
    a record of this commit and these libraries. A checkout with changes of its own is taken for
    itself.
    """
    parts = []
    if result.commit != now.commit:
        head, dirty, _ = (result.commit or "unknown").partition("-dirty")
        parts.append(f"commit {head[:_COMMIT_DIGITS]}{dirty}")
    for name, version in now.versions.items():
        if (theirs := result.versions.get(name)) != version:
            parts.append(f"{name} {theirs or 'unknown'}")
    return ", ".join(parts)
