"""Measurement of drafts, on the null target."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.cuda import drafts
from bench.cuda.draft_costs import costs_table
from bench.perf import render_document
from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.null import NullExecutable

BLOCK = "<!-- drafts:begin x -->\n\n<!-- drafts:end x -->"


def test_speculative_writes_costs_and_gains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compiled(options: Any) -> Any:
        sizes = CompileOptions(max_batch=2, max_context=1024)
        return SimpleNamespace(executable=NullExecutable(300, sizes, NumericContract((), ())))

    monkeypatch.setattr(drafts, "_compile", compiled)
    assert "No results yet." in render_document(BLOCK, tmp_path)
    results = tmp_path / "speculative" / "x.jsonl"
    results.parent.mkdir()
    words = ["--users", "1", "2", "--rows", "2", "4", "--rates", "0", "1", "--tokens", "24"]
    words += ["--auto-rates", "0", "1", "--auto-tokens", "40"]
    monkeypatch.setattr(drafts, "MIN_RATIO", 0.0)
    monkeypatch.setattr(drafts, "_byte_ratios", lambda compiled, counts: dict.fromkeys(counts, 2.0))
    assert drafts.main([*words, "--results", str(results)]) == 0
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    costs = [(row["users"], row["rows"]) for row in rows if row["figure"] == "cost"]
    assert costs == [(users, count) for users in (1, 2) for count in (1, 2, 4)]
    gains = {(row["rate"], row["drafts"]): row for row in rows if row["figure"] == "oracle"}
    assert [row["tokens_per_step"] for row in gains.values()] == [1.0, 1.0, 2.0, 4.0]
    assert [row["byte_bound"] for row in gains.values()] == [0.5, 0.5, 1.0, 2.0]
    assert not any(row["differing_tokens"] for row in gains.values())
    loads = [row for row in rows if row["figure"] == "auto"]
    assert [(row["users"], row["rate"]) for row in loads] == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(row["acceptance"] in (None, row["rate"]) for row in loads)
    assert "predicted gain, 3 drafts" in capsys.readouterr().out
    made = render_document(BLOCK, tmp_path)
    lines = [line for line in made.splitlines() if line.startswith("| shape:llama-3.1-8b")]
    assert [line.split()[5] for line in lines] == ["1", "2"]
    assert "Random weights. " in made


def test_the_predicted_gain_has_the_measured_cost() -> None:
    facts = {"model": "m", "precision": "bf16", "users": 1}
    costs = {1: (2.0, 1.0), 2: (2.5, 1.25), 4: (3.1, 1.55), 8: (5.0, 2.5)}
    records = [
        {**facts, "rows": rows, "ms": ms, "ratio": ratio} for rows, (ms, ratio) in costs.items()
    ]
    (line,) = costs_table(records).rows
    assert line == ("m", "bf16", "1", "2.000", "1.25", "1.55", "2.50", "1.44", "2.00")


def test_expected_tokens_follow_the_rate() -> None:
    assert drafts.expected_tokens(0.8, 3) == pytest.approx((1 - 0.8**4) / (1 - 0.8))
    assert drafts.expected_tokens(1.0, 7) == 8
