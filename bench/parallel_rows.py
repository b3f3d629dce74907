"""Table of the results of several GPUs, rendered from ``results/parallel/NAME.jsonl``."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from tilewright.evaluate.report.display import decimal, short_commit
from tilewright.evaluate.report.table import Table

_COLUMNS = (
    *("model", "precision", "GPUs", "users", "decode (tokens/s)"),
    *("read rate of a GPU (TB/s)", "first token (ms)"),
)


def ranks_block(results: Path, name: str) -> str:
    """Return the table of every record in ``results/parallel/NAME.jsonl``, with a caption."""
    path = results / "parallel" / f"{name}.jsonl"
    records = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    rows = []
    for record in records:
        random = " (random weights)" if record["weights"] == "random" else ""
        rows.append(
            (
                record["model"] + random,
                record["precision_name"],
                record["mesh"].rpartition("x")[2],
                str(record["batch"]),
                decimal(record["tps"], 1 if record["tps"] < 100 else 0),
                decimal(statistics.median(record["ceilings"]["reads"]) / 1e12, 2),
                decimal(record["ttft_ms"], 1) if record["batch"] == 1 else "",
            )
        )
    first = records[0]
    where = f"{first['timestamp'][:10]}, commit `{short_commit(first['commit'])}`"
    command = first["command"].replace("tilewright bench-cuda", "python -m bench bench-cuda")
    text = Table(_COLUMNS, tuple(rows)).markdown()
    return f"{text}\n\n{first['device']} ({where}), `{command}` and further rows.\n"
