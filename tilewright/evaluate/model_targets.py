"""The file ``model_targets.yaml`` of tt-metal, version 1: targets by model and board.

Imported numbers are CI targets, not measurements. Exported entries have the status TODO.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.compiler.precision import normalise_model_name
from tilewright.compiler.precision.fragment import check_keys
from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.board_comparison import BoardCandidate
from tilewright.utils.plain_yaml import parse_yaml, read_text

VERSION = "1"
SKUS = {
    **{"wh_n150": "n150", "wh_n300": "n300", "wh_llmbox_perf": "t3k", "wh_galaxy_perf": "tg"},
    **{"bh_p100": "p100", "bh_p150": "p150", "bh_p300": "p300", "bh_quietbox_2": "qb2"},
    "p300x2": "qb2",
    **{"bh_loudbox": "loudbox", "bh_galaxy": "bh-galaxy", "bh_galaxy_perf": "bh-galaxy"},
}
_TOLERANCE = 0.15
_METRICS = ("decode_t/s/u", "prefill_time_to_first_token")
_IGNORED_METRICS = ("decode_t/s", "prefill_t/s")
_ACCURACY = ("top1", "top5")
_STATUS = ("active", "TODO")


def _tolerance_key(metric: str) -> str:
    """Return the key of a metric's own tolerance: ``decode_t_s_u_tolerance``."""
    return f"{metric.replace('/', '_')}_tolerance"


_PERF = (
    *_METRICS,
    *_IGNORED_METRICS,
    "tolerance",
    *(_tolerance_key(metric) for metric in (*_METRICS, *_IGNORED_METRICS)),
)


@dataclass(frozen=True, slots=True)
class ModelTarget:
    """A CI target: decode t/s/u and milliseconds to the first token, with tolerances, and accuracy.

    Attributes:
        users: Batch size. None: not in the file.
        length: Prompt tokens. None: not in the file.
        tolerance: Allowed deviation of decode, as a share.
        ttft_tolerance: Allowed deviation of the first token, as a share.
        top1, top5: Accuracy in percent. None: not in the file.
    """

    model: str
    board: str
    users: int | None
    length: int | None
    tsu: float | None
    ttft_ms: float | None
    tolerance: float
    ttft_tolerance: float
    top1: float | None
    top5: float | None


def read_targets(path: Path, model: str) -> list[ModelTarget]:
    """Read the active entries of a model. Names and aliases are compared in canonical form.

    Raises:
        ConfigError: for another version, an unknown model, board, status or metric, or an entry
            that is no map.
    """
    where = str(path)
    raw = parse_yaml(read_text(path, source=where), where)
    if not isinstance(raw, Mapping) or str(raw.get("version")) != VERSION:
        version = raw.get("version", "missing") if isinstance(raw, Mapping) else "missing"
        raise ConfigError(f"{where}: version {version!s:.40}; allowed: {VERSION}")
    wanted, names, matches = normalise_model_name(model), [], []
    for name, body in _map(raw.get("targets"), where).items():
        entry = _map(body, where)
        aliases = entry.get("aliases", ())
        known = (name, *(str(alias) for alias in aliases if isinstance(aliases, list)))
        names.append(name)
        targets = _targets(name, _map(entry.get("skus"), f"{where}: {name}"), where)
        if wanted in map(normalise_model_name, known):
            matches.append(targets)
    if not matches:
        raise ConfigError(f"{where}: no model {model!r}; {allowed(names, wanted)}")
    return [target for targets in matches for target in targets]


def _targets(model: str, skus: Mapping[str, Any], where: str) -> list[ModelTarget]:
    """Return a model's active entries with a speed or an accuracy."""
    result = []
    for sku, entry in skus.items():
        location = f"{where}: {model}: {sku}"
        if sku not in SKUS:
            raise ConfigError(f"{location}: unknown board; {allowed(SKUS, sku)}")
        entries = _map(entry, location).get("entries")
        if not isinstance(entries, list):
            raise ConfigError(f"{location}: no entries; allowed: a list of maps")
        parsed = (_target(model, sku, _map(item, location), location) for item in entries)
        result += [target for target in parsed if target is not None]
    return result


