"""``python -m bench perf``: the tables of PERF.md from recorded results."""

from __future__ import annotations

from pathlib import Path

from tilewright.errors import ConfigError
from tilewright.evaluate.report.documents import blocks_of, update_document
from tilewright.evaluate.report.perf_file import RECORDED, read_beside, update_tables
from tilewright.evaluate.results.result_file import read
from tilewright.options.arguments import Parser


def main(argv: list[str]) -> int:
    """Run ``python -m bench perf`` and return the exit code."""
    parser = Parser(prog="python -m bench perf", description="Render PERF.md from results.")
    parser.add_argument(
        "--results", default=RECORDED, metavar="FILE", help=f"JSON lines (default: {RECORDED})"
    )
    parser.add_argument(
        "--output", default="PERF.md", metavar="FILE", help="the file to update (default: PERF.md)"
    )
    parser.add_argument(
        "--also",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="documents with blocks to update too",
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
