"""``python -m bench perf``: tables of PERF.md and of documents, from recorded results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.cuda.draft_costs import render_costs
from tilewright.cli.main import VERBS, usage
from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.report.comparisons import render_blocks
from tilewright.evaluate.report.documents import BLOCKS
from tilewright.evaluate.report.image_tables import render_images
from tilewright.evaluate.report.markdown import find_markers
from tilewright.evaluate.report.perf_file import RECORDED, read_beside, update_tables
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.store import read_store
from tilewright.options.arguments import Parser
from tilewright.utils.files import read_text, write_file


def render_document(text: str, folder: Path, results: Sequence[Result] = ()) -> str:
    """Return a document with its comparison tables, command list and tables of ``results``."""

    def tables(folder: Path, name: str) -> str:
        if name not in BLOCKS:
            raise ConfigError(f"block {name!r}; {allowed(BLOCKS, name)}")
        return BLOCKS[name](results)

    own = {"tilewright": tables} if results else {}
    more = {"usage": _usage, "images": render_images, "drafts": render_costs, **own}
    return render_blocks(text, folder, **more)


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
    arguments = parser.parse_args(argv)
    recorded = Path(arguments.results)
    results = [*read_store(recorded), *read_beside(recorded)]
    if not results:
        raise ConfigError(f"{arguments.results}: has no results; allowed: at least one")
    rendered = {path: _rendered(path, results) for path in map(Path, arguments.also)}
    print(update_tables(arguments.output, results))
    for path, text in rendered.items():
        write_file(path, text.encode())
    return 0


def _rendered(path: Path, results: Sequence[Result]) -> str:
    text = read_text(path)
    find_markers(text, file=str(path))  # refuses a block without an end
    try:
        return render_document(text, Path("results"), results)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
