"""Sweeps as files, made of figures that a test chooses: nothing is run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tilewright.evaluate.results.record import Accuracy, Repeat, Result, medians, pack_hits
from tilewright.evaluate.sweep.journal import (
    VERSION,
    Event,
    Planned,
    SweepJournal,
    TrialFinished,
    TrialStarted,
)
from tilewright.evaluate.sweep.trial import Trial

NUM_POSITIONS = 512
NUM_ROUNDS = 3
PUBLISHED = (
    *(f"mlp-{up}-{down}" for up in ("bfp4", "bfp8", "bf16") for down in ("bfp4", "bfp8", "bf16")),
    *(f"wo-bfp4-activation-{activation}" for activation in ("bf16", "bfp8", "mixed")),
)


def cells(name: str, **changes: Any) -> list[Trial]:
    """The cells of one configuration: its accuracy, then three rounds of its speed."""
    fields: dict[str, Any] = {
        "model": "smollm2",
        "model_name": "SmolLM2-135M-Instruct",
        "model_hash": "h1",
        "target": "cpu",
        "device": "CPU",
        "precision": name,
        "precision_id": f"id-{name}",
        "heading": f"precision_cfg = {{ff1_3: {name}}}, fidelity_cfg = {{}}",
        "case": "performance-ci-1",
        "kind": "speed",
        "weight_bytes": 135_000_000,
    }
    speed = Trial(**{**fields, **changes})
    accuracy = replace(speed, kind="accuracy", case="performance-top-1")
    return [accuracy, *(replace(speed, round=number) for number in range(NUM_ROUNDS))]


def planned(base: str = "id-mlp-bf16-bf16") -> Planned:
    """A header."""
    return Planned(
        version=VERSION,
        plan="pareto",
        options={},
        base=base,
        timestamp="2026-01-01T00:00:00+00:00",
        commit=None,
        versions={},
    )


def create(path: Path, names: Sequence[str] = PUBLISHED) -> SweepJournal:
    """A sweep in which nothing has begun: all accuracies, then the rounds."""
    found = [cell for name in names for cell in cells(name)]
    return SweepJournal.create(path, planned(), sorted(found, key=lambda c: (c.kind, c.round)))


def result(cell: Trial, *, num_top1: int = 470, speed: float = 100.0, **changes: Any) -> Result:
    """What a run of a cell might have measured; the first ``num_top1`` positions were right."""
    hits = [number < num_top1 for number in range(NUM_POSITIONS)]
    accuracy = Accuracy.from_counts(
        "ref",
        num_positions=NUM_POSITIONS,
        num_top1=num_top1,
        num_top5=NUM_POSITIONS,
        kl_mean=0.0123,
        hits=pack_hits(hits),
    )
    repeats = [Repeat(ttft_ms=81.25, decode_tsu=speed * factor) for factor in (0.99, 1.0, 1.01)]
    is_timed = cell.kind == "speed"
    fields: dict[str, Any] = {
        "case": cell.case,
        "model": cell.model_name,
        "weights": "checkpoint",
        "model_hash": cell.model_hash,
        "device": cell.device,
        "device_detail": "a processor",
        "target": cell.target,
        "batch": 1,
        "prompt_length": 128,
        "num_generated": 200,
        "context": 328,
        "precision_name": cell.precision,
        "precision_id": cell.precision_id,
        "heading": cell.heading,
        "effective_id": f"effective-{cell.precision_id}",
        "resident_bytes": 90_400_000,
        "repeats": tuple(repeats) if is_timed else (),
        "accuracy": None if is_timed else accuracy,
        "timestamp": f"2026-01-01T00:0{cell.round}:00+00:00",
        **(medians(repeats) if is_timed else {}),
    }
    return Result(**{**fields, **changes})


def start(cell: Trial, minute: int = 0) -> TrialStarted:
    """It was started then."""
    return TrialStarted(cell.id, f"2026-01-01T00:{minute:02}:00.000000+00:00")


def done(cell: Trial, **figures: Any) -> list[Event]:
    """It was started and is done."""
    values = result(cell, **figures).to_dict()
    return [start(cell), TrialFinished(cell=cell.id, outcome="done", seconds=12.5, result=values)]


def failed(cell: Trial, reason: str = "it crashed", *, outcome: Any = "failed") -> list[Event]:
    """It was started and has ended otherwise."""
    return [start(cell), TrialFinished(cell=cell.id, outcome=outcome, seconds=3.25, reason=reason)]


def finish(journal: SweepJournal, name: str, **figures: Any) -> None:
    """All cells of a configuration are done."""
    journal.append(*(event for cell in cells(name) for event in done(cell, **figures)))


def twelve(path: Path) -> SweepJournal:
    """The twelve settings: nine are done, one has failed in part, two have not begun."""
    journal = create(path)
    for index, name in enumerate(PUBLISHED[:9]):
        finish(journal, name, num_top1=420 + 10 * index, speed=150.5 - 6 * index)
    accuracy, first, second, _ = cells(PUBLISHED[9])
    journal.append(*done(accuracy), *failed(first, "out of luck"), start(second))
    return journal


FOUR = ("mlp-bf16-bf16", "mlp-bfp8-bfp8", "mlp-bfp4-bfp4", "wo-bfp4-activation-mixed")


def four(path: Path) -> SweepJournal:
    """The base done, the second faster, less accurate and done, the third half done and failed."""
    journal = create(path, FOUR)
    finish(journal, FOUR[0], num_top1=500, speed=80.0)
    finish(journal, FOUR[1], num_top1=470, speed=120.0)
    third = cells(FOUR[2])
    events = [*done(third[0], num_top1=300), *done(third[1], speed=90.0)]
    journal.append(*events, *failed(third[2], "exit code 7\x1b[31m red"), start(third[3]))
    return journal
