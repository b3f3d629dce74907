"""A sweep as a document, as CSV, as records: fabricated cells, figures that are checked by hand."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sweep_cells import (
    accuracy_cell,
    accuracy_result,
    cell,
    done,
    failed,
    hits,
    journal,
    planned,
    renamed,
    speed_result,
)
from tilewright.evaluate.report import perf_md
from tilewright.evaluate.report.markdown import Heading, TableBlock, parse_blocks
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.result_file import dumps, loads
from tilewright.evaluate.sweep.export import SUMMARY_COLUMNS, csv_text, markdown, to_results
from tilewright.evaluate.sweep.journal import Added, SweepState, TrialFinished, TrialStarted
from tilewright.evaluate.sweep.leaderboard import make_leaderboard
from tilewright.evaluate.sweep.summary import rows
from tilewright.evaluate.sweep.trial import Trial

NUM_POSITIONS = 400


def heading(ff2: str) -> str:
    return f"precision_cfg = {{ff1_3: bfp8, ff2: {ff2}}}, fidelity_cfg = {{li_ff2: hifi2}}"


def measured(
    name: str,
    speeds: Sequence[float],
    num_wrong: int,
    *,
    effective: str | None = None,
    **changes: object,
) -> list[tuple[Trial, Result]]:
    """Accuracy, and a round of two repeats for each speed."""
    fields = {"heading": heading(name), **changes}
    came_to = {"effective_id": effective or name}
    of = accuracy_cell(name, **fields)
    found = [(of, accuracy_result(of, hits(num_wrong, NUM_POSITIONS), **came_to))]
    for number, speed in enumerate(speeds):
        of = cell(name, round=number, **fields)
        found.append((of, speed_result(of, [speed - 1, speed + 1], **came_to)))
    return found


def state_of(results: Sequence[tuple[Trial, Result]], **header: str) -> SweepState:
    state = SweepState(planned(**header))
    for of, found in results:
        state.apply(Added(of))
        state.apply(done(of, found))
    return state


SWEEP = [
    *measured("a", [50.0, 52.0, 51.0], 4),
    *measured("b", [100.0, 104.0, 102.0], 6, effective="shared"),
    *measured("c", [102.0, 106.0, 104.0], 6, effective="shared"),
    *measured("d", [60.0, 62.0, 61.0], 100),
]


def table(text: str, number: int = 0) -> list[dict[str, str]]:
    tables = [each for each in parse_blocks(text, name="text") if isinstance(each, TableBlock)]
    return [dict(zip(tables[number].columns, r.cells, strict=True)) for r in tables[number].rows]


def titles(text: str) -> list[str]:
    return [b.title for b in parse_blocks(text, name="text") if isinstance(b, Heading)]


def test_the_summary_has_the_figures_of_all_rounds_and_their_standing() -> None:
    text = markdown(state_of(SWEEP, plan="pareto"))
    a, b, d = table(text)
    assert tuple(a) == SUMMARY_COLUMNS
    assert (a["Configuration"], b["Configuration"]) == ("a", "b, c")
    assert (a["Top-1 (%)"], a["Positions"], a["Top-5 (%)"]) == ("99.0", "400", "100.0")
    assert a["Top-1 95 % CI"] == "97.5-99.6"
    assert a["KL"] == "0.01"
    # the repeats of both: 99 101 103 105 101 103, 101 103 105 107 103 105
    assert b["Speed (t/s/u)"] == "103.0"
    assert b["Spread (%)"] == f"{100 * 8 / 103:.1f}"
    # the rounds of b and c, averaged: 101, 105, 103
    assert b["Rounds (t/s/u)"] == "101.0-105.0"
    assert (a["vs base"], b["vs base"]) == ("", "a +0 -2 p=0.5")
    assert b["Weights (MB)"] == "0.0"
    assert (a["Standing"], b["Standing"]) == ("front", "front")
    assert d["Standing"] == "dominated by b, c"
    assert "# Sweep: pareto" in text and "speed in 3 rounds" in text
    assert "Every figure is measured." in text
    said = "its top-1 is not distinguishable from b, c's, which is faster (p = 0.5, +2 -0 of 400)"
    assert f"What is not proven:\n\n- `a`, front: {said}.\n" in text


def test_there_is_a_section_a_heading_in_the_seeds_form() -> None:
    text = markdown(state_of(SWEEP))
    sections = [s for s in perf_md.parse(text).sections if s.kind == "precision"]
    assert [section.title for section in sections] == [heading(name) for name in "abcd"]
    (row,) = sections[1].rows
    assert tuple(row.cells)[:6] == (
        *("Model", "Device", "Top-1 (%)", "Top-5 (%)", "Speed (t/s/u)", "TTFT (ms)"),
    )
    # the same figures as in the summary, whichever of b and c is the newest
    assert (row.top1, row.speed, row.ttft) == (98.5, 103.0, 100.0)
    assert sections[2].rows == ()
    assert "`c` shares the numbers and the row of `b`." in sections[2].intro
    assert "Environment" not in text and "Numeric contract" not in text


def test_what_failed_is_listed_and_what_is_open_is_not() -> None:
    ended, waiting = cell("e", heading=heading("e")), cell("f", heading=heading("f"))
    state = state_of(SWEEP)
    for of in (ended, waiting):
        state.apply(Added(of))
    state.apply(failed(ended, "exit code 1: | no\n## such thing"))
    text = markdown(state)
    said = "- `Tiny cpu e performance-ci-1 round 1`: failed: exit code 1: | no ## such thing\n"
    assert f"## Cells without a result\n\n{said}" in text
    assert "16 of 18 cells" not in text and "Cells: 16 of 18 done" in text
    assert len(table(text)) == 3, "a row without a figure is none"
    assert "## Cells without a result" not in markdown(state_of(SWEEP))


def test_an_unfinished_sweep_has_a_document_too() -> None:
    state = SweepState(planned())
    assert "Cells: 0 of 0 done" in markdown(state)
    assert csv_text(state) == "\n"
    state = state_of(SWEEP[:1])
    (row,) = table(markdown(state))
    assert (row["Top-1 (%)"], row["Speed (t/s/u)"], row["Standing"]) == ("99.0", "", "")
    (line,) = csv.DictReader(io.StringIO(csv_text(state)))
    assert (line["decode_tokens_per_s"], line["standing"]) == ("", "")


def test_models_and_devices_never_share_a_table() -> None:
    other = measured("a", [10.0] * 3, 0, model_name="Other", model_hash="other")
    exact = measured("a", [5.0] * 3, 0, compute="exact")
    text = markdown(state_of([*SWEEP, *other, *exact]))
    assert len(table(text, 0)) == 3
    assert [row["Standing"] for row in table(text, 1)] == ["front"]
    assert "## Tiny on CPU (cpu), exact arithmetic" in text


def test_kinds_of_figures_never_share_a_table() -> None:
    predicted = [
        (of, renamed(found, kind="predicted")) for of, found in measured("p", [500.0] * 3, 0)
    ]
    text = markdown(state_of([*SWEEP, *predicted]))
    assert [row["Configuration"] for row in table(text, 1)] == ["p"]
    assert "## Tiny on CPU (cpu), predicted" in text
    assert "Every figure is measured or predicted." in text
    assert "# Predicted results" in text


def test_accuracy_on_another_text_stands_apart() -> None:
    of = accuracy_cell("a", heading=heading("a"), text="held-out")
    found = accuracy_result(of, hits(200, NUM_POSITIONS), effective_id="a")
    assert found.accuracy is not None
    found = renamed(found, accuracy=replace(found.accuracy, text="held-out"))
    text = markdown(state_of([*SWEEP, (of, found)]))
    assert table(text)[0]["Top-1 (%)"] == "99.0"
    other = next(t for t in (table(text, n) for n in range(9)) if "Text" in t[0])
    assert [(row["Text"], row["Top-1 (%)"]) for row in other] == [("held-out", "50.0")]


def test_two_configurations_of_one_name_are_told_apart() -> None:
    again = measured("a", [40.0] * 3, 0, effective="other", precision_id="id-z")
    names = [each.label for each in make_leaderboard(rows(state_of([*SWEEP, *again])))]
    assert names == ["a (id-a)", "b, c", "d", "a (id-z)"]
    twice = rows(state_of(SWEEP)) + rows(state_of(measured("a", [1.0], 0, effective="new")))
    names = [each.label for each in make_leaderboard(twice)]
    assert names[0] == "a (id-a) (a)" and names[-1] == "a (id-a) (new)"


def test_only_rounds_taken_together_are_compared() -> None:
    """The second round of c failed; that of b is not to be compared with the third of c."""
    drifting = measured("a", [50.0, 100.0, 200.0], 4), measured("b", [52.0, 104.0, 208.0], 4)
    c = measured("c", [40.0, 80.0, 160.0], 4)
    del c[2]
    shown = {
        each.label: each
        for each in make_leaderboard(rows(state_of([*drifting[0], *drifting[1], *c])))
    }
    points = {label: each.placed.point for label, each in shown.items() if each.placed}
    assert [points[name].rounds for name in "abc"] == [(50, 100, 200), (52, 104, 208), (40,)]
    assert shown["a"].placed is not None and shown["a"].placed.standing == "dominated"
    four = measured("d", [48.0, 96.0, 192.0, 1.0], 4)
    shown = {each.label: each for each in make_leaderboard(rows(state_of([*drifting[0], *four])))}
    assert {len(each.placed.point.rounds) for each in shown.values() if each.placed} == {3}


def test_many_equal_names_are_named_once_in_full() -> None:
    names = [f"a-long-name-of-configuration-{number}" for number in range(3)]
    results = [each for name in names for each in measured(name, [90.0] * 3, 8, effective="e")]
    slow = measured("slow", [10.0] * 3, 100)
    text = markdown(state_of([*results, *slow]))
    first, second = table(text)
    assert first["Configuration"] == ", ".join(names)
    assert second["Standing"] == f"dominated by {names[0]} and 2 equal"


def test_one_configuration_of_two_sweeps_is_named_once() -> None:
    both = rows(state_of(SWEEP)) + rows(state_of(measured("a", [70.0] * 3, 4)))
    first = make_leaderboard(both)[0]
    assert first.label == "a"
    assert first.row.speed_result is not None and len(first.row.speed_result.repeats) == 12


SENSITIVITY = [
    *measured("a", [50.0] * 3, 4),
    *measured("b", [60.0] * 3, 6, part="ff2"),
    *measured("c", [], 5, part="0.ff2"),
]


def test_a_sensitivity_s_probes_have_no_sections() -> None:
    state = state_of(SENSITIVITY, plan="sensitivity")
    text = markdown(state)
    assert [row["Configuration"] for row in table(text)] == ["a", "b", "c"]
    assert heading("a") in titles(text)
    assert heading("b") not in titles(text) and heading("c") not in titles(text)
    assert "measured, but those in columns that say predicted" in text
    text = markdown(state, "## By layer\n\nSomething.\n")
    assert [row["Configuration"] for row in table(text)] == ["a", "b"]
    assert "By layer" in titles(text)


def test_csv_has_a_line_a_configuration_unrounded() -> None:
    lines = list(csv.DictReader(io.StringIO(csv_text(state_of(SWEEP)))))
    assert [line["configuration"] for line in lines] == ["a", "b", "c", "d"]
    a, b, c, d = lines
    assert float(a["top1_percent"]) == 99.0
    assert (a["top1_positions"], a["positions"]) == ("396", "400")
    assert float(a["top1_low_percent"]) == pytest.approx(97.45734, abs=1e-5)
    assert float(b["decode_tokens_per_s"]) == 102.0
    assert float(c["decode_tokens_per_s"]) == 104.0
    assert c["decode_rounds_tokens_per_s"] == "102.0 106.0 104.0"
    assert (b["row"], c["row"]) == ("b, c", "b, c")
    assert (c["standing"], d["standing"], d["dominated_by"]) == ("front", "dominated", "b, c")
    assert (b["base"], b["only_base_positions"], b["mcnemar_p"]) == ("a", "2", "0.5")
    assert (b["repeats"], b["rounds"], b["cells_done"]) == ("6", "3", "4")
    assert b["weight_bytes"] == b["estimated_weight_bytes"] == "1000"


def test_csv_of_several_sweeps_has_one_header_and_all_cases() -> None:
    of = cell("z", case="performance-ci-32")
    batch = state_of([*measured("z", [5.0], 0), (of, speed_result(of, [7.0]))])
    text = csv_text(state_of(SWEEP), batch)
    lines = list(csv.DictReader(io.StringIO(text)))
    assert len(lines) == 5 and text.count("top1_percent") == 1
    assert lines[4]["performance-ci-32_decode_tokens_per_s"] == "7.0"
    assert lines[0]["performance-ci-32_decode_tokens_per_s"] == ""


@given(st.text(max_size=3).map("=".join) | st.text("=+-@ \t\r\n,;'\"a", max_size=6))
def test_csv_reads_back_and_holds_no_formula(name: str) -> None:
    state = SweepState(planned())
    state.apply(Added(cell(name)))
    text = csv_text(state)
    header, line = csv.reader(io.StringIO(text, newline=""))
    assert len(header) == len(line) and text.count("\n") == 2
    assert not any(each.strip().startswith(("=", "+", "-", "@")) for each in line)
    shown = "".join(each if each.isprintable() else "\ufffd" for each in name)
    assert line[header.index("configuration")] in (shown, f"'{shown}")


@given(st.text(max_size=30), st.text(max_size=30), st.text(max_size=10))
def test_free_text_never_breaks_the_document(name: str, reason: str, plan: str) -> None:
    state = state_of([], plan=plan)
    first, second = cell(name), accuracy_cell("b")
    for of in (first, second):
        state.apply(Added(of))
    state.apply(failed(first, reason))
    state.apply(done(second, accuracy_result(second, hits(3))))
    text = markdown(state)
    assert len(table(text)) == 1
    assert [each for each in titles(text) if "without a result" in each]
    perf_md.parse(text)


def test_records_are_new_only_once() -> None:
    state = state_of(SWEEP)
    found = to_results(state, [])
    assert [(each.precision_name, each.case) for each in found] == [
        (name, case) for name in "abcd" for case in ("performance-top-1", "performance-ci-1")
    ]
    speed = found[1]
    assert [repeat.decode_tsu for repeat in speed.repeats] == [49, 51, 51, 53, 50, 52]
    assert (speed.decode_tsu, speed.spread) == (51.0, 4 / 51)
    kept = [loads(dumps(each)) for each in found]
    assert to_results(state, kept) == []
    assert to_results(state, kept[:3]) == found[3:]


def test_another_round_is_a_new_record() -> None:
    known = to_results(state_of(SWEEP[:3]), [])
    new = to_results(state_of(SWEEP[:4]), known)
    assert [(each.case, len(each.repeats)) for each in new] == [("performance-ci-1", 6)]


def test_probes_are_no_records() -> None:
    found = to_results(state_of(SENSITIVITY, plan="sensitivity"), [])
    assert {each.precision_name for each in found} == {"a"}


def test_a_journal_on_disk_gives_the_same_document(tmp_path: Path) -> None:
    path = tmp_path / "sweep.jsonl"
    made = journal(path, SWEEP)
    assert markdown(made.state) == markdown(state_of(SWEEP))
    made.append(TrialStarted(SWEEP[0][0].id, "2026-01-02T03:04:05+00:00"))
    ended = TrialFinished(cell=SWEEP[0][0].id, outcome="timed out", seconds=9.0, reason="after 9 s")
    made.append(ended)
    assert "timed out: after 9 s" in markdown(made.state)
    assert json.loads(path.read_text().splitlines()[-1])["outcome"] == "timed out"
