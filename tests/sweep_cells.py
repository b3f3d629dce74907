"""Cells, results and journals of sweeps that were never run, for the tests."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tilewright.evaluate.results.record import Accuracy, Repeat, Result, medians, pack_hits
from tilewright.evaluate.results.result_file import dumps
from tilewright.evaluate.sweep.journal import VERSION, Planned, SweepJournal, TrialFinished
from tilewright.evaluate.sweep.trial import Trial

HEADING = "precision_cfg = {ff1_3: bfp8}, fidelity_cfg = {li_ff1_3: hifi2}"
NUM_POSITIONS = 16


def cell(precision: str = "a", **changes: Any) -> Trial:
    """A speed cell of configuration ``precision``."""
    fields: dict[str, Any] = {
        "model": "smollm2",
        "model_name": "Tiny",
        "model_hash": "hash",
        "target": "cpu",
        "device": "CPU",
        "precision": precision,
        "precision_id": f"id-{precision}",
        "heading": HEADING,
        "case": "performance-ci-1",
        "kind": "speed",
        "weight_bytes": 1000,
    }
    return Trial(**{**fields, **changes})


def accuracy_cell(precision: str = "a", **changes: Any) -> Trial:
    """An accuracy cell of configuration ``precision``."""
    return cell(precision, **{"case": "performance-top-1", "kind": "accuracy", **changes})


def planned(plan: str = "grid", *, base: str | None = "id-a") -> Planned:
    """A header."""
    return Planned(
        version=VERSION,
        plan=plan,
        options={},
        base=base,
        timestamp="2026-01-02T03:04:05+00:00",
        commit=None,
        versions={"python": "3.11"},
    )


def result(of: Trial, **changes: Any) -> Result:
    """A record of a cell: without changes neither speed nor accuracy."""
    fields: dict[str, Any] = {
        "case": of.case,
        "model": of.model_name,
        "weights": "checkpoint",
        "model_hash": of.model_hash,
        "device": of.device,
        "device_detail": "a processor",
        "target": of.target,
        "batch": 1,
        "prompt_length": 512 if of.kind == "accuracy" else 128,
        "num_generated": 1 if of.kind == "accuracy" else 200,
        "context": 1024,
        "precision_name": "heading",
        "precision_id": of.precision_id,
        "heading": of.heading,
        "effective_id": f"effective-{of.precision}",
        "resident_bytes": of.weight_bytes,
        "timestamp": "2026-01-02T03:04:05+00:00",
    }
    return Result(**{**fields, **changes})


def speed_result(of: Trial, speeds: Sequence[float], **changes: Any) -> Result:
    """With one repeat for each speed."""
    repeats = tuple(Repeat(ttft_ms=100.0, decode_tsu=speed, tps=speed) for speed in speeds)
    return result(of, repeats=repeats, **medians(repeats), **changes)


def accuracy_result(of: Trial, hits: Sequence[bool], kl: float = 0.01, **changes: Any) -> Result:
    """With these positions right."""
    accuracy = Accuracy.from_counts(
        "reference",
        num_positions=len(hits),
        num_top1=sum(hits),
        num_top5=len(hits),
        kl_mean=kl,
        kl_error=kl / 10,
        hits=pack_hits(list(hits)),
    )
    return result(of, accuracy=accuracy, **changes)


def hits(num_wrong: int, num_positions: int = NUM_POSITIONS) -> list[bool]:
    """The first ``num_wrong`` positions wrong."""
    return [index >= num_wrong for index in range(num_positions)]


def done(of: Trial, found: Result, seconds: float = 1.0) -> TrialFinished:
    """The end of a cell that went well."""
    values = json.loads(dumps(found))
    return TrialFinished(cell=of.id, outcome="done", seconds=seconds, result=values)


def failed(of: Trial, reason: str = "exit code 1: why") -> TrialFinished:
    """The end of a cell that did not."""
    return TrialFinished(cell=of.id, outcome="failed", seconds=1.0, reason=reason)


def journal(path: Path, results: Sequence[tuple[Trial, Result]], **header: Any) -> SweepJournal:
    """A sweep of these cells, all done."""
    found = SweepJournal.create(path, planned(**header), [of for of, _ in results])
    found.append(*(done(of, each) for of, each in results))
    return found


def renamed(found: Result, **changes: Any) -> Result:
    """A record with other fields."""
    return dataclasses.replace(found, **changes)
