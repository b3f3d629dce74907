"""How long cells may take: more take longer, one compilation each, finished cells correct it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.sweep_cells import (
    accuracy_cell,
    accuracy_result,
    cell,
    done,
    hits,
    planned,
    speed_result,
)
from tilewright.errors import ConfigError
from tilewright.evaluate.cases.cases import CASES
from tilewright.evaluate.sweep.estimate import remaining_seconds, seconds, total_seconds
from tilewright.evaluate.sweep.journal import Added, SweepState, TrialFinished, TrialStarted
from tilewright.evaluate.sweep.trial import Trial

NAMES = st.sampled_from("abc")
CELLS = st.one_of(
    st.builds(cell, NAMES, round=st.integers(0, 3), weight_bytes=st.integers(0, 10**12)),
    st.builds(accuracy_cell, NAMES, weight_bytes=st.none() | st.integers(1, 10**12)),
)


def state_of(*cells: Trial) -> SweepState:
    state = SweepState(planned())
    for each in cells:
        state.apply(Added(each))
    return state


def finish(state: SweepState, of: Trial, took: float) -> None:
    found = speed_result(of, [1.0]) if of.kind == "speed" else accuracy_result(of, hits(1))
    state.apply(done(of, found, took))


@given(st.lists(CELLS, max_size=6), CELLS, st.integers(1, 4))
def test_more_cells_take_longer(cells: list[Trial], another: Trial, jobs: int) -> None:
    before = total_seconds(cells, jobs=jobs)
    assert before >= 0
    assert total_seconds([*cells, another], jobs=jobs) > before


@pytest.mark.parametrize("case", CASES)
def test_every_case_takes_some_time(case: str) -> None:
    of = cell(case=case)
    assert 1 < seconds(of) < seconds(replace(of, weight_bytes=10**9)) < 10**5
    assert seconds(replace(of, weight_bytes=None)) > seconds(of)


def test_what_there_is_more_to_do_for_takes_longer() -> None:
    assert seconds(cell(case="performance-ci-32")) > seconds(cell(case="performance-ci-1"))
    assert seconds(cell(case="performance-long-context-16k")) > seconds(
        cell(case="performance-long-context-2k")
    )
    assert seconds(cell(), is_compiled=False) > seconds(cell())


def test_an_unknown_case_is_an_error_of_the_user() -> None:
    with pytest.raises(ConfigError, match="unknown case"):
        seconds(cell(case="nothing"))


def test_a_configuration_is_compiled_once() -> None:
    cells = [accuracy_cell("a"), cell("a"), cell("a", round=1), cell("b")]
    expected = sum(seconds(each, is_compiled=index in (1, 2)) for index, each in enumerate(cells))
    assert total_seconds(cells) == pytest.approx(expected)
    compilation = seconds(cell("b"), is_compiled=False) - seconds(cell("b"))
    assert total_seconds([cell("a"), cell("b")]) - total_seconds(
        [cell("a"), cell("a", round=1)]
    ) == pytest.approx(compilation)


def test_accuracy_runs_side_by_side_and_speed_does_not() -> None:
    for of, share in ((accuracy_cell(), 3), (cell(), 1)):
        alone = total_seconds([of])
        assert total_seconds([of], jobs=3) == pytest.approx(alone / share)


@given(st.lists(CELLS, max_size=6, unique_by=lambda of: of.id), st.integers(1, 3))
def test_before_anything_has_run_it_is_the_guess(cells: list[Trial], jobs: int) -> None:
    state = state_of(*cells)
    assert remaining_seconds(state, jobs=jobs) == pytest.approx(total_seconds(cells, jobs=jobs))


def test_finished_cells_correct_the_guess() -> None:
    """By the median of how far it was off; what failed or was cancelled says nothing."""
    cells = [cell("a", round=number) for number in range(6)]
    state = state_of(*cells)
    whole = remaining_seconds(state)
    guesses = [seconds(each, is_compiled=number > 0) for number, each in enumerate(cells)]
    for number, factor in ((1, 2.0), (2, 3.0), (3, 50.0)):
        finish(state, cells[number], factor * guesses[number])
    left = guesses[0] + guesses[4] + guesses[5]
    assert remaining_seconds(state) == pytest.approx(3.0 * left)
    assert remaining_seconds(state) > 0.9 * whole
    state.apply(TrialFinished(cell=cells[4].id, outcome="failed", seconds=1000.0, reason="why"))
    assert remaining_seconds(state) == pytest.approx(3.0 * (guesses[0] + guesses[5]))
    state.apply(TrialStarted(cells[5].id, "2026-01-02T03:04:05+00:00"))
    assert remaining_seconds(state) == pytest.approx(3.0 * (guesses[0] + guesses[5]))


def test_a_finished_sweep_has_nothing_left() -> None:
    assert remaining_seconds(state_of()) == 0
    state = state_of(cell())
    finish(state, cell(), 0.0)
    assert remaining_seconds(state) == 0


def test_a_cell_that_took_no_time_corrects_nothing() -> None:
    state = state_of(cell("a"), cell("b"))
    before = remaining_seconds(state_of(cell("b")))
    finish(state, cell("a"), 0.0)
    assert remaining_seconds(state) == pytest.approx(before)


def test_a_calibrated_cell_takes_longer_once() -> None:
    plain, calibrated = cell(), cell(calibration="gptq")
    assert seconds(calibrated, is_compiled=False) > seconds(plain, is_compiled=False)
    assert seconds(calibrated) == seconds(plain)
