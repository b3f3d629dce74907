"""``tilewright perf``: PERF.md's tables from recorded results; hand-written text is kept."""

from __future__ import annotations

from pathlib import Path

from compiler.bench import perf_md
from compiler.bench.perf_tables import render_results
from compiler.bench.results import read
from compiler.bench.selection import unplaced
from compiler.commands.arguments import Parser
from compiler.errors import ConfigError

_BLOCK = "results"
_RECORDED = "results/cpu.jsonl"
"""The lines kept with the repository; a user's own runs are recorded elsewhere."""


def main(argv: list[str]) -> int:
    """Run the command; returns the exit code."""
    parser = Parser(prog="tilewright perf", description="Render PERF.md's tables from results.")
    parser.add_argument("--results", default=_RECORDED, metavar="FILE", help="JSON lines")
    parser.add_argument("--output", default="PERF.md", metavar="FILE", help="the file to update")
    arguments = parser.parse_args(argv)
    results = read(Path(arguments.results))
    if not results:
        raise ConfigError(f"{arguments.results}: holds no results; allowed: at least one")
    perf_md.update(arguments.output, _BLOCK, render_results(results))
    left = unplaced(results)
    print(f"{arguments.output}: {len(results) - len(left)} of {len(results)} results have a table")
    return 0
