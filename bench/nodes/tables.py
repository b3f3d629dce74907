"""The table of ``python -m bench bench-nodes``, of its rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.in_turn import kept_rows, median_and_range
from tilewright.evaluate.report.display import short_commit
from tilewright.evaluate.report.table import Table

FREE = "free"
_QUIET = 0.1
"""The share of the machine's cores from which on others have disturbed a run."""
_KIND = ("model", "nodes", "threads", "link", "wire", "host")
"""What runs that were asked for alike have in common. Rank 0 chose their hops, so those that sent
more bytes a token than others are no repeats of them.
"""
_HEADS = (
    *("shape", "nodes x threads", "link", "wire", "prompt t/s", "decode t/s"),
    *("sent a token", "in exchanges a token", "runs"),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One run: tokens a second, and of each predicted token what rank 0 sent and waited; the share
    of the machine's cores that others took meanwhile.
    """

    model: str
    nodes: int
    threads: int
    link: str
    wire: str
    prompt_rate: float
    decode_rate: float
    sent_kb: float
    exchange_ms: float
    prompt_tokens: int
    command: str
    others: float


def nodes_block(results: Path, name: str) -> str:
    """The Markdown of ``parallel/NAME.jsonl``: medians of the undisturbed runs, and where they come
    from.

    Raises:
        ConfigError: where there are no rows.
    """
    kept = kept_rows(results / "parallel" / f"{name}.jsonl", "bench-nodes")
    rows = [row for row in kept if row["others"] < _QUIET]
    repeats = _repeats(rows)
    cells = [_cells(runs) for runs in repeats]
    commits = dict.fromkeys(short_commit(row["commit"]) for row in rows)
    dates = dict.fromkeys(row["date"][:10] for row in rows)
    hosts = dict.fromkeys(row["host"] for row in rows)
    source = f"{', '.join(hosts)}; {', '.join(dates)}; commit {', '.join(commits)}"
    heads = list(_HEADS)
    if len(hosts) > 1:
        heads.append("machine")
        cells = [[*line, runs[0]["host"]] for line, runs in zip(cells, repeats, strict=True)]
    table = Table.of(heads, cells).markdown()
    num_left = len(kept) - len(rows)
    share = f"{100 * _QUIET:.0f} %"
    left = f"{num_left} runs in which others took {share} of the cores or more are left out"
    return f"{table}\nMedians (lowest to highest) of runs that sent the same; {source}; {left}.\n"


def _repeats(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Runs of each kind, as they first came, and of a kind those that sent the least first."""
    kinds: dict[tuple[Any, ...], dict[int, list[dict[str, Any]]]] = {}
    for row in rows:
        of_kind = kinds.setdefault(tuple(row[key] for key in _KIND), {})
        of_kind.setdefault(round(row["sent_kb"]), []).append(row)
    return [of_kind[sent] for of_kind in kinds.values() for sent in sorted(of_kind)]


def _cells(runs: Sequence[dict[str, Any]]) -> list[str]:
    def middle(key: str) -> float:
        return statistics.median(run[key] for run in runs)

    first = runs[0]
    shape = first["model"].removeprefix("dllama_model_").replace("_", " ")
    rate, _, delay = first["link"].partition("+")
    link = FREE if rate == FREE else f"{rate} Gbit/s"
    link += f" + {delay.removesuffix('us')} us" if delay else ""
    decode = median_and_range([run["decode_rate"] for run in runs])
    exchanged = ["", ""]
    if first["nodes"] > 1:
        exchanged = [f"{first['sent_kb']:.0f} kB", f"{middle('exchange_ms'):.1f} ms"]
    ranks = f"{first['nodes']} x {first['threads']}"
    rates = [f"{middle('prompt_rate'):.0f}", decode]
    return [shape, ranks, link, first["wire"], *rates, *exchanged, str(len(runs))]
