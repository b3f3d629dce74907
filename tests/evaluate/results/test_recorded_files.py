"""Every committed result line parses, and recorded keys and trial ids do not change."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from tilewright.evaluate.report.comparisons import read_parts, read_rows
from tilewright.evaluate.results import keys
from tilewright.evaluate.results.record import KEYS
from tilewright.evaluate.results.result_file import dumps, loads
from tilewright.evaluate.sweep.journal import SweepJournal

RESULTS = Path(__file__).resolve().parents[3] / "results"
FILES = sorted(RESULTS.rglob("*.json*"))
TRIAL_IDS = {
    "smollm2-cpu-native/pareto": ("929b478f43b8", "a9fe1591f91b", "dbf5302f25df", "33e91f022571"),
    "smollm2-cpu/pareto": ("dc6cd68d94e8", "25f75f4643de", "46d644abd62d", "c4b70dee15ea"),
    "smollm2-cpu/search": ("dc6cd68d94e8", "c64988cae0dd", "6c05fb285e22", "784c26ea9ded"),
    "smollm2-cpu/sensitivity": ("dc6cd68d94e8", "e529adf15a46", "9d023c7d31b7", "41015ab97dad"),
    "smollm2-n300/pareto": ("8bd80ef6f23c", "0611e17a6304", "2b8b2a8611a5", "b20effa9a828"),
}
"""Ids of four recorded trials of each sweep: the first, and those at each quarter."""

RECORD_KEYS = {
    "Repeat": "decode_tsu prefill_tps tps ttft_first_ms ttft_last_ms ttft_median_ms ttft_ms",
    "Paired": "b base c p",
    "Accuracy": "hits kl_error kl_mean num_positions num_top1 num_top5 paired reference_id text "
    "top1_interval top5_interval",
    "ContractLine": "effective field layers requested status",
    "Ceilings": "device product_type products reads",
    "Drafts": "method num_accepted num_draft_tokens num_drafts precision",
    "Result": "accuracy batch cache_bytes calibration case ceilings command commit compute "
    "context contract decode_error decode_tsu device device_detail dp drafts effective_id heading "
    "host "
    "kind mesh model "
    "model_hash num_generated peak_memory_bytes precision_id precision_name prefill_tps "
    "prompt_length repeats resident_bytes sampling spread target timestamp tps ttft_error "
    "ttft_first_ms ttft_last_ms ttft_median_ms ttft_ms ttft_spread versions weights",
}
EVENT_KEYS = {
    "CELL": "calibration case compute device heading is_kept kind model model_hash model_name part "
    "precision "
    "precision_id round speculative step_bytes target text threads weight_bytes",
    "PLANNED": "base commit options plan timestamp version versions",
    "ADDED": "cell",
    "STARTED": "cell timestamp",
    "FINISHED": "cell outcome reason result seconds",
    "COMMANDS": "cell what",
}


def has_all(found: Any, wanted: Any) -> bool:
    """Return whether all wanted keys have their values. Fields added later may be extra."""
    if isinstance(wanted, dict):
        return all(has_all(found[key], value) for key, value in wanted.items())
    if isinstance(wanted, list):
        return len(found) == len(wanted) and all(map(has_all, found, wanted))
    return bool(found == wanted)


def first_of(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(path.read_text("utf-8").partition("\n")[0])
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(RESULTS)))
def test_committed_file_parses(path: Path) -> None:
    lines = path.read_text("utf-8").splitlines()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if path.suffix == ".json":
            assert read_parts(path)
        elif "event" in first_of(path):
            assert SweepJournal.open(path).state.cells
        elif "schema" in first_of(path):
            for line in lines:
                assert has_all(json.loads(dumps(loads(line))), json.loads(line))
        else:
            assert len(read_rows(path, "")) == len(lines)


@pytest.mark.parametrize("name", TRIAL_IDS)
def test_recorded_trial_ids_are_unchanged(name: str) -> None:
    found = list(SweepJournal.open(RESULTS / f"{name}.jsonl").state.cells)
    assert tuple(found[quarter * len(found) // 4] for quarter in range(4)) == TRIAL_IDS[name]


def test_record_keys_are_unchanged() -> None:
    found = {kind.__name__: " ".join(sorted(table.values())) for kind, table in KEYS.items()}
    assert found == RECORD_KEYS
    tables = {name: " ".join(sorted(getattr(keys, name).values())) for name in EVENT_KEYS}
    assert tables == EVENT_KEYS
