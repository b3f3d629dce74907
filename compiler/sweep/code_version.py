"""Which code a cell's figures were measured by, held against the code that runs now."""

from __future__ import annotations

from tilewright.compiler.bench.display import short_commit
from tilewright.compiler.bench.record import Result
from tilewright.compiler.environment import Environment


def difference(result: Result, now: Environment) -> str:
    """What a record's code has and this one has not: ``commit 18d3c11496, torch 2.12.0``; empty for
    a record of this commit and these libraries. A checkout with changes of its own is taken for
    itself.
    """
    parts = []
    if result.commit != now.commit:
        parts.append(f"commit {short_commit(result.commit)}")
    for name, version in now.versions.items():
        if (theirs := result.versions.get(name)) != version:
            parts.append(f"{name} {theirs or 'unknown'}")
    return ", ".join(parts)
