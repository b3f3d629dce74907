"""The table of ``tilewright compare-serve`` in documents, rendered from its rows as they are.

Between ``<!-- servers:begin NAME -->`` and the same with ``end`` stands what the last run in
``results/serving/NAME.jsonl`` found. `make perf-tables` runs this module; nothing is measured.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.serving.command import render
from tilewright.compiler.errors import ConfigError

_BLOCK = re.compile(
    r"(<!-- servers:begin ([\w-]+) -->\n).*?(<!-- servers:end \2 -->)", re.DOTALL | re.ASCII
)


def servers_table(rows: Sequence[dict[str, Any]]) -> str:
    """The Markdown table of the last run among rows, and where it comes from."""
    last = rows[-1]
    run = [row for row in rows if row["date"] == last["date"]]
    rounds = 1 + max(row["round"] for row in run)
    commit = (last["commit"] or "no checkout")[:10]
    source = (
        f"{rounds} round{'s' * (rounds > 1)} in turn, medians (lowest to highest); {last['host']} "
        f"({last['date'][:10]}, commit {commit})."
    )
    return f"{render(run)}\n{source}\n"


def rendered(text: str, results: Path) -> str:
    """A document with its blocks made anew.

    Raises:
        ConfigError: for a block whose rows are missing.
    """

    def block(found: re.Match[str]) -> str:
        path = results / f"{found[2]}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
        if not lines:
            raise ConfigError(
                f"{path} is missing; allowed: rows of tilewright compare-serve --results"
            )
        return f"{found[1]}\n{servers_table([json.loads(line) for line in lines])}\n{found[3]}"

    return _BLOCK.sub(block, text)


def main(argv: Sequence[str]) -> int:
    """Render the blocks of the documents named, from ``results/serving/`` here."""
    for name in argv:
        path = Path(name)
        path.write_text(rendered(path.read_text("utf-8"), Path("results", "serving")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
