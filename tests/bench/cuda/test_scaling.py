"""The cost model of several GPUs: by hand for one row of 8B."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bench.cuda.scaling import (
    LOADS,
    byte_limit,
    group_seconds,
    pays_from,
    step_seconds,
    tokens_per_s,
)


@pytest.mark.parametrize(("exchange_us", "rate"), [(3.5, 422), (2.2, 437), (0.0, 465)])
def test_one_row_of_8b_by_hand(exchange_us: float, rate: float) -> None:
    """Half of 3.343 ms of bytes, 164 launches of 2.89 us, 64 exchanges, 3 us of keys."""
    seconds = 1.671e-3 + 0.474e-3 + 64e-6 * exchange_us + 3e-6
    assert 1 / seconds == pytest.approx(rate, rel=0.01)
    assert step_seconds(LOADS[0], 2, exchange_us=exchange_us) == pytest.approx(seconds, rel=0.01)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: f"{load.name} {load.rows}")
def test_more_gpus_are_faster_and_below_their_limit(load: object) -> None:
    """Up to four; eight send each sum to seven others, which many rows of 8B do not gain by."""
    rates = [tokens_per_s(load, count) for count in (1, 2, 4, 8)]  # type: ignore[arg-type]
    assert rates[:3] == sorted(rates[:3])
    for count, rate in zip((1, 2, 4, 8), rates, strict=True):
        assert rate < byte_limit(load, count)  # type: ignore[arg-type]


def test_from_which_step_on_more_gpus_pay() -> None:
    """At that length two, or four, are as fast as half of them; twice as long, they are faster."""
    for load in LOADS:
        for count in (2, 4, 8):
            seconds = pays_from(load, count)
            at, above = (replace(load, tokens_per_s=load.rows / s) for s in (seconds, 2 * seconds))
            at, above = (replace(each, num_bytes=0.0) for each in (at, above))
            assert step_seconds(at, count) == pytest.approx(step_seconds(at, count // 2))
            assert step_seconds(above, count) < step_seconds(above, count // 2)
            assert load.seconds > seconds or count > 2


def test_a_rank_by_itself_and_its_exchanges_are_the_group() -> None:
    """8B with one row: 456 tokens a second by itself, 450 measured on two GPUs."""
    seconds = group_seconds(1 / 456, 2, num_exchanges=64, num_bytes=4 * 4096)
    assert 1 / seconds == pytest.approx(450, rel=0.015)


def test_the_model_is_within_a_tenth_of_what_was_measured() -> None:
    measured = [load for load in LOADS if load.on_two is not None]
    assert measured
    for load in measured:
        assert tokens_per_s(load, 2) == pytest.approx(load.on_two, rel=0.1)
