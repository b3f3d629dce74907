"""``tilewright perf``: PERF.md's tables from recorded results; hand-written text is kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tilewright.errors import ConfigError
from tilewright.evaluate.report import markdown, perf_md
from tilewright.evaluate.report.documents import blocks_of, update_document
from tilewright.evaluate.report.perf_tables import render_results
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.result_file import read
from tilewright.evaluate.results.selection import unplaced
from tilewright.options.arguments import Parser

_BLOCK = "results"
RECORDED = "results/cpu.jsonl"
"""The lines kept with the repository; a user's own runs are recorded elsewhere."""
_RECORDED_NAMES = ("cpu.jsonl", "h200.jsonl", "boards.jsonl")
"""Files that lie side by side, one a kind of machine: PERF.md has the lines of all of them."""


def main(argv: list[str]) -> int:
    """Run ``tilewright perf`` with the arguments behind it; returns the exit code."""
    parser = Parser(prog="tilewright perf", description="Render PERF.md's tables from results.")
    parser.add_argument(
        "--results", default=RECORDED, metavar="FILE", help=f"JSON lines (default: {RECORDED})"
    )
    parser.add_argument(
        "--output", default="PERF.md", metavar="FILE", help="the file to update (default: PERF.md)"
    )
    parser.add_argument(
        "--also", nargs="+", default=(), metavar="FILE", help="documents whose blocks to render too"
    )
    arguments = parser.parse_args(argv)
    path = Path(arguments.results)
    results = [*read(path), *read_beside(path)]
    if not results:
        raise ConfigError(f"{arguments.results}: holds no results; allowed: at least one")
    for document in arguments.also:
        blocks_of(document)  # before anything is written
    print(update_tables(arguments.output, results))
    for document in arguments.also:
        update_document(document, results)
    return 0


def read_beside(path: Path) -> list[Result]:
    """What other machines recorded beside ``path``, where that is one of the recorded files."""
    if path.name not in _RECORDED_NAMES:
        return []
    found = [path.with_name(name) for name in _RECORDED_NAMES if name != path.name]
    return [result for each in found if each.exists() for result in read(each)]


def check_file(output: str) -> None:
    """Refuse what `update_tables` cannot merge into, before anything is written.

    Raises:
        ConfigError: if the file cannot be read, a table or a marker in it is malformed.
    """
    if Path(output).exists():
        markdown.merge(perf_md.load(output).text, _BLOCK, "", file=output)


def update_tables(output: str, results: Sequence[Result]) -> str:
    """Render the tables of a file anew; returns what there is to say about it.

    Raises:
        ConfigError: if the file cannot be read or written, or its markers are malformed.
    """
    perf_md.update(output, _BLOCK, render_results(results))
    left = unplaced(results)
    return f"{output}: {len(results) - len(left)} of {len(results)} results have a table"
