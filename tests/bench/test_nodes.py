"""Rows and output of bench-nodes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import nodes

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

    monkeypatch.setattr(nodes, "_output", output)
    kept = tmp_path / "rows.jsonl"
    asked = ["--model", "m_q40.m", "--nodes", "1", "2", "--wires", "q80", "bf16"]
    assert nodes.main([*asked, "--repeats", "2", "--results", str(kept)]) == 0
    rows = [json.loads(line) for line in kept.read_text().splitlines()]
    assert [row["wire"] for row in rows] == ["", "q80", "bf16"] * 2
    names = ("prompt_rate", "decode_rate", "sent_kb", "exchange_ms")
    assert [rows[1][name] for name in names] == [200, 40, 69.9, 1.85]
    assert [rows[0][name] for name in names] == [200, 40, 0, 0]
    assert "--buffer-float-type q80 --nodes 2" in rows[1]["command"] and rows[1]["commit"]
    assert {row["link"] for row in rows} == {"free"}
    assert len(said) == 6 and capsys.readouterr().out.count("\n") == 7
