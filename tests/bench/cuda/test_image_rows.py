"""``python -m bench images`` on the CPU: its rows, records, table, and tiny shapes with towers."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from bench.cuda import images
from bench.cuda.images import PROGRAMS, main
from bench.cuda.rows import BenchRow
from bench.perf import render_document
from tilewright.errors import TilewrightError
from tilewright.evaluate.measure import ceilings
from tilewright.evaluate.results.record import Ceilings
from tilewright.evaluate.results.result_file import read
from tilewright.models import load_model

BLOCK = "<!-- images:begin x -->\n\n<!-- images:end x -->"


def test_rows_and_records_of_a_tiny_shape(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rates = Ceilings("made up", (1e9,), (1e12,), "fp32")
    monkeypatch.setattr(ceilings, "measure_ceilings", lambda target: rates)
    monkeypatch.setattr(images, "_GENERATED", 4)
    monkeypatch.setattr(images, "BenchRow", partial(BenchRow, num_generated=4))
    assert "No results yet." in render_document(BLOCK, tmp_path)
    rows, records = tmp_path / "images" / "x.jsonl", tmp_path / "text.jsonl"
    rows.parent.mkdir()
    words = ["--rows", "tiny", "--target", "reference", "--sides", "28", "56", "--users", "1", "2"]
    words += ["--repeats", "1", "--results", str(rows), "--records", str(records)]
    assert main(words) == 0
    found = [json.loads(line) for line in rows.read_text().splitlines()]
    cases = [(row["users"], row["side"], row["image_rows"]) for row in found]
    assert cases == [(1, 28, 5), (1, 56, 20), (2, 28, 5)]
    for row in found:
        assert row["model"] == "Tiny-Vision" and row["prompt"] == 128
        for name in ("prepare_ms", "tower_ms", "ttft_ms", "decode_tsu"):
            assert len(row[name]) == 1 and row[name][0] > 0
    assert [record.batch for record in read(records)] == [1, 2]
    assert {record.command for record in read(records)} == {"python -m bench images --rows tiny"}
    made = render_document(BLOCK, tmp_path)
    assert "| Tiny-Vision (random weights) |" in made and "56 x 56, 20 rows" in made
    assert "Tower (ms)" in capsys.readouterr().out


def test_the_tower_is_measured_without_generation(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    words = ["--rows", "tiny-hybrid", "--target", "reference", "--sides", "64", "--tower"]
    assert main([*words, "--repeats", "1", "--results", str(rows)]) == 0
    (row,) = [json.loads(line) for line in rows.read_text().splitlines()]
    assert row["image_tokens"] == 64 and row["tower_ms"][0] > 0 and "ttft_ms" not in row
    assert row["command"] == "python -m bench images --rows tiny-hybrid --tower"


def test_an_unknown_row_is_refused() -> None:
    with pytest.raises(TilewrightError, match=r"--rows 'x'; .*11b-performance"):
        main(["--rows", "x"])


@pytest.mark.parametrize(
    ("name", "count"),
    [("11b-performance", 10_670_220_835), ("90b-performance", 88_593_355_323)],
)
def test_shapes_with_towers_have_all_published_weights(name: str, count: int) -> None:
    model = load_model(f"shape:{PROGRAMS[name][0]}")
    assert sum(meta.nbytes for meta in model.checkpoint.names.values()) == 2 * count
