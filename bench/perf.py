"""``python -m bench perf``: tables of PERF.md and of documents, from recorded results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tilewright.cli.main import VERBS, usage
from tilewright.errors import ConfigError
from tilewright.evaluate.report.comparisons import render_blocks
from tilewright.evaluate.report.documents import blocks_of, update_document
from tilewright.evaluate.report.image_tables import render_images
from tilewright.evaluate.report.perf_file import RECORDED, read_beside, update_tables
from tilewright.evaluate.store import read_store
from tilewright.options.arguments import Parser


def render_document(text: str, results: Path) -> str:
    """Return a document with updated comparison tables and command list."""
    return render_blocks(text, results, usage=_usage, images=render_images)


def _usage(results: Path, name: str) -> str:
    return f"```text\n{usage(f'{name} COMMAND', VERBS).rstrip()}\n```"


def main(argv: list[str]) -> int:
    """Run ``python -m bench perf`` and return the exit code."""
    parser = Parser(prog="python -m bench perf", description="Render PERF.md from results.")
    many: dict[str, Any] = {"nargs": "+", "action": "extend", "default": []}
    option = parser.add_argument
    option("--results", default=RECORDED, metavar="FILE", help=f"JSON lines (default: {RECORDED})")
    option("--output", default="PERF.md", metavar="FILE", help="the file to update (PERF.md)")
    option("--also", metavar="FILE", help="documents with blocks to update too", **many)
    option("--compared", metavar="FILE", help="documents with tables of comparisons", **many)
    arguments = parser.parse_args(argv)
    path = Path(arguments.results)
    results = [*read_store(path), *read_beside(path)]
    if not results:
        raise ConfigError(f"{arguments.results}: holds no results; allowed: at least one")
    for document in arguments.also:
        blocks_of(document)  # before anything is written
    print(update_tables(arguments.output, results))
    for document in arguments.also:
        update_document(document, results)
    for document in map(Path, arguments.compared):
        text = render_document(document.read_text("utf-8"), Path("results"))
        document.write_text(text, "utf-8")
    return 0
