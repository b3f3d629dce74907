"""The tables of ``tilewright compare`` in documents, rendered from its records as they are.

A document says where: between ``<!-- peers:begin NAME -->`` and ``<!-- peers:end NAME -->`` stands
the table of ``results/NAME.json``. `make perf-tables` runs this module; nothing is measured.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.compiler.bench.table import Table
from tilewright.compiler.errors import ConfigError

_BLOCK = re.compile(
    r"(<!-- peers:begin ([\w-]+) -->\n).*?(<!-- peers:end \2 -->)", re.DOTALL | re.ASCII
)
_TITLES = {"prefill": "prefill {}", "decode": "decode"}


def peers_table(record: dict[str, Any]) -> str:
    """The Markdown table of a record, each of ours with its ratios to its peers, and its source."""
    measures = [each["name"] for each in record["measures"]]
    peers = list(dict.fromkeys(each["peer"].split()[0] for each in record["ratios"]))
    columns = ("engine", "weights", *map(_title, measures), "of read rate")
    columns += tuple(f"of {name}'s, in this order" for name in peers)
    rows = [_row(each, measures, peers, record) for each in record["contestants"]]
    readings = [each / 1e9 for each in record["bandwidth"]["readings"]]
    source = (
        f"{record['model']}, {record['num_threads']} threads of {record['device']}; medians of "
        f"{record['num_rounds']} rounds in turn, tokens/s, all users together; ratios round by "
        f"round; memory read at {min(readings):.1f} to {max(readings):.1f} GB/s "
        f"({record['timestamp'][:10]}, commit {record['commit'][:10]})."
    )
    return f"{Table.of(columns, rows).markdown()}\n{source}\n"


def _title(measure: str) -> str:
    """As ``prefill 512``, ``decode`` or ``decode, 8 users``."""
    kind, length, *users = measure.split("-")
    title = _TITLES[kind].format(length)
    return f"{title}, {users[0].removeprefix('x')} users" if users else title


def _row(
    each: dict[str, Any], measures: Sequence[str], peers: Sequence[str], record: dict[str, Any]
) -> list[str]:
    name, share = f"{each['engine']} {each['weights']}", each["bandwidth_share"]
    rates = [_rate(each["rates"].get(measure)) for measure in measures]
    found = {(r["peer"].split()[0], r["measure"]): r for r in record["ratios"] if r["ours"] == name}
    ratios = []
    for peer in peers:
        own = [found[peer, measure] for measure in measures if (peer, measure) in found]
        ratios.append(", ".join(f"{statistics.median(r['repeats']):.2f}" for r in own))
    read = "" if share is None else f"{100 * share:.0f} %"
    return [each["engine"], each["weights"], *rates, read, *ratios]


def _rate(rate: dict[str, Any] | None) -> str:
    if rate is None:
        return ""
    return f"{rate['median']:,.0f}" if rate["median"] >= 100 else f"{rate['median']:.1f}"


def rendered(text: str, results: Path) -> str:
    """A document with its blocks made anew.

    Raises:
        ConfigError: for a block whose record is missing.
    """

    def block(found: re.Match[str]) -> str:
        path = results / f"{found[2]}.json"
        if not path.is_file():
            raise ConfigError(f"{path} is missing; allowed: a record of tilewright compare --json")
        return f"{found[1]}\n{peers_table(json.loads(path.read_bytes()))}\n{found[3]}"

    return _BLOCK.sub(block, text)


def main(argv: Sequence[str]) -> int:
    """Render the blocks of the documents named, from ``results/`` here."""
    for name in argv:
        path = Path(name)
        path.write_text(rendered(path.read_text(encoding="utf-8"), Path("results")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
