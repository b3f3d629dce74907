"""The store: results and sweeps are read alike, and a query selects."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.errors import ConfigError
from tilewright.evaluate.store import Query, read_store

RESULTS = Path(__file__).resolve().parents[2] / "results"
SWEEP = RESULTS / "smollm2-cpu-native" / "pareto.jsonl"


def test_store_reads_results_and_sweeps_alike() -> None:
    cpu, swept = read_store(RESULTS / "cpu.jsonl"), read_store(SWEEP)
    assert len(swept) == 60 and {result.target for result in swept} == {"cpu-native"}
    assert {"bf16", "all-q80"} <= {result.precision_name for result in swept}
    assert read_store(RESULTS / "cpu.jsonl", SWEEP) == [*cpu, *swept]


def test_query_selects_results_that_meet_all_conditions() -> None:
    query = Query(precisions=("bf16", "all-q80"), devices=("CPU native",), kinds=("measured",))
    swept = read_store(SWEEP)
    found = query.select(read_store(RESULTS / "cpu.jsonl", SWEEP))
    assert {result.precision_name for result in found} == {"bf16", "all-q80"}
    assert {result.device for result in found} == {"CPU native"}
    assert Query(models=("another",)).select(swept) == []
    assert Query().select(swept) == swept


def test_store_names_the_line_of_another_record(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"users": 1}\n')
    with pytest.raises(ConfigError, match=r"rows\.jsonl:1: not a result: "):
        read_store(path)
    with pytest.raises(ConfigError, match=r"none\.jsonl: "):
        read_store(tmp_path / "none.jsonl")
