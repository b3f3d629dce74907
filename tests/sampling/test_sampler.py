"""The whole choice of a row: masks, bias, ends that are too early, penalties, and then the draw."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.compiler.ops import sample
from tilewright.compiler.sampling import rng
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.sampling.rng import draw, log_probabilities, uniform
from tilewright.compiler.sampling.sampler import SamplingRow, adjusted, choose_tokens

LOGITS = np.array([1.0, 3.0, 2.0, -1.0], dtype=np.float32)


def chosen(choosing: SamplingParams, logits: np.ndarray = LOGITS, **row: object) -> int:
    rows = [SamplingRow(choosing, **{"position": 5, **row})]  # type: ignore[arg-type]
    (token,), (is_number,) = choose_tokens(torch.from_numpy(logits)[None], rows)
    assert is_number
    return token


def test_neutral_parameters_are_the_likeliest() -> None:
    assert chosen(SamplingParams()) == 1
    assert chosen(SamplingParams(top_k=1, temperature=5.0)) == 1
    assert not SamplingParams(temperature=1.0, top_k=3, top_p=0.5, min_p=0.1).changes_logits


@pytest.mark.parametrize(
    ("choosing", "row", "expected"),
    [
        (SamplingParams(logit_bias=((2, 1.5), (1, -0.25))), {}, [1.0, 2.75, 3.5, -1.0]),
        (
            SamplingParams(repetition_penalty=2.0),
            {"prompt": (1, 3), "counts": {2: 1}},
            [1.0, 1.5, 1.0, -2.0],
        ),
        (SamplingParams(frequency_penalty=0.5), {"counts": {1: 3, 0: 1}}, [0.5, 1.5, 2.0, -1.0]),
        (
            SamplingParams(presence_penalty=0.5),
            {"prompt": (2,), "counts": {1: 3, 0: 0}},
            [1.0, 2.5, 2.0, -1.0],
        ),
    ],
)
def test_logits_are_changed_by_hand(
    choosing: SamplingParams, row: dict[str, object], expected: list[float]
) -> None:
    before = LOGITS.copy()
    found = adjusted(LOGITS, SamplingRow(choosing, 5, **row), None)  # type: ignore[arg-type]
    assert found.tolist() == expected
    assert np.array_equal(LOGITS, before), "the logits themselves stay"


@pytest.mark.parametrize(
    ("width", "expected"),
    [(1.0, [-math.inf, 3.0, 2.0, -math.inf]), (1.4, [1.0, 3.0, 2.0, -math.inf]), (9.0, LOGITS)],
)
def test_top_n_sigma_keeps_logits_near_the_largest(width: float, expected: list[float]) -> None:
    """Sigma of 1, 3, 2 and -1 is 1.479; masked tokens do not count."""
    sampling = SamplingParams(temperature=2.0, top_n_sigma=width)
    padded, mask = np.append(LOGITS, [50.0, math.nan]).astype(np.float32), np.arange(6) != 4
    found = adjusted(padded, SamplingRow(sampling, 5), mask)
    assert found[:4].tolist() == list(expected)
    assert not replace(sampling, temperature=0.0).changes_logits, "the largest logit stays"


def test_an_end_token_waits_until_there_are_enough_tokens() -> None:
    choosing = SamplingParams(min_tokens=2, stop_token_ids=(1,))
    assert [chosen(choosing, prompt=(0, 0, 0), position=at) for at in (3, 4, 5)] == [2, 2, 1]


def test_a_mask_is_applied_before_the_bias_and_kept() -> None:
    mask = np.array([True, False, False, True])
    rows = [SamplingRow(SamplingParams(logit_bias=((1, 100.0),)), 0)]
    assert choose_tokens(torch.from_numpy(LOGITS)[None], rows, [mask]) == ([0], [True])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_number_say_so(temperature: float) -> None:
    logits = torch.tensor([[math.nan] * 3, [-math.inf] * 3, [0.0, math.nan, 1.0]])
    rows = [SamplingRow(SamplingParams(temperature=temperature), 0)] * 3
    _, is_number = choose_tokens(logits[:2], rows[:2])
    assert is_number == [False, False]
    tokens, is_number = choose_tokens(logits[2:], rows[2:], [np.ones(3, dtype=bool)])
    assert is_number == [True] and tokens[0] in (0, 2)


ANY_ROW = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 12),
    top_p=st.floats(0.05, 1.0),
    min_p=st.sampled_from([0.0, 0.1, 0.9]),
    top_n_sigma=st.sampled_from([0.0, 0.5, 2.0]),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.9]),
    frequency_penalty=st.sampled_from([-1.0, 0.0, 0.7]),
    presence_penalty=st.sampled_from([-1.0, 0.0, 0.7]),
    logit_bias=st.lists(st.tuples(st.integers(0, 9), st.floats(-5, 5)), max_size=3).map(tuple),
    seed=st.integers(-(2**63), 2**63 - 1),
    stop_token_ids=st.sets(st.integers(0, 9), max_size=2).map(tuple),
    min_tokens=st.integers(0, 4),
)
VALUES = st.lists(st.floats(-8, 8, width=32), min_size=10, max_size=10)


@given(ANY_ROW, VALUES, st.lists(st.booleans(), min_size=10, max_size=10), st.integers(2, 9))
def test_what_is_masked_is_never_chosen_and_neighbours_change_nothing(
    choosing: SamplingParams, values: list[float], allowed: list[bool], position: int
) -> None:
    logits, mask = torch.tensor([values] * 2), np.array(allowed)
    row = SamplingRow(choosing, position, (1, 2), {3: 2, 5: 1})
    tokens, is_number = choose_tokens(logits, [SamplingRow(SamplingParams(), 0), row], [None, mask])
    assert is_number[1] == mask.any()
    if is_number[1]:
        assert mask[tokens[1]]
        is_early = choosing.min_tokens > position - 2
        others = [at for at in np.flatnonzero(mask) if at not in choosing.stop_token_ids]
        assert not (is_early and others and tokens[1] in choosing.stop_token_ids)
    assert ([tokens[1]], [is_number[1]]) == choose_tokens(logits[1:], [row], [mask])


@given(VALUES, st.sampled_from([0.0, 0.4, 1.0]), st.integers(0, 2**40), st.integers(0, 99))
def test_neutral_parameters_choose_the_same_in_every_way_of_choosing(
    values: list[float], temperature: float, seed: int, position: int
) -> None:
    """Greedy or temperature alone, all filters at their neutral values, and all changes of logits
    at theirs: one token.
    """
    logits = torch.tensor([values])
    plain = SamplingParams(temperature=temperature, seed=seed)
    neutral = replace(plain, top_k=10, top_p=1.0, min_p=0.0, logit_bias=((4, 0.0),), min_tokens=1)
    rows = [SamplingRow(each, position + 9, (1,) * 3, {2: 1}) for each in (plain, neutral)]
    masks = [None, np.ones(10, dtype=bool)]
    found = [choose_tokens(logits, [row], [mask]) for row in rows for mask in masks]
    assert all(each == found[0] for each in found)
    by_operator = sample(
        logits,
        torch.tensor([temperature]),
        torch.tensor([0]),
        torch.tensor([1.0]),
        torch.tensor([seed]),
        torch.tensor([position + 9]),
    )
    assert by_operator.tolist() == found[0][0]


def test_min_p_leaves_what_is_likely_enough() -> None:
    weights = np.exp(LOGITS - 3.0)
    for least in (0.05, 0.2, 0.5):
        kept = {draw(LOGITS, temperature=1.0, min_p=least, seed=s, position=0) for s in range(400)}
        assert kept == set(np.flatnonzero(weights >= least).tolist())


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.just(1.0) | st.floats(0.05, 1.0),
    st.just(0) | st.integers(1, 78) | st.integers(1, 3000),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0005, 1.0]),
)
def test_a_large_vocabulary_is_filtered_as_if_all_of_it_were_sorted(
    seed: int, top_p: float, top_k: int, min_p: float, temperature: float
) -> None:
    """The nucleus of a flat distribution is wider than what is sorted at first. Some lines have
    equal logits, no numbers in a whole group, or exponentials below the smallest number.
    """
    line = np.random.default_rng(seed % 7).normal(0, 0.3, 5000).astype(np.float32)
    if seed % 2:
        line = line.round(1)
    if seed % 3 == 0:
        line[7 :: 5000 // 64] = np.nan
    scaled = (line - np.nanmax(line)) / np.float32(temperature)
    weights = np.exp(np.nan_to_num(scaled, nan=-np.inf).astype(np.float64))
    weights[weights < min_p] = 0.0
    order = np.argsort(-weights, kind="stable")[: np.count_nonzero(weights)]
    kept = order[: top_k or len(order)]
    before = np.cumsum(weights[kept]) - weights[kept]
    kept = np.sort(kept[(before < top_p * weights[kept].sum()) | (np.arange(len(kept)) == 0)])
    cumulative = np.cumsum(weights[kept])
    at = np.searchsorted(cumulative, uniform(seed, 3) * cumulative[-1], side="right")
    expected = kept[min(at, len(kept) - 1)]
    found = draw(
        line,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=seed,
        position=3,
    )
    assert found == expected


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_a_number_near_the_bound_of_a_token_is_decided_exactly(
    top_p: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32 exponentials cannot decide it: sums of float64 exponentials do."""
    line = np.random.default_rng(0).normal(0, 2, 300).astype(np.float32)
    weights = np.exp((line - line.max()).astype(np.float64))
    order = np.argsort(-weights)
    size = np.searchsorted(np.cumsum(weights[order]), top_p * weights.sum()) + 1
    kept = np.sort(order[:size])
    shares = np.cumsum(weights[kept]) / weights[kept].sum()
    for place in range(len(kept) - 1):
        for number, expected in (
            (shares[place] - 1e-10, place),
            (shares[place] + 1e-10, place + 1),
        ):
            monkeypatch.setattr(rng, "uniform", lambda *_, number=number: number)
            assert draw(line, temperature=1.0, top_p=top_p) == kept[expected]
    for count, edge in enumerate(np.cumsum(weights[order])[:60] / weights.sum(), 1):
        kept, last = np.sort(order[: count + 1]), order[count]
        middle = weights[kept[kept < last]].sum() + weights[last] / 2
        number = middle / weights[kept].sum()
        monkeypatch.setattr(rng, "uniform", lambda *_, number=number: number)
        for share, has_last in ((edge - 1e-10, False), (edge + 1e-10, True)):
            assert (draw(line, temperature=1.0, top_p=share) == last) == has_last


