"""The vocabulary of figures: one row for every output, text of figures, tables, comparisons."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.evaluate.results.test_results import full, make
from tilewright.errors import ConfigError
from tilewright.evaluate.report import display
from tilewright.evaluate.report.table import Table, csv_text
from tilewright.evaluate.results.record import Paired
from tilewright.evaluate.results.row import COLUMNS, ResultRow, cells, table_of
from tilewright.evaluate.results.stats import mean_and_error, mean_interval, mean_ratio
from tilewright.utils.json_lines import read_records


def test_a_row_says_what_its_record_does_in_every_output() -> None:
    result = full()
    row = ResultRow.of(result, result.accuracy)
    assert row.top1_percent == 100 * 470 / 512 and row.repeats == 2
    shown = dict(zip(COLUMNS, cells(row, COLUMNS), strict=True))
    assert shown["Top-1 (%)"] == "91.8" and shown["vs base"] == "bf16 +3 -10 p=0.092"
    assert shown["Batch x prompt"] == "1 x 128" and shown["Peak (MB)"] == "1099512"
    assert shown["KL"] == "0.3" and shown["TTFT (ms)"] == "100.9"
    assert set(cells(ResultRow(), COLUMNS)) == {""}
    assert csv_text([row.values(["top1_percent", "base"])]) == "top1_percent,base\n91.796875,bf16\n"
    assert "| 91.8      | " in table_of(["Top-1 (%)", "KL"], [row]).markdown()
    random = make(weights="random", mesh="1x2", dp=4)
    assert cells(ResultRow.of(of=random, names=["a", "b"]), ["Model", "Device", "Precision"]) == (
        "SmolLM2-135M-Instruct (random weights)",
        "CPU (1x2) (DP=4)",
        "a, b",
    )


@given(st.lists(st.lists(st.text("ab 1.-+%日", max_size=6).map(str.strip), min_size=2, max_size=2)))
def test_a_table_is_as_wide_as_its_cells(rows: list[list[str]]) -> None:
    lines = Table.of(["A", "Longer"], rows).markdown().splitlines()
    first, second = (max(w, *(len(r[i]) for r in rows), 0) for i, w in enumerate((3, 6)))
    want = [
        f"| {one.ljust(first)} | {two.ljust(second)} |" for one, two in [["A", "Longer"], *rows]
    ]
    assert lines == [want[0], f"|{'-' * (first + 2)}|{'-' * (second + 2)}|", *want[1:]]


def test_notes_stand_below_a_table() -> None:
    assert Table.of(["One"], [], "why").markdown() == "| One |\n|-----|\n\n- why\n"


def test_a_spreadsheet_runs_nothing_of_a_table() -> None:
    assert csv_text([{"a": "=1+1", "b": None}, {"c": "x\ny"}]) == "a,b,c\n'=1+1,,\n,,x\ufffdy\n"


def test_figures_that_are_not_known_are_blank() -> None:
    for blank in (display.decimal(None), display.percent(None), display.megabytes(None)):
        assert blank == ""
    assert display.decimal(None, none="-") == "-" and display.decimal(1234.5, grouped=True) == (
        "1,234.5"
    )
    assert display.span(1, None) == display.discordant(1, None, 0.5) == ""


@given(st.text())
def test_foreign_text_is_one_line(text: str) -> None:
    assert display.plain_line(text).isprintable()
    assert "|" not in display.cell_text(text) and "\n" not in display.cell_text(text)


def test_means_errors_and_intervals() -> None:
    assert mean_and_error([2.0]) == (2.0, None) and mean_interval([1.0, 2.0]) == (1.5, None)
    mean, error = mean_and_error([1.0, 2.0, 3.0])
    assert (mean, error) == (2.0, pytest.approx(math.sqrt(1 / 3)))
    low_high = mean_interval([1.0, 2.0, 3.0])[1]
    assert low_high == pytest.approx((2 - 4.303 / math.sqrt(3), 2 + 4.303 / math.sqrt(3)))
    ratio = mean_ratio([2.0, 4.0, 6.0], [1.0, 2.0, 3.0])
    assert ratio is not None and (ratio.ratio, ratio.interval) == (2.0, (2.0, 2.0))
    assert ratio.differs and mean_ratio([1.0], [0.0]) is None
    with pytest.raises(ValueError, match="no values"):
        mean_and_error([])


def test_a_comparison_counts_where_only_one_is_right() -> None:
    found = Paired.from_hits(
        "base", theirs=[True, True, False, True], ours=[True, False, True, False]
    )
    assert (found.base, found.b, found.c) == ("base", 2, 1)


class _Kind(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    one: int


def test_a_line_of_any_kind_is_read_or_named(tmp_path: Path) -> None:
    path, decode = tmp_path / "a.jsonl", msgspec.json.Decoder(_Kind).decode
    path.write_text('{"one":1}\n\n{"one":2}\n')
    found = read_records(path, decode)
    assert [(each.place, each.record.one) for each in found] == [(f"{path}:1", 1), (f"{path}:3", 2)]
    path.write_text('{"one":1}\n{"one":"2"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl:2: not a kind: Expected `int`"):
        read_records(path, decode, expected="not a kind")
