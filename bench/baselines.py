"""Table of eight results beside a baseline of the same run, for README.

Selects rows of existing records. Measures nothing.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.in_turn import kept_rows
from bench.peers.records import read_parts
from tilewright.errors import ConfigError
from tilewright.evaluate.report.display import decimal, short_commit
from tilewright.evaluate.report.table import Table

_COLUMNS = (
    "device",
    "model",
    "precision",
    "users",
    "Tilewright (tokens/s)",
    "baseline",
    "baseline (tokens/s)",
    "ratio",
)
_CPU_RESULTS = (("all-q40", 1), ("all-q40", 32), ("all-q80", 1), ("bf16", 32))
"""Precision and number of users of the results of ``compare.json``, part ``formats``."""

_CPU_BASELINE = "llama.cpp"
_GPU_BASELINE = "vLLM"


@dataclass(frozen=True, slots=True)
class ServedRun:
    """One run of both servers after each other, in ``serving/h200.jsonl``."""

    model: str
    name: str
    commit: str
    users: tuple[int, ...]


_GPU_RUNS = (
    ServedRun("shape:llama-3.1-8b", "Llama-3.1-8B (random weights)", "3d465be", (1, 64, 256)),
    ServedRun("shape:qwen3.5-35b-a3b", "Qwen3.5-35B-A3B (random weights)", "9f58e16", (64,)),
)


def baselines_block(results: Path, name: str) -> str:
    """Return the Markdown of the table and its caption.

    Raises:
        ConfigError: if a record or a row of a record is missing.
    """
    del name  # One table exists.
    path = results / "compare.json"
    parts = read_parts(path)
    if "formats" not in parts:
        raise ConfigError(f"{path}: no part 'formats'; allowed: a run of python -m bench compare")
    record = parts["formats"]
    served = results / "serving" / "h200.jsonl"
    rows = [row for row in kept_rows(served, "bench --url") if row.get("plan") == "streams"]
    lines = [_cpu_line(path, record, precision, users) for precision, users in _CPU_RESULTS]
    captions = [_cpu_caption(record)]
    for run in _GPU_RUNS:
        pairs = [_served_pair(served, rows, run, users) for users in run.users]
        lines += [_gpu_line(run, *pair) for pair in pairs]
        captions.append(_gpu_caption(run, *pairs[0]))
    return f"{Table.of(_COLUMNS, lines).markdown()}\n" + "  \n".join(captions)


def _cpu_line(path: Path, record: dict[str, Any], precision: str, users: int) -> tuple[str, ...]:
    measure = "decode-128" + (f"-x{users}" if users > 1 else "")
    ratio = _only(
        path,
        f"ratio of {precision} to {_CPU_BASELINE} at {measure}",
        record["ratios"],
        lambda item: (
            item["measure"] == measure
            and item["ours"].endswith(f" {precision}")
            and item["peer"].startswith(_CPU_BASELINE)
        ),
    )
    rates = {
        f"{item['engine']} {item['weights']}": item["rates"][measure]["median"]
        for item in record["contestants"]
        if measure in item["rates"]
    }
    tilewright, baseline = rates[ratio["ours"]], rates[ratio["peer"]]
    median_ratio = statistics.median(ratio["repeats"])
    cells = (record["device"], record["model"], precision, str(users))
    return (*cells, *_rates(tilewright, ratio["peer"], baseline, median_ratio))


def _gpu_line(run: ServedRun, own: dict[str, Any], baseline: dict[str, Any]) -> tuple[str, ...]:
    rate, other = (row["output_tokens_per_second"] for row in (own, baseline))
    cells = (own["device"], run.name, own["precision"], str(own["concurrency"]))
    return (*cells, *_rates(rate, baseline["server"].partition(",")[0], other, rate / other))


def _rates(rate: float, baseline: str, other: float, ratio: float) -> tuple[str, ...]:
    return _rate(rate), baseline, _rate(other), f"{ratio:.2f}"


def _rate(value: float) -> str:
    return decimal(value, 0 if value >= 100 else 1, grouped=True)


def _served_pair(
    path: Path, rows: Sequence[dict[str, Any]], run: ServedRun, users: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the rows of both servers."""

    def row_of(server: str) -> dict[str, Any]:
        return _only(
            path,
            f"row of {server} with {users} users at commit {run.commit}",
            rows,
            lambda row: (
                (row["model"], row["commit"], row["concurrency"], row["rate"])
                == (run.model, run.commit, users, 0.0)
                and row["server"].startswith(server)
            ),
        )

    return row_of("tilewright serve"), row_of(_GPU_BASELINE)


def _only(
    path: Path,
    name: str,
    items: Sequence[dict[str, Any]],
    is_selected: Callable[[dict[str, Any]], bool],
) -> dict[str, Any]:
    selected = [item for item in items if is_selected(item)]
    if len(selected) != 1:
        raise ConfigError(f"{path}: {len(selected)} rows for the {name}; allowed: exactly 1")
    return selected[0]


def _cpu_caption(record: dict[str, Any]) -> str:
    return (
        f"{record['device']}: `make compare`, decode after 128 tokens, {record['num_threads']} "
        f"threads, medians of {record['num_rounds']} alternating rounds, Tilewright "
        f"{record['versions']['tilewright']} ({record['timestamp'][:10]}, commit "
        f"`{short_commit(record['commit'])}`)."
    )


def _gpu_caption(run: ServedRun, own: dict[str, Any], baseline: dict[str, Any]) -> str:
    length = own["output_tokens"] // own["requests"]
    command = own["server"].removeprefix("tilewright ")
    return (
        f"{run.name.partition(' ')[0]}: `{command}`, {baseline['server'].partition(',')[0]} "
        f"after it on the same GPU, no prefix cache, prompts of {own['input_tokens']:,} tokens, "
        f"outputs of {length} tokens, one round of `bench/cuda/round.sh OUT streams` "
        f"({own['date']}, commit `{run.commit}`)."
    )
