"""Sampling parameters refuse what makes no sense; a request knows what it still has to compute."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.errors import RequestError
from tilewright.runtime.request import check_tokens
from tilewright.runtime.scheduling.request_state import RequestState


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("temperature", [-0.1, 100.1, math.nan, math.inf, -math.inf]),
        ("top_p", [-1e-9, -1.0, 1.0001, math.nan, math.inf]),
        ("top_k", [-1]),
        ("max_tokens", [0, -5]),
        ("seed", [1 << 63, -(1 << 63) - 1]),
    ],
)
def test_a_parameter_out_of_range_is_named(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(RequestError, match=rf"{name} .*; allowed: ") as caught:
            SamplingParams(**{name: value})
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
        {"temperature": 100.0, "top_p": 0.0, "max_tokens": 1},
        {"temperature": 100.0, "top_p": 1e-6, "max_tokens": 1},
        {"seed": (1 << 63) - 1},
        {"seed": -(1 << 63)},
    ],
)
def test_the_ends_of_the_ranges_are_allowed(values: dict[str, Any]) -> None:
    SamplingParams(**values)


def test_top_p_zero_takes_the_most_likely_token() -> None:
    greedy = SamplingParams(temperature=2.0, top_p=0.0, top_k=7, seed=3)
    assert greedy.is_greedy and greedy.top_p == 1.0
    kept = SamplingParams(temperature=2.0, top_p=1e-9)
    assert (kept.temperature, kept.top_p) == (2.0, 1e-9)


def test_requests_are_told_apart_though_equal() -> None:
    assert RequestState(0, (1, 2)) != RequestState(0, (1, 2))


def test_positions_of_a_request_leave_out_its_last_token() -> None:
    request = RequestState(0, (1, 2, 3), SamplingParams(max_tokens=4))
    assert request.max_positions == 6
    assert RequestState(0, (1,), SamplingParams(max_tokens=1)).max_positions == 1


def test_tokens_outside_the_vocabulary_are_named() -> None:
    check_tokens([0, 60], 61)
    check_tokens([], 61)
    for token in (-1, 61, 1 << 40):
        with pytest.raises(RequestError, match=f"token {token}; allowed: 0 to 60"):
            check_tokens([3, token], 61)
