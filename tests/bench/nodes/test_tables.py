"""What bench-nodes prints and keeps, and the table that documents make of its rows."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench.blocks import rendered
from bench.nodes import command
from bench.nodes.tables import Run
from tilewright.errors import ConfigError

ROOT = Path(__file__).parents[3]
COMMIT = "abc" * 9
FACTS = {"commit": COMMIT, "date": "2026-01-01T1", "host": "H"}
TEXT = "a\n<!-- nodes:begin cpu -->\nold\n<!-- nodes:end cpu -->\nb\n"
SAID = """text
Evaluation
   nBatches: 512
    nTokens: 63
   tokens/s: 200.00 (5.00 ms/tok)
Prediction
    nTokens: 97
   tokens/s: 40.00 (25.00 ms/tok)
Exchange
       sent: 69.9 kB/tok
       time: 1.85 ms/tok
"""


def test_kinds_are_run_in_turn_and_every_run_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[list[str]] = []

    def output(words: list[str], token: dict[str, str]) -> str:
        said.append(words)
        return SAID if "--buffer-float-type" in words else SAID.partition("Exchange")[0]

    monkeypatch.setattr(command, "_output", output)
    kept = tmp_path / "rows.jsonl"
    asked = ["--model", "m_q40.m", "--nodes", "1", "2", "--wires", "q80", "bf16"]
    assert command.main([*asked, "--repeats", "2", "--results", str(kept)]) == 0
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [row["wire"] for row in rows] == ["", "q80", "bf16"] * 2
    names = ("prompt_rate", "decode_rate", "sent_kb", "exchange_ms")
    assert [rows[1][name] for name in names] == [200, 40, 69.9, 1.85]
    assert [rows[0][name] for name in names] == [200, 40, 0, 0]
    assert "--buffer-float-type q80 --nodes 2" in rows[1]["command"] and rows[1]["commit"]
    assert all(0 <= row["others"] <= 1 for row in rows)
    assert len(said) == 6 and capsys.readouterr().out.count("\n") == 7


def _kept(results: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    kept = results / "parallel" / "cpu.jsonl"
    kept.parent.mkdir()
    kept.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return kept


def test_the_table_has_medians_and_the_spread_of_decode(tmp_path: Path) -> None:
    first = Run("dllama_model_8b_q40", 4, 1, "1", "q80", 9.0, 2.0, 421.4, 80.0, 64, "", 0.02)
    rows = [first, replace(first, decode_rate=3.0), replace(first, decode_rate=7.0)]
    rows.append(replace(first, nodes=1, link="free", wire="", sent_kb=0.0, exchange_ms=0.0))
    rows.append(replace(first, link="1+100us"))
    rows.append(replace(first, decode_rate=1.0, others=0.1))
    with pytest.raises(ConfigError, match="is missing"):
        rendered(TEXT, tmp_path)
    kept = _kept(tmp_path, [{**asdict(row), **FACTS} for row in rows])
    found = rendered(TEXT, tmp_path)
    lines = [" ".join(line.split()) for line in found.splitlines()]
    four = "| 8b q40 | 4 x 1 | 1 Gbit/s | q80 | 9 | 3.0 (2.0 to 7.0) | 421 kB | 80.0 ms | 3 |"
    later = "| 8b q40 | 4 x 1 | 1 Gbit/s + 100 us | q80 | 9 | 2.0 | 421 kB | 80.0 ms | 1 |"
    alone = "| 8b q40 | 1 x 1 | free | | 9 | 2.0 | | | 1 |"
    assert four in lines and later in lines and alone in lines
    assert "commit abcabcabca; 1 runs in which others took 10 % of" in found and "old" not in found
    assert rendered(found, tmp_path) == found
    with kept.open("a") as more:
        more.write(json.dumps({**asdict(replace(first, decode_rate=9.0)), **FACTS, "host": "I"}))
    found = " ".join(rendered(TEXT, tmp_path).split())
    assert four + " H |" in found and "| 9.0 | 421 kB | 80.0 ms | 1 | I |" in found


def test_runs_that_sent_more_have_a_row_of_their_own(tmp_path: Path) -> None:
    first = Run("dllama_model_8b_q40", 4, 1, "1", "q80", 9.0, 5.0, 837.1, 80.0, 64, "", 0.02)
    fewer = replace(first, sent_kb=420.9, decode_rate=2.0, exchange_ms=90.0)
    rows = [first, replace(first, wire="bf16"), fewer, replace(first, decode_rate=6.0)]
    dirty = {**asdict(replace(fewer, decode_rate=4.0)), **FACTS, "commit": COMMIT + "-dirty"}
    _kept(tmp_path, [*({**asdict(row), **FACTS} for row in rows), dirty])
    lines = [" ".join(line.split()) for line in rendered(TEXT, tmp_path).splitlines()]
    assert lines[5:11] == [
        "| 8b q40 | 4 x 1 | 1 Gbit/s | q80 | 9 | 3.0 (2.0 to 4.0) | 421 kB | 90.0 ms | 2 |",
        "| 8b q40 | 4 x 1 | 1 Gbit/s | q80 | 9 | 5.5 (5.0 to 6.0) | 837 kB | 80.0 ms | 2 |",
        "| 8b q40 | 4 x 1 | 1 Gbit/s | bf16 | 9 | 5.0 | 837 kB | 80.0 ms | 1 |",
        "",
        "Medians (lowest to highest) of runs that sent the same; H; 2026-01-01; commit abcabcabca, "
        "abcabcabca-dirty; 0 runs in which others took 10 % of the cores or more are left out.",
        "",
    ]


def test_the_document_s_table_is_its_rows() -> None:
    text = (ROOT / "docs/parallel.md").read_text("utf-8")
    assert "nodes:begin nodes -->" in text and rendered(text, ROOT / "results") == text
