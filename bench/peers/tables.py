"""The tables of a record of ``bench compare``: of its rates, and of ours beside each peer."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.peers.records import read_parts
from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.report.display import decimal, megabytes, short_commit, span, with_spread
from tilewright.evaluate.report.table import Table
from tilewright.evaluate.results import stats

_TITLES = {"prefill": "prefill {}", "decode": "decode"}
_Record = dict[str, Any]


def rates_table(record: _Record, *, is_full: bool = False) -> Table:
    """The rates of a record, each of ours with its ratios to its peers; a full one has the weights'
    bytes and the spread of every figure too.
    """
    measures = [each["name"] for each in record["measures"]]
    peers = list(dict.fromkeys(each["peer"].split()[0] for each in record["ratios"]))
    busy = [name for name in measures if "-busy" in name]
    columns = ("engine", "weights", *("MB",) * is_full, *map(_title, measures), "of read rate")
    columns += ("kept beside them",) * bool(busy)
    columns += tuple(f"of {name}'s, in this order" for name in peers)
    rows = []
    for each in record["contestants"]:
        if each["rates"]:
            kept = (_kept(each["rates"], busy),) * bool(busy)
            found = _medians(record, f"{each['engine']} {each['weights']}", is_full=is_full)
            rates = _rates(each, measures, is_full=is_full)
            rows.append((*rates, *kept, *_ratios(found, measures, peers)))
    return Table.of(columns, rows)


def source_of(record: _Record) -> str:
    """Return a caption with model, machine, date, commit and spread."""
    readings = [each / 1e9 for each in record["bandwidth"]["readings"]]
    spreads = [
        stats.spread(each["repeats"]) for each in record["ratios"] if len(each["repeats"]) > 1
    ]
    spread = ""
    if spreads:
        ends = span(100 * min(spreads), 100 * max(spreads), 0, joint=" to ")
        spread = f" Ratios are per round, with spreads from `{ends} %`."
    rounds = "1 round" if record["num_rounds"] == 1 else f"{record['num_rounds']} rounds in turn"
    return (
        f"{record['model']}, {record['num_threads']} threads of {record['device']} "
        f"({record['timestamp'][:10]}, commit {short_commit(record['commit'])}). "
        f"Medians over {rounds}, in tokens/s for all users together.{spread} "
        f"Memory read rates are `{min(readings):.1f} to {max(readings):.1f} GB/s`."
    )


def _title(measure: str) -> str:
    """A measure's title: ``prefill 512``, ``decode, 8 users`` or ``decode beside 1 process``."""
    kind, length, *rest = measure.split("-")
    title = _TITLES[kind].format(length)
    if rest and rest[0].startswith("busy"):
        number = rest[0].removeprefix("busy")
        return f"{title} beside {number} process{'' if number == '1' else 'es'}"
    return f"{title}, {rest[0].removeprefix('x')} users" if rest else title


def _rates(each: _Record, measures: Sequence[str], *, is_full: bool) -> list[str]:
    share = each["bandwidth_share"]
    rates = [_rate(each["rates"].get(measure), is_full=is_full) for measure in measures]
    read = "" if share is None else f"{100 * share:.0f} %"
    size = [megabytes(each["weight_bytes"], grouped=True)] if is_full else []
    return [each["engine"], each["weights"], *size, *rates, read]


def _rate(rate: _Record | None, *, is_full: bool) -> str:
    if rate is None:
        return ""
    text = decimal(rate["median"], 0 if rate["median"] >= 100 else 1, grouped=True)
    return _with_spread(text, rate["repeats"]) if is_full else text


def _with_spread(text: str, repeats: Sequence[float]) -> str:
    return with_spread(text, stats.spread(repeats) if len(repeats) > 1 else None, 0)


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
    found: Mapping[tuple[str, str], str], measures: Sequence[str], peers: Sequence[str]
) -> list[str]:
    return [
        ", ".join(found[peer, name] for name in measures if (peer, name) in found) for peer in peers
    ]


def _medians(record: _Record, ours: str, *, is_full: bool = False) -> dict[tuple[str, str], str]:
    """The median ratio of one of ours, by peer and measure."""
    found = {}
    for each in record["ratios"]:
        if each["ours"] == ours:
            text = f"{statistics.median(each['repeats']):.2f}"
            text = _with_spread(text, each["repeats"]) if is_full else text
            found[each["peer"].split()[0], each["measure"]] = text
    return found


def peers_block(results: Path, name: str, part: str = "") -> str:
    """The Markdown of a part of the record ``name``.

    Raises:
        ConfigError: for a record, or a part of it, that is missing.
    """
    path = results / f"{name}.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing; allowed: a record of python -m bench compare --json")
    parts = read_parts(path)
    if part not in parts:
        raise ConfigError(f"{path}: no part {part!r}; {allowed(parts, part)}")
    return f"{rates_table(parts[part]).markdown()}\n{source_of(parts[part])}"
