"""The file ``model_targets.yaml`` of tt-metal, version 1: targets by model and board.

Imported numbers are CI targets, not measurements. Exported entries have the status TODO.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.board_comparison import BoardCandidate
from tilewright.utils.plain_yaml import parse_yaml

VERSION = "1"
SKUS = {
    **{"wh_n150": "n150", "wh_n300": "n300", "wh_llmbox_perf": "t3k", "wh_galaxy_perf": "tg"},
    **{"bh_p100": "p100", "bh_p150": "p150", "bh_p300": "p300", "bh_quietbox_2": "qb2"},
    **{"bh_loudbox": "loudbox", "bh_galaxy": "bh-galaxy", "bh_galaxy_perf": "bh-galaxy"},
}
_TOLERANCE = 0.15
_METRICS = ("decode_t/s/u", "prefill_time_to_first_token")


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """A CI target: decode t/s/u and milliseconds to the first token, with a tolerance."""

    model: str
    board: str
    users: int
    tsu: float | None
    ttft_ms: float | None
    tolerance: float


def read_targets(path: Path) -> list[ModelTarget]:
    """Read a file's active entries.

    Raises:
        ConfigError: for another version, an unknown board, or an entry that is no map.
    """
    try:
        raw = parse_yaml(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not read: {error}; allowed: a YAML file") from None
    where = str(path)
    if not isinstance(raw, Mapping) or str(raw.get("version")) != VERSION:
        result = raw.get("version") if isinstance(raw, Mapping) else None
        raise ConfigError(f"{where}: version {result!s:.40}; allowed: {VERSION}")
    rows = []
    for model, body in _map(raw.get("targets"), where).items():
        for sku, entry in _map(_map(body, where).get("skus"), f"{where}: {model}").items():
            location = f"{where}: {model}: {sku}"
            if sku not in SKUS:
                raise ConfigError(f"{location}: unknown board; {allowed(SKUS, sku)}")
            entries = _map(entry, location).get("entries")
            if not isinstance(entries, list):
                raise ConfigError(f"{location}: no entries; allowed: a list of maps")
            rows += [
                result
                for item in entries
                if (result := _target(model, sku, _map(item, location), location))
            ]
    return rows


def _target(model: str, sku: str, entry: Mapping[str, Any], where: str) -> ModelTarget | None:
    if entry.get("status") != "active" or "perf" not in entry:
        return None
    perf = _map(entry["perf"], where)
    numbers = {name: _number(perf.get(name), where) for name in (*_METRICS, "tolerance")}
    users = _number(entry.get("batch_size"), where) or 1
    tsu, ttft = (numbers[name] for name in _METRICS)
    return ModelTarget(model, SKUS[sku], int(users), tsu, ttft, numbers["tolerance"] or _TOLERANCE)


def _map(raw: object, where: str) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: not a map; allowed: the schema of version {VERSION}")
    return raw


def _number(raw: object, where: str) -> float | None:
    if raw is None or raw == "null":
        return None
    try:
        return float(str(raw))
    except ValueError:
        raise ConfigError(f"{where}: {str(raw)[:40]!r} is no number; allowed: a number") from None


def targets_text(model: str, rows: Sequence[BoardCandidate], *, users: int, context: int) -> str:
    """Return a file's text with a plan's predictions."""
    sku_of = {board: sku for sku, board in reversed(SKUS.items())}
    lines = [
        f"version: {VERSION}",
        "description: predicted by tilewright plan, not measured",
        "targets:",
        f"  {model}:",
        "    aliases: []",
        "    skus:",
    ]
    done = set()
    for candidate in (item for item in rows if not item.refused):
        if candidate.board in done:
            continue
        done.add(candidate.board)
        lines += [
            f"      {sku_of[candidate.board]}:",
            "        entries:",
            f"          - batch_size: {users}",
            f"            seq_len: {context}",
            "            status: TODO",
            "            perf:",
            f"              decode_t/s/u: {candidate.tsu:.2f}",
            f"              prefill_time_to_first_token: {candidate.ttft_ms:.1f}",
            f"              tolerance: {candidate.tsu_error or _TOLERANCE:.3f}",
            f"            note: {candidate.precision}, predicted",
        ]
    return "\n".join(lines) + "\n"