def _target(model: str, sku: str, entry: Mapping[str, Any], where: str) -> ModelTarget | None:
    if (status := entry.get("status")) not in _STATUS:
        raise ConfigError(f"{where}: status {status!s:.40}; {allowed(_STATUS)}")
    perf = _map(entry.get("perf", {}), where)
    check_keys(perf, _PERF, where=f"{where}: perf")
    numbers = {name: _number(perf, name, where) for name in _PERF}
    users, length = (_count(entry, name, where) for name in ("batch_size", "seq_len"))
    tsu, ttft = (numbers[name] for name in _METRICS)
    top1, top5 = _accuracy(entry, where)
    if status != "active" or all(value is None for value in (tsu, ttft, top1, top5)):
        return None
    shared = numbers["tolerance"] or _TOLERANCE
    tolerance, ttft_tolerance = (numbers[_tolerance_key(name)] or shared for name in _METRICS)
    speeds = tsu, ttft, tolerance, ttft_tolerance
    return ModelTarget(model, SKUS[sku], users, length, *speeds, top1, top5)


def _accuracy(entry: Mapping[str, Any], where: str) -> tuple[float | None, float | None]:
    """Return top-1 and top-5 in percent."""
    accuracy = _map(entry.get("accuracy", {}), where)
    check_keys(accuracy, _ACCURACY, where=f"{where}: accuracy")
    top1, top5 = (_number(accuracy, name, where) for name in _ACCURACY)
    for name, value in zip(_ACCURACY, (top1, top5), strict=True):
        if value is not None and value > 100:
            raise ConfigError(f"{where}: {name}: {value:g}; allowed: percent, up to 100")
    return top1, top5


def _accuracy_lines(candidate: BoardCandidate) -> list[str]:
    """Return the emulated accuracy in percent. An estimate from a shallow copy is left out."""
    result = candidate.accuracy
    if result is None or result.is_estimate:
        return []
    values = zip(_ACCURACY, (result.top1, result.top5), strict=True)
    return [
        "            accuracy:",
        *(f"              {name}: {100 * value:.1f}" for name, value in values),
    ]


def _map(raw: object, where: str) -> Mapping[str, Any]:
    if not isinstance(raw, Mapping):
        raise ConfigError(f"{where}: not a map; allowed: the schema of version {VERSION}")
    return raw


def _number(entry: Mapping[str, Any], name: str, where: str) -> float | None:
    raw = entry.get(name)
    if raw is None or raw == "null":
        return None
    try:
        value = float(str(raw))
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        shown = str(raw)[:40]
        raise ConfigError(f"{where}: {name}: {shown!r} is no number; allowed: a number above 0")
    return value


def _count(entry: Mapping[str, Any], name: str, where: str) -> int | None:
    value = _number(entry, name, where)
    if value is not None and value != int(value):
        raise ConfigError(f"{where}: {name}: {value}; allowed: a whole number above 0")
    return None if value is None else int(value)


def targets_text(model: str, rows: Sequence[BoardCandidate], *, users: int, prompt: int) -> str:
    """Return a file's text with a plan's predictions. ``prompt``: prompt tokens."""
    ttft_key = _tolerance_key(_METRICS[1])
    sku_of = {board: sku for sku, board in reversed(SKUS.items())}
    lines = [
        f"version: {VERSION}",
        "description: by tilewright plan, speed predicted, accuracy emulated on a single chip",
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
            f"            seq_len: {prompt}",
            "            status: TODO",
            "            perf:",
            f"              decode_t/s/u: {candidate.tsu:.2f}",
            f"              prefill_time_to_first_token: {candidate.ttft_ms:.1f}",
            f"              tolerance: {candidate.tsu_error or _TOLERANCE:.3f}",
            f"              {ttft_key}: {candidate.ttft_error or _TOLERANCE:.3f}",
            *_accuracy_lines(candidate),
            f"            note: {candidate.precision}, predicted",
        ]
    return "\n".join(lines) + "\n"
