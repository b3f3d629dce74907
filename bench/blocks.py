"""Tables in documents, rendered from recorded results.

A document has markers ``<!-- BLOCK:begin NAME -->`` and ``<!-- BLOCK:end NAME -->``:

- ``peers NAME PART``: a part of ``results/NAME.json``
- ``servers NAME``: the last run in ``results/serving/NAME.jsonl``
- ``baselines readme``: the rows of `bench.baselines`
- ``ranks NAME``: the rows of ``results/parallel/NAME.jsonl``
- ``usage tilewright``: the list of commands

`make perf-tables` runs this module. It measures nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench.baselines import baselines_block
from bench.parallel_rows import ranks_block
from bench.peers.tables import peers_block
from bench.serving.tables import servers_block
from tilewright.cli.main import VERBS, usage


def _usage_block(results: Path, name: str) -> str:
    """Return the output of ``tilewright --help`` as fenced text."""
    del results  # Records are not read.
    return f"```text\n{usage(f'{name} COMMAND', VERBS).rstrip()}\n```"


_KINDS: Mapping[str, Callable[..., str]] = {
    "peers": peers_block,
    "servers": servers_block,
    "baselines": baselines_block,
    "ranks": ranks_block,
    "usage": _usage_block,
}
_BLOCK = re.compile(
    rf"(<!-- ({'|'.join(_KINDS)}):begin ([\w-]+(?: [\w-]+)?) -->\n).*?(<!-- \2:end \3 -->)",
    re.DOTALL | re.ASCII,
)


def rendered(text: str, results: Path) -> str:
    """Return a document with new blocks.

    Raises:
        ConfigError: if records are missing.
    """

    def block(found: re.Match[str]) -> str:
        made = _KINDS[found[2]](results, *found[3].split())
        return f"{found[1]}\n{made.rstrip()}\n\n{found[4]}"

    return _BLOCK.sub(block, text)


def main(argv: Sequence[str]) -> int:
    """Render the blocks of documents from ``results/``."""
    for name in argv:
        path = Path(name)
        path.write_text(rendered(path.read_text(encoding="utf-8"), Path("results")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
