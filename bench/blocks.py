"""The tables of comparisons in documents, rendered from their records as they are.

A document says where: ``<!-- peers:begin NAME PART -->`` and the same with ``end`` hold the table
of a part of ``results/NAME.json``;
``<!-- servers:begin NAME -->`` that of the last run in ``results/serving/NAME.jsonl``;
``<!-- baselines:begin NAME -->`` the eight rows of `bench.baselines`;
``<!-- ranks:begin NAME -->`` the rows of ``results/parallel/NAME.jsonl``.
`make perf-tables` runs this module; nothing is measured.
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

_KINDS: Mapping[str, Callable[..., str]] = {
    "peers": peers_block,
    "servers": servers_block,
    "baselines": baselines_block,
    "ranks": ranks_block,
}
_BLOCK = re.compile(
    rf"(<!-- ({'|'.join(_KINDS)}):begin ([\w-]+(?: [\w-]+)?) -->\n).*?(<!-- \2:end \3 -->)",
    re.DOTALL | re.ASCII,
)


def rendered(text: str, results: Path) -> str:
    """A document with its blocks made anew.

    Raises:
        ConfigError: for a block whose records are missing.
    """

    def block(found: re.Match[str]) -> str:
        made = _KINDS[found[2]](results, *found[3].split())
        return f"{found[1]}\n{made.rstrip()}\n\n{found[4]}"

    return _BLOCK.sub(block, text)


def main(argv: Sequence[str]) -> int:
    """Render the blocks of the documents named, from ``results/`` here."""
    for name in argv:
        path = Path(name)
        path.write_text(rendered(path.read_text(encoding="utf-8"), Path("results")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
