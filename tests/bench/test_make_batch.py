"""The made data set: lengths within their ends, the same for a seed, and what prints of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.make_batch import OUTPUTS, PROMPTS, histogram, make_rows, token_rows
from tests.cli.conftest import Run
from tilewright.batch.inputs import open_data_set
from tilewright.batch.plain_rows import Asking


def test_rows_are_those_of_the_seed_and_lengths_stay_within_their_ends() -> None:
    rows = make_rows(500, seed=0)
    assert rows[:20] == make_rows(20, seed=0) != make_rows(20, seed=1)
    for text, num_prompt, num_output in rows:
        assert text and PROMPTS[0] <= num_prompt <= PROMPTS[1]
        assert OUTPUTS[0] <= num_output <= OUTPUTS[1]
    assert any("\u4e00" <= text[0] <= "\u9fff" for text, _, _ in rows), "several scripts"
    middle = sorted(num_output for _, _, num_output in rows)[250]
    assert 140 < middle < 210, "of a log-normal body"


def test_the_histogram_counts_every_row_twice() -> None:
    lines = histogram(make_rows(300, seed=0))
    counts = [int(line.split()[3].replace(",", "")) for line in lines if line.startswith("  ")]
    assert sum(counts) == 600 and lines[0] == "300 rows"


def test_token_rows_have_just_their_lengths() -> None:
    rows = make_rows(9, seed=0)
    for row, asked in zip(rows, token_rows(rows, 50), strict=True):
        body = asked["body"]
        assert (len(body["prompt"]), body["max_tokens"]) == row[1:]
        assert max(body["prompt"]) < 50 and body["ignore_eos"]


def test_what_is_written_is_read_and_never_over_another(
    tmp_path: Path, run: Run, capfd: pytest.CaptureFixture[str]
) -> None:
    listed, lines = tmp_path / "set.json", tmp_path / "set.jsonl"
    assert run("make-batch", "--rows", "7", "-o", listed).startswith("7 rows\nprompts: ")
    run("make-batch", "--rows", "7", "--token-ids", "90", "-o", lines)
    assert [tuple(row) for row in json.loads(listed.read_text())] == make_rows(7, seed=0)
    for path in (listed, lines):
        data = open_data_set(path, Asking())
        assert [data.length(row) for row in range(7)] == [row[2] for row in make_rows(7, seed=0)]
    assert main(["make-batch", "-o", str(listed)]) == 2
    assert "set.json: File exists; allowed: a new file" in capfd.readouterr().err
