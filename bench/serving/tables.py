"""The table of ``python -m bench compare-serve``, of its rows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.in_turn import kept_rows, median_and_range
from tilewright.evaluate.report.display import cell_text, short_commit
from tilewright.evaluate.report.table import Table

_FIGURES = {
    "output_tokens_per_second": "output t/s",
    "ttft_ms_p50": "TTFT p50 (ms)",
    "tpot_ms_p50": "TPOT p50 (ms)",
    "later_ttft_ms_p50": "later turns' TTFT p50 (ms)",
    "cached_percent_of_shareable": "cached of shareable (%)",
    "cached_percent_of_prompts": "cached of all prompts (%)",
}


def render(rows: Sequence[dict[str, Any]]) -> str:
    """Medians over rounds with their spread, and each of ours over llama.cpp's, as Markdown."""
    keys = list(dict.fromkeys((row["pair"], row["users"]) for row in rows))
    lines = []
    for pair, users in keys:
        for name, title in _FIGURES.items():
            found = {
                server: [row[name] for row in rows if _is_of(row, server, pair, users, name)]
                for server in ("tilewright", "llama.cpp", "tilewright run")
            }
            if not found["tilewright"] or not found["llama.cpp"]:
                continue
            ours, theirs = (statistics.median(found[each]) for each in ("tilewright", "llama.cpp"))
            ratio = f"{ours / theirs:.2f} x" if theirs else ""
            cells = [median_and_range(found[server]) for server in found]
            lines.append([cell_text(pair), str(users), title, *cells, ratio])
    heads = ["ours / theirs", "users", "figure", "tilewright", "llama.cpp", "run", "ratio"]
    return Table.of(heads, lines).markdown()


def _is_of(row: dict[str, Any], server: str, pair: str, users: int, name: str) -> bool:
    return (row["server"], row["pair"], row["users"]) == (server, pair, users) and name in row


def servers_block(results: Path, name: str) -> str:
    """The Markdown of the last run in ``serving/NAME.jsonl``, and where it comes from.

    Raises:
        ConfigError: where there are no rows.
    """
    rows = kept_rows(results / "serving" / f"{name}.jsonl", "compare-serve")
    last = rows[-1]
    run = [row for row in rows if row["date"] == last["date"]]
    rounds = 1 + max(row["round"] for row in run)
    commit = short_commit(last["commit"])
    source = (
        f"{rounds} round{'s' * (rounds > 1)} in turn, medians (lowest to highest); {last['host']} "
        f"({last['date'][:10]}, commit {commit})."
    )
    return f"{render(run)}\n{source}"
