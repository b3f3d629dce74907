"""The tables of ``tilewright compare`` in documents, rendered from its records as they are.

A document says where: between ``<!-- peers:begin NAME PART -->`` and the same with ``end`` stands
the table of a part of ``results/NAME.json``, or for the part ``ratios`` what all its parts say of
ours beside each peer. `make perf-tables` runs this module; nothing is measured.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers.records import read_parts
from tilewright.compiler.bench import stats
from tilewright.compiler.bench.display import span
from tilewright.compiler.bench.table import Table
from tilewright.compiler.errors import ConfigError, allowed

_BLOCK = re.compile(
    r"(<!-- peers:begin ([\w-]+) ([\w-]+) -->\n).*?(<!-- peers:end \2 \3 -->)",
    re.DOTALL | re.ASCII,
)
_RATIOS = "ratios"
_TITLES = {"prefill": "prefill {}", "decode": "decode"}
_Record = dict[str, Any]


def peers_table(record: _Record) -> str:
    """The Markdown table of a record, each of ours with its ratios to its peers, and its source."""
    measures = [each["name"] for each in record["measures"]]
    peers = list(dict.fromkeys(each["peer"].split()[0] for each in record["ratios"]))
    busy = [name for name in measures if "-busy" in name]
    columns = ("engine", "weights", *map(_title, measures), "of read rate")
    columns += ("kept beside them",) * bool(busy)
    columns += tuple(f"of {name}'s, in this order" for name in peers)
    rows = []
    for each in record["contestants"]:
        if each["rates"]:
            kept = (_kept(each["rates"], busy),) * bool(busy)
            rows.append((*_rates(each, measures), *kept, *_ratios(each, measures, peers, record)))
    return f"{Table.of(columns, rows).markdown()}\n{_source(record)}\n"


def _source(record: _Record) -> str:
    readings = [each / 1e9 for each in record["bandwidth"]["readings"]]
    spreads = [
        stats.spread(each["repeats"]) for each in record["ratios"] if len(each["repeats"]) > 1
    ]
    spread = ""
    if spreads:
        ends = span(100 * min(spreads), 100 * max(spreads), 0, joint=" to ")
        spread = f" (from lowest to highest {ends} % of the median)"
    rounds = f"{record['num_rounds']} round{'s' * (record['num_rounds'] > 1)}"
    return (
        f"{record['model']}, {record['num_threads']} threads of {record['device']}; medians of "
        f"{rounds} in turn, tokens/s, all users together; ratios round by round{spread}; memory "
        f"read at {min(readings):.1f} to {max(readings):.1f} GB/s "
        f"({record['timestamp'][:10]}, commit {record['commit'][:10]})."
    )


def _title(measure: str) -> str:
    """As ``prefill 512``, ``decode``, ``decode, 8 users`` or ``decode beside 1 process``."""
    kind, length, *rest = measure.split("-")
    title = _TITLES[kind].format(length)
    if rest and rest[0].startswith("busy"):
        number = rest[0].removeprefix("busy")
        return f"{title} beside {number} process{'' if number == '1' else 'es'}"
    return f"{title}, {rest[0].removeprefix('x')} users" if rest else title


def _rates(each: _Record, measures: Sequence[str]) -> list[str]:
    share = each["bandwidth_share"]
    rates = [_rate(each["rates"].get(measure)) for measure in measures]
    read = "" if share is None else f"{100 * share:.0f} %"
    return [each["engine"], each["weights"], *rates, read]


def _rate(rate: _Record | None) -> str:
    if rate is None:
        return ""
    return f"{rate['median']:,.0f}" if rate["median"] >= 100 else f"{rate['median']:.1f}"


def _kept(rates: Mapping[str, _Record], busy: Sequence[str]) -> str:
    """The shares of an engine's own rate alone that it keeps beside others, round by round."""
    shares = []
    for name in busy:
        alone = rates[name.rpartition("-")[0]]["repeats"]
        beside = rates[name]["repeats"] if name in rates else []
        each = [mine / own for mine, own in zip(beside, alone, strict=False)]
        shares.append(f"{100 * statistics.median(each):.0f} %" if each else "")
    return ", ".join(shares)


def _ratios(
    each: _Record, measures: Sequence[str], peers: Sequence[str], record: _Record
) -> list[str]:
    found = _medians(record, f"{each['engine']} {each['weights']}")
    return [
        ", ".join(f"{found[peer, name]:.2f}" for name in measures if (peer, name) in found)
        for peer in peers
    ]


def _medians(record: _Record, ours: str) -> dict[tuple[str, str], float]:
    """The median ratio of one of ours, by peer and measure."""
    return {
        (each["peer"].split()[0], each["measure"]): statistics.median(each["repeats"])
        for each in record["ratios"]
        if each["ours"] == ours
    }


def ratios_table(parts: Mapping[str, _Record]) -> str:
    """Ours beside each peer in all parts, a row for the weights of each model, and its sources.

    What is measured beside busy processes, or of more than one of our backends, is left out.
    """
    chosen = [each for each in parts.values() if not _is_of_backends(each)]
    found = {
        (record["model"], each["weights"]): _medians(record, f"{each['engine']} {each['weights']}")
        for record in chosen
        for each in record["contestants"]
    }
    keys = dict.fromkeys(key for medians in found.values() for key in medians)
    columns = ("model", "weights", *(f"{_title(name)}, of {peer}'s" for peer, name in keys))
    rows = [
        (*key, *(f"{medians[each]:.2f} x" if each in medians else "" for each in keys))
        for key, medians in found.items()
        if medians
    ]
    return f"{Table.of(columns, rows).markdown()}\n" + "\n".join(
        f"{_source(each)}  " if each is not chosen[-1] else _source(each) for each in chosen
    )


def _is_of_backends(record: _Record) -> bool:
    engines = {each["ours"].rpartition(" ")[0] for each in record["ratios"]}
    return len(engines) > 1


def rendered(text: str, results: Path) -> str:
    """A document with its blocks made anew.

    Raises:
        ConfigError: for a block whose record, or whose part of it, is missing.
    """

    def block(found: re.Match[str]) -> str:
        path, part = results / f"{found[2]}.json", found[3]
        if not path.is_file():
            raise ConfigError(f"{path} is missing; allowed: a record of tilewright compare --json")
        parts = read_parts(path)
        if part not in (*parts, _RATIOS):
            raise ConfigError(f"{path}: no part {part!r}; {allowed((*parts, _RATIOS), part)}")
        table = ratios_table(parts) if part == _RATIOS else peers_table(parts[part])
        return f"{found[1]}\n{table.rstrip()}\n\n{found[4]}"

    return _BLOCK.sub(block, text)


def main(argv: Sequence[str]) -> int:
    """Render the blocks of the documents named, from ``results/`` here."""
    for name in argv:
        path = Path(name)
        path.write_text(rendered(path.read_text(encoding="utf-8"), Path("results")), "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
