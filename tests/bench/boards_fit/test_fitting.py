"""The fit's parts: constants are found again, held-out rows are not seen, ranks share ties."""

from __future__ import annotations

import dataclasses

import pytest

from bench.boards_fit import fitting as fit_perf_model
from bench.boards_fit.fitting import DECODE_NAMES, Sample, fit, held_out, rank_correlation
from tilewright.compiler.targets.tenstorrent.perf.constants import START, Constants
from tilewright.compiler.targets.tenstorrent.perf.work import (
    COLLECTIVE,
    MATMUL,
    SMALL,
    InstructionCost,
)

TRUE = dataclasses.replace(
    START, bank_bytes_per_s=230e9, op_seconds=7e-6, ring_seconds=20e-6, step_seconds=2e-3
)
NAMES = ("bank_bytes_per_s", "op_seconds", "ring_seconds", "step_seconds")


def sample(index: int, *, factor: float = 1.0) -> Sample:
    """Made-up work: layers, bytes and chips vary, each in its own way."""
    layers, size, steps = 10 + 7 * (index % 5), 1e6 * (1 + index % 3), index % 2
    product = InstructionCost(MATMUL, "Matmul", "ff2", 2, bytes_read=int(size * 8), is_one_row=True)
    ring = InstructionCost(COLLECTIVE, "ReduceScatter", "", ring_steps=7 * steps, link_bytes=1000)
    work = ((product, layers), (InstructionCost(SMALL, "Add", ""), 12 * layers), (ring, 2 * layers))
    found = Sample(f"m{index}", f"b{steps}", "made up", 1.0, work, True)
    return dataclasses.replace(found, seconds=factor * found.predict(TRUE))


def test_the_constants_behind_the_times_are_found() -> None:
    found = fit([sample(index) for index in range(12)], NAMES)
    for name in NAMES:
        assert getattr(found, name) == pytest.approx(getattr(TRUE, name), rel=0.02), name


def test_one_wrong_row_moves_little() -> None:
    rows = [sample(index) for index in range(12)]
    rows[4] = sample(4, factor=2.0)
    found = fit(rows, NAMES)
    errors = sorted(abs(row.error(found)) for row in rows)
    assert errors[-2] < 0.03 and errors[-1] > 0.4


def test_a_held_out_row_does_not_help_itself() -> None:
    rows = [sample(index) for index in range(12)]
    rows[4] = sample(4, factor=1.5)
    errors = held_out(rows, NAMES, lambda row: row.model)
    assert errors[4] == pytest.approx(1 / 1.5 - 1, abs=0.01)
    together = held_out(rows, NAMES, lambda row: row.device)
    assert len(together) == 12 and together != errors


def test_a_constant_no_row_tells_of_stays_where_it_began() -> None:
    rows = [sample(2 * index) for index in range(6)]  # no ring steps among them
    assert fit(rows, NAMES).ring_seconds == pytest.approx(START.ring_seconds)


def test_every_fitted_name_is_a_constant() -> None:
    names = {field.name for field in dataclasses.fields(Constants)}
    fitted = (*DECODE_NAMES, *fit_perf_model.PREFILL_NAMES)
    assert len(DECODE_NAMES) <= 8 and len(fit_perf_model.PREFILL_NAMES) <= 5
    assert set(fitted) == names and len(fitted) == len(names)


def test_ranks_share_ties() -> None:
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 40]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1)
    # ranks 0.5 0.5 2 3 against 0 1 2 3: covariance 4.5 over sqrt(4.5 * 5)
    assert rank_correlation([1, 1, 2, 3], [1, 2, 3, 4]) == pytest.approx(4.5 / (4.5 * 5) ** 0.5)
