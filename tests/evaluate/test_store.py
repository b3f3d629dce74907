"""The store: results and sweeps are read alike, and selected by fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.errors import ConfigError
from tilewright.evaluate.store import read_store, select

RESULTS = Path(__file__).resolve().parents[2] / "results"
SWEEP = RESULTS / "smollm2-cpu-native" / "pareto.jsonl"


def test_store_reads_results_and_sweeps_alike() -> None:
    cpu, swept = read_store(RESULTS / "cpu.jsonl"), read_store(SWEEP)
    assert len(swept) == 60 and {result.target for result in swept} == {"cpu-native"}
    assert {"bf16", "all-q80"} <= {result.precision_name for result in swept}
    assert read_store(RESULTS / "cpu.jsonl", SWEEP) == [*cpu, *swept]


def test_a_selection_meets_all_conditions() -> None:
    swept, both = read_store(SWEEP), read_store(RESULTS / "cpu.jsonl", SWEEP)
    allowed = {"precision_name": ("bf16", "all-q80"), "device": ("CPU native",)}
    found = select(both, kind=("measured",), **allowed)
    assert {result.precision_name for result in found} == {"bf16", "all-q80"}
    assert {result.device for result in found} == {"CPU native"}
    assert select(swept, model=("another",)) == []
    assert select(swept) == select(swept, model=()) == swept


def test_store_names_the_line_of_another_record(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"users": 1}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: not a result: "):
        read_store(path)
    with pytest.raises(ConfigError, match=r"none\.jsonl: "):
        read_store(tmp_path / "none.jsonl")
