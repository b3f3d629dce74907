"""The CUDA target's bench on the CPU: its rows, what they come to, what is printed and kept."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from bench.cuda import step_times
from bench.cuda.command import COLUMNS, StepBench, bench
from bench.cuda.measure import Bench, Figures, _figure, run_options
from bench.cuda.rows import (
    DECODE,
    DECODE_SHARE,
    PREFILL_SECONDS,
    PREFILL_SHARE,
    TTFT,
    BenchRow,
)
from tilewright.compiler.targets.host.executable import HostExecutable
from tilewright.compiler.targets.interface.base import Slot
from tilewright.evaluate.measure.roofline import StepTraffic
from tilewright.evaluate.measure.timing import TimedRun
from tilewright.evaluate.report.perf_md import parse
from tilewright.evaluate.report.perf_tables import render_results
from tilewright.evaluate.report.table import Table
from tilewright.evaluate.results.record import Ceilings, Repeat
from tilewright.evaluate.results.result_file import read
from tilewright.evaluate.results.selection import BATCH_32, SHORT, speed_table
from tilewright.models import shapes

CEILINGS = Ceilings("made up", (100.0,), (1000.0,), "bf16")
WORKS = StepTraffic({}, 500.0), StepTraffic({"ff2": 10.0}, 1.0)
"""A prompt of 0.5 s and a decode step of 0.1 s at these ceilings."""


def tiny(name: str, metric: str = DECODE, **changes: Any) -> BenchRow:
    return BenchRow(name, "tiny", "bf16", metric, **{"floor": 1.0, **changes})


def run(ttft_ms: float, decode_tsu: float) -> TimedRun:
    return TimedRun(Repeat(ttft_ms=ttft_ms, decode_tsu=decode_tsu), ())


def choices(rows: Sequence[BenchRow], results: Path | None = None, **changes: Any) -> StepBench:
    return StepBench(tuple(rows), 2, results, changes.pop("is_profiled", False), "cpu")


@pytest.mark.parametrize(
    ("metric", "values", "limit", "words"),
    [
        (DECODE, (16.0, 12.0), 20.0, "prompt 1,500.00 ms"),
        (DECODE_SHARE, (80.0, 60.0), 100.0, "decode 14.0 t/s of 20.0; prompt"),
        (TTFT, (1000.0, 2000.0), 500.0, "decode 14.0 t/s"),
        (PREFILL_SECONDS, (1.0, 2.0), 0.5, "decode 14.0 t/s"),
        (PREFILL_SHARE, (50.0, 25.0), 100.0, "decode 14.0 t/s"),
    ],
)
def test_figures_by_hand(metric: str, values: tuple[float, ...], limit: float, words: str) -> None:
    row = tiny("row", metric, batch=2)
    runs = [run(1000.0, 8.0), run(2000.0, 6.0)]
    found, most, detail = _figure(row, runs, WORKS, CEILINGS)
    assert found == pytest.approx(values) and most == pytest.approx(limit)
    assert words in detail


@pytest.mark.parametrize(
    ("metric", "value", "met"),
    [
        (DECODE, 19.0, "NO"),
        (DECODE, 20.0, "floor"),
        (DECODE, 30.0, "goal"),
        (TTFT, 20.0, "floor"),
        (TTFT, 20.1, "NO"),
        (TTFT, 10.0, "goal"),
    ],
)
def test_what_meets_a_floor(metric: str, value: float, met: str) -> None:
    goal = 30.0 if metric == DECODE else 10.0
    row = tiny("row", metric, floor=20.0, goal=goal)
    (shown,) = Table.by(COLUMNS, [Figures(row, (value, value - 1, value + 1), limit=40.0)]).rows
    assert shown[5] == met and shown[2].startswith(f"{value:.{1 if metric == DECODE else 2}f} (")
    assert shown[7] == f"{100 * (value / 40 if metric == DECODE else 40 / value):.1f} %"
    others = [Figures(tiny("row", floor=floor), (20.0,)) for floor in (20.0, None)]
    met, free = Table.by(COLUMNS, others).rows
    assert met[4:] == ("-", "yes", "-", "-") and free[3:6] == ("-", "-", "-")


@pytest.mark.parametrize(
    ("changes", "case", "num_repeats"),
    [
        ({}, "performance-ci-1", 5),
        ({"batch": 32}, "performance-ci-32", 5),
        ({"batch": 8}, "performance-ci-1*", 5),
        ({"num_generated": 40}, "performance-ci-1*", 5),
        ({"prompt_length": 2048}, "performance-long-context-2k", 5),
        ({"prompt_length": 4096}, "performance-long-context-2k*", 5),
        ({"prompt_length": 32768}, "performance-long-context-32k", 3),
    ],
)
def test_a_row_is_a_case_of_its_own_precision(
    changes: dict[str, int], case: str, num_repeats: int
) -> None:
    options = run_options(tiny("row", **changes), target="cpu", repeats=5)
    assert options.case.name + "*" * options.is_case_changed == case
    assert options.case.num_repeats == num_repeats
    assert options.model.precision is not None and options.model.precision.name == "bf16"
    assert options.results is None and not options.case.stop_at_eos


@pytest.fixture
def unbuilt(monkeypatch: pytest.MonkeyPatch) -> str:
    """A shape whose architecture has no file."""
    shape = {**shapes.SHAPES["tiny"], "model_type": "of_tomorrow"}
    monkeypatch.setattr(shapes, "SHAPES", {**shapes.SHAPES, "unbuilt": shape})
    return "unbuilt"


def test_rows_are_measured_printed_and_kept(
    unbuilt: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows = [
        tiny("one"),
        tiny("first", TTFT),
        tiny("eight", batch=8),
        tiny("many", batch=32),
        tiny("long", PREFILL_SHARE, prompt_length=2048),
        BenchRow("none", unbuilt, "bf16", DECODE, 1.0),
    ]
    results = tmp_path / "results.jsonl"
    assert bench(choices(rows, results), measured=CEILINGS) == 0
    out, err = capfd.readouterr()
    assert err == "" and out.index("reads (TB/s)") < out.index("one: decode, t/s: ")
    assert "Tiny (random weights), bf16, for 32 x 328 positions" in out
    assert "all rows (random weights)" in out and "made up" in out
    assert out.count("none: not measured: shape:unbuilt: architecture 'of_tomorrow'") == 2
    found = read(results)
    assert [result.batch for result in found] == [1, 8, 32, 1], "a shared run is kept once"
    one, eight, many, long = found
    assert [speed_table(each) for each in (one, many, long)] == [SHORT, BATCH_32, 2]
    assert speed_table(eight) == (8, 128) and eight.case == "performance-ci-1*"
    assert all(result.weights == "random" and len(result.repeats) == 2 for result in found)
    assert all(result.peak_memory_bytes is None and result.accuracy is None for result in found)
    assert (one.context, long.context) == (328, 2248)
    assert all(result.ceilings == CEILINGS for result in found), "of the very run"
    sections = parse(render_results([*found])).sections
    assert {"batch_32", "long_context"} <= {s.kind for s in sections if s.rows}
    assert all(row.random for section in sections for row in section.rows)


def test_one_failure_does_not_cost_the_others(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def measure(self: Bench, row: BenchRow, ceilings: Ceilings) -> Figures:
        if row.name == "bad":
            raise RuntimeError("out of\nmemory")
        return Figures(row, (1.0, 2.0))

    closed = []
    monkeypatch.setattr(Bench, "measure", measure)
    close = Bench.close
    monkeypatch.setattr(Bench, "close", lambda self: (closed.append(1), close(self)))
    rows = [tiny("good"), tiny("bad"), tiny("after"), tiny("other", prompt_length=130)]
    assert bench(choices(rows), measured=CEILINGS) == 1
    out, err = capfd.readouterr()
    assert "good: decode, t/s: 1.5 (1.0-2.0)" in out and "other: decode" in out
    assert "good: not measured" not in out
    assert "bad: not measured: failed: out of memory" in out and "after: not measured" in out
    assert "RuntimeError" in err and len(closed) == 2


def test_an_interrupt_leaves_what_was_measured(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def measure(self: Bench, row: BenchRow, ceilings: Ceilings) -> Figures:
        if row.name == "two":
            raise KeyboardInterrupt
        return Figures(row, (1.0, 2.0))

    monkeypatch.setattr(Bench, "measure", measure)
    assert bench(choices([tiny("one"), tiny("two")]), measured=CEILINGS) == 130
    out, _ = capfd.readouterr()
    assert "all rows (random weights)" in out.partition("one: decode, t/s")[2]
    assert "two" not in out


def test_profiles_come_after_all_timed_runs(capfd: pytest.CaptureFixture[str]) -> None:
    rows = [tiny("one"), tiny("first", TTFT)]
    assert bench(choices(rows, is_profiled=True), measured=CEILINGS) == 0
    out, _ = capfd.readouterr()
    assert out.index("first: TTFT") < out.index("one: kernels by GPU time")
    assert "first: kernels by GPU time" in out


def test_a_kernel_has_the_time_in_which_no_earlier_kernel_ran() -> None:
    """The second kernel starts early and waits. The third starts after a gap. A kernel on another
    stream is inside it. The times add up to the busy time.
    """
    spans = [("b", 2.0, 14.0), ("a", 0.0, 10.0), ("a", 20.0, 40.0), ("c", 24.0, 27.0)]
    lines = step_times.by_kernel(spans).splitlines()[2:]
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    assert cells == [
        ["a", "2", "13.5", "0.03", "79.4"],
        ["b", "1", "4.0", "0.00", "11.8"],
        ["c", "1", "3.0", "0.00", "8.8"],
    ]


def test_host_times_are_of_both_samplings(capfd: pytest.CaptureFixture[str]) -> None:
    asked = dataclasses.replace(choices([tiny("two", batch=2)]), shows_host_time=True)
    assert bench(asked, measured=CEILINGS) == 0
    out, _ = capfd.readouterr()
    for what in ("unchanged, greedy", "changing, greedy", "unchanged, sampled"):
        assert f"two: {what}: " in out and "us a step" in out


def test_a_profile_that_fails_costs_no_row(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any, **named: Any) -> None:
        raise RuntimeError("no counters")

    monkeypatch.setattr(step_times, "profile", fail)
    assert bench(choices([tiny("one")], is_profiled=True), measured=CEILINGS) == 1
    out, _ = capfd.readouterr()
    assert "one: no profile: no counters" in out and "one: not measured" not in out


def test_routing_is_told_of_models_that_choose(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """On the cpu nobody counts, so that the count is made up here."""
    row = tiny("one", batch=2, num_generated=3)
    assert bench(choices([row]), measured=CEILINGS) == 0
    assert "experts chosen" not in capfd.readouterr().out
    counted = []

    def chosen_experts(
        self: HostExecutable, slots: Sequence[Slot], tokens: Sequence[int]
    ) -> list[int]:
        counted.append(([self.length(slot) for slot in slots], len(tokens)))
        return [2, 5]

    monkeypatch.setattr(HostExecutable, "chosen_experts", chosen_experts, raising=False)
    row = dataclasses.replace(row, shape="tiny-moe")
    assert bench(choices([row]), measured=CEILINGS) == 0
    assert counted == [([128, 128], 2)]
    out = capfd.readouterr().out
    assert "one: experts chosen a layer in a decode step: 3.5 (2-5) of 8; 3.5 were all" in out
