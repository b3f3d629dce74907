"""Measurements with images as Markdown, from the results of ``python -m bench images``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.evaluate.report.comparisons import median_and_range, read_rows
from tilewright.evaluate.report.display import short_commit
from tilewright.evaluate.report.table import Columns, Table
from tilewright.evaluate.results.record import RANDOM_WEIGHTS

Values = Mapping[str, Any]
"""A measurement by key."""


def _median(key: str) -> Any:
    """Return a column with the median, and the lowest and highest value."""

    def text(measured: Values) -> str:
        values = [value for value in measured.get(key) or () if value is not None]
        return median_and_range(values)

    return text


def _model(measured: Values) -> str:
    return (
        f"{measured['model']} {RANDOM_WEIGHTS}"
        if measured["weights"] == "random"
        else str(measured["model"])
    )


def _image(measured: Values) -> str:
    count = measured.get("image_rows") or measured.get("image_tokens")
    noun = "rows" if measured.get("image_rows") else "tokens"
    return f"{measured['side']} x {measured['side']}" + (f", {count:,} {noun}" if count else "")


COLUMNS: Columns[Values] = {
    "Model": _model,
    "Device": lambda measured: str(measured["device"]),
    "Engine": lambda measured: str(measured["engine"]),
    "Precision": lambda measured: str(measured["precision"]),
    "Users": lambda measured: str(measured["users"]),
    "Image (pixels)": _image,
    "Prepare (ms)": _median("prepare_ms"),
    "Tower (ms)": _median("tower_ms"),
    "First token (ms)": _median("ttft_ms"),
    "Speed (t/s/u)": _median("decode_tsu"),
}
_ORIGIN: Columns[Values] = {
    "Date": lambda measured: str(measured["date"])[:10],
    "Commit": lambda measured: short_commit(measured["commit"]),
    "Command": lambda measured: f"`{measured['command']}`",
}


def render_measurements(measurements: Sequence[Values]) -> str:
    """Return the results of a run as Markdown."""
    return Table.by(COLUMNS, measurements).markdown()


def render_images(results: Path, name: str) -> str:
    """Return ``results/images/NAME.jsonl`` as Markdown. The last result of a workload counts."""
    path = results / "images" / f"{name}.jsonl"
    if not path.exists():
        return "No results yet.\n"
    keys = ("model", "device", "engine", "precision", "users", "side")
    last = {tuple(result[key] for key in keys): result for result in read_rows(path, "images")}
    return Table.by({**COLUMNS, **_ORIGIN}, last.values()).markdown()
