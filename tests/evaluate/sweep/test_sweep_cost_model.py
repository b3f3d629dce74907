"""Rates fitted on observed configurations: planted ones are found, none is negative."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.errors import ConfigError
from tilewright.evaluate.sweep.cost_model import CostModel, Observation, fit

KINDS = ("float32", "bfp8 blocks", "bfp4 blocks")
WHOLE = 200_000_000


def planted(fixed: float, rates: Sequence[float]) -> list[Observation]:
    """Everything in one kind, then a third or two of it in another, as groups are."""
    kinds = KINDS[: len(rates)]
    shares = [{kind: 1.0} for kind in kinds]
    shares += [{kinds[0]: part, kind: 1 - part} for kind in kinds[1:] for part in (1 / 3, 2 / 3)]
    shares += [{kinds[0]: 0.5}, {kinds[0]: 0.25}]
    return [observed(f"c{number}", share, fixed, rates) for number, share in enumerate(shares)]


def observed(
    name: str, share: dict[str, float], fixed: float, rates: Sequence[float]
) -> Observation:
    sizes = {kind: int(WHOLE * part) for kind, part in share.items()}
    ms = fixed + sum(rates[KINDS.index(kind)] * size for kind, size in sizes.items())
    return Observation(name, sizes, ms)


RATES = st.lists(st.floats(1e-9, 1e-6), min_size=1, max_size=3)
"""ms a byte: from 1000 GB/s to 1 GB/s."""


@given(st.floats(0.1, 100), RATES)
def test_planted_rates_are_found(fixed: float, rates: list[float]) -> None:
    observations = planted(fixed, rates)
    model = fit(observations)
    assert model.fixed_ms == pytest.approx(fixed, rel=1e-6)
    assert model.ms_per_byte == pytest.approx(dict(zip(KINDS, rates, strict=False)), rel=1e-6)
    for each in observations:
        assert model.predict(each.step_bytes) == pytest.approx(each.ms)
        assert model.errors[each.name] == pytest.approx(0, abs=1e-6)
    assert model.median_error == pytest.approx(0, abs=1e-6)


TIMES = st.floats(0.01, 1000)


@given(
    st.lists(
        st.tuples(st.fixed_dictionaries({kind: st.integers(0, WHOLE) for kind in KINDS}), TIMES),
        min_size=4,
        max_size=8,
    )
)
def test_no_rate_is_negative_whatever_was_measured(
    measured: list[tuple[dict[str, int], float]],
) -> None:
    observations = [Observation(str(index), *each) for index, each in enumerate(measured)]
    model = fit(observations)
    assert model.fixed_ms >= 0
    assert all(rate >= 0 for rate in model.ms_per_byte.values())
    worst = sum((model.predict(each.step_bytes) / each.ms - 1) ** 2 for each in observations)
    assert worst <= len(observations) * (1 + 1e-9), "predicting nothing would be better"


def test_a_rate_that_would_be_negative_is_none() -> None:
    """More bytes in less time: the rest is fitted as if there were none of them."""
    sizes = (0, 10**8, 2 * 10**8)
    observations = [
        Observation(str(size), {"a": 10**8, "b": size}, 12.0 - size / 10**8) for size in sizes
    ]
    model = fit(observations)
    assert model.ms_per_byte["b"] == 0
    total = model.predict(observations[0].step_bytes)
    assert total == model.predict(observations[2].step_bytes)
    inverse = [1 / each.ms for each in observations]
    assert total == pytest.approx(sum(inverse) / sum(each * each for each in inverse))


@given(st.permutations(planted(3.0, [5e-8, 2e-8, 1e-8])))
def test_the_order_of_observations_does_not_matter(observations: list[Observation]) -> None:
    noisy = [
        Observation(each.name, each.step_bytes, each.ms * (1 + 0.01 * (int(each.name[1:]) % 3)))
        for each in observations
    ]
    again = fit(sorted(noisy, key=lambda each: each.name))
    model = fit(noisy)
    assert model.fixed_ms == pytest.approx(again.fixed_ms)
    assert model.ms_per_byte == pytest.approx(again.ms_per_byte)


def test_each_error_is_of_a_fit_without_it() -> None:
    observations = planted(2.0, [4e-8, 1e-8])
    off = observations[3]
    observations[3] = Observation(off.name, off.step_bytes, off.ms * 1.25)
    model = fit(observations)
    # the others are exact: from them, the one that is off should be a fifth less than it was
    assert model.errors[off.name] == pytest.approx(-0.2)
    assert 0 < (model.median_error or 0) < 0.2
    for index, each in enumerate(observations):
        others = fit([*observations[:index], *observations[index + 1 :]])
        expected = others.predict(each.step_bytes) / each.ms - 1
        assert model.errors[each.name] == pytest.approx(expected)


def test_what_the_others_cannot_tell_is_not_predicted() -> None:
    observations = [*planted(2.0, [4e-8])[:2], Observation("only", {KINDS[1]: WHOLE}, 3.0)]
    model = fit([*observations, Observation("again", {KINDS[0]: WHOLE // 4}, 4.0)])
    assert model.errors["only"] is None
    assert model.errors["again"] is not None
    least = fit(observations)  # three of them for three unknowns: none can be left out
    assert set(least.errors.values()) == {None} and least.median_error is None


@pytest.mark.parametrize("count", [0, 1, 2])
def test_too_few_observations_are_refused(count: int) -> None:
    sizes = {KINDS[0]: 10**6, KINDS[1]: 10**6}
    observations = [Observation(str(index), sizes, 1.0) for index in range(count)]
    if count == 0:
        with pytest.raises(ConfigError, match="0 measured configurations"):
            fit(observations)
        return
    with pytest.raises(ConfigError, match=f"{count} measured configurations; allowed"):
        fit(observations)


def test_a_kind_of_no_bytes_is_no_unknown() -> None:
    model = fit([Observation("x", {KINDS[0]: 10**6, KINDS[1]: 0}, 1.0), Observation("y", {}, 0.5)])
    assert set(model.ms_per_byte) == {KINDS[0]}
    assert model.ms_per_byte[KINDS[0]] == pytest.approx(5e-7)
    assert model.knows({KINDS[0]: 5, KINDS[1]: 0, "never seen": 0})
    assert not model.knows({KINDS[0]: 5, KINDS[1]: 1})
    assert model.predict({KINDS[0]: 10**6, KINDS[1]: 0}) == pytest.approx(1.0)


def test_the_middle_error_is_of_those_there_are() -> None:
    model = CostModel(1.0, {}, {"a": -0.5, "b": 0.1, "c": None, "d": 0.2})
    assert model.median_error == 0.2
    assert CostModel(1.0, {}, {"a": None}).median_error is None