def test_float32_exponentials_are_as_near_as_draws_assume() -> None:
    values = -np.random.default_rng(0).uniform(0, 87, 50_000).astype(np.float32)
    errors = np.exp(values) / np.exp(values.astype(np.float64)) - 1.0
    assert 2.0 * np.abs(errors).max() < rng._ROUGH_ERROR


def test_different_logits_with_equal_exponentials_are_ties() -> None:
    line = np.zeros(128, dtype=np.float32)
    line[100] = 1e-40
    assert draw(line, temperature=1.0, top_k=1) == 0


@pytest.mark.parametrize("num_top", [0, 1, 20, 300, 5000])
@pytest.mark.parametrize("has_ties", [False, True])
def test_log_probabilities_are_those_of_sorted_logits(num_top: int, has_ties: bool) -> None:
    line = np.random.default_rng(num_top).normal(0, 3, 5000).astype(np.float32)
    if has_ties:
        line = line.round(1)
        line[::3] = -np.inf
    values = line - line.max() - np.log(np.exp((line - line.max()).astype(np.float64)).sum())
    ((value, top),) = log_probabilities(line[None], [7], num_top)
    assert value == pytest.approx(values[7])
    assert [at for at, _ in top] == np.argsort(-line, kind="stable")[:num_top].tolist()
    assert [each for _, each in top] == pytest.approx([values[at] for at, _ in top])


def test_log_probabilities_by_hand() -> None:
    total = math.log(sum(math.exp(each) for each in LOGITS.tolist()))
    ((value, top),) = log_probabilities(torch.from_numpy(LOGITS)[None], [2], 2)
    assert value == pytest.approx(2.0 - total)
    assert top == ((1, pytest.approx(3.0 - total)), (2, pytest.approx(2.0 - total)))
    ties = torch.zeros(1, 5)
    assert [at for at, _ in log_probabilities(ties, [4], 3)[0][1]] == [0, 1, 2]
    line = np.array([[math.nan, -math.inf, -math.inf, 0.0]], dtype=np.float32)
    assert log_probabilities(line, [3], 2) == [(0.0, ((3, 0.0), (1, -math.inf)))]
