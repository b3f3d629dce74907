"""Sampled tokens equal the operator's, for equal random numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.sampling.rng import uniform
from tilewright.compiler.sampling.sampler import SamplingRow, choose_tokens
from tilewright.compiler.targets.cuda.kernels.sampling import cutoff as search
from tilewright.compiler.targets.cuda.kernels.sampling import sample
from tilewright.compiler.targets.cuda.outputs.sampling_batch import (
    SamplingBatch,
    SamplingFilters,
    drawing_of,
    make_choice,
)
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable
from tilewright.compiler.targets.interface.step import END_TOKEN, GOES_ON, NOT_A_NUMBER, Slot

INF, NAN = float("inf"), float("nan")
CPU = torch.device("cpu")


def choice_of(
    rows: Sequence[SamplingParams],
    positions: Sequence[int],
    vocabulary: int,
    *,
    chunk: int = 128,
    device: torch.device = CPU,
) -> SamplingBatch:
    """Return sampling parameters with small chunks, to get several chunks."""
    table = SlotTable(len(rows), 3, device)
    slots = [Slot(row) for row in range(len(rows))]
    table.open(dict(zip(slots, rows, strict=True)))
    made = make_choice(len(rows), vocabulary, 3, device)
    made.tokens.fill_(-7)
    scratch = search.SearchScratch.empty(len(rows), vocabulary, device, chunk=chunk)
    for poisoned in (scratch.numbers, scratch.sums, scratch.weights):
        poisoned.fill_(NAN)
    for poisoned in (scratch.keys, scratch.counts, scratch.ties):
        poisoned.fill_(-1234567)
    choice = replace(made, scratch=scratch)
    choice.gather(table, table.index(slots))
    choice.positions.copy_(torch.tensor(positions))
    return choice


def drawn(
    logits: torch.Tensor, rows: Sequence[SamplingParams], positions: Sequence[int], **options: Any
) -> tuple[list[int], list[int]]:
    choice = choice_of(rows, positions, logits.shape[1], device=logits.device, **options)
    choice.apply(logits, drawing_of(rows))
    assert not choice.scratch.arrived.any()
    return choice.tokens.tolist(), choice.why.tolist()


def expected(
    logits: torch.Tensor, rows: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[list[int], list[bool]]:
    made = [SamplingRow(row, position) for row, position in zip(rows, positions, strict=True)]
    return choose_tokens(logits.cpu(), made)


shares = st.one_of(st.sampled_from([1.0, 1e-6, 0.5, 0.9]), st.floats(0.01, 1.0))
choosings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 1e-3, 0.3, 0.7, 1.0, 1.7, 100.0]),
    top_k=st.one_of(st.sampled_from([0, 1, 2, 50]), st.integers(0, 400)),
    top_p=shares,
    min_p=st.sampled_from([0.0, 0.0, 1e-3, 0.2, 1.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


def check_rows(parameters: list[Any], vocabulary: int, levels: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    size = (len(parameters), vocabulary)
    logits = torch.randint(-levels, levels + 1, size, generator=generator) * (6.0 / levels)
    if seed % 2:
        logits[:, seed % vocabulary] = -INF
    rows, positions = zip(*parameters, strict=True)
    wanted, is_number = expected(logits, rows, positions)
    tokens, why = drawn(logits, rows, positions)
    assert [each != NOT_A_NUMBER for each in why] == is_number
    pairs = zip(tokens, wanted, is_number, strict=True)
    assert all(one == other or not number for one, other, number in pairs), (tokens, wanted)


given_rows = given(
    parameters=st.lists(st.tuples(choosings, st.integers(0, 2**40)), min_size=1, max_size=2),
    vocabulary=st.integers(1, 250),
    levels=st.sampled_from([1, 2, 5, 40, 10**6]),
    seed=st.integers(0, 2**20),
)


@settings(max_examples=6)
@given_rows
def test_draws_are_the_operators(**drawn_from: Any) -> None:
    """Logits have many ties. Every row has its own parameters."""
    check_rows(**drawn_from)


@pytest.mark.slow
@settings(max_examples=300)
@given_rows
def test_many_draws_are_the_operators(**drawn_from: Any) -> None:
    check_rows(**drawn_from)


@pytest.mark.parametrize("spread", [0.0, 1e-20, 1e-7])
def test_logits_of_one_weight_are_taken_by_token(spread: float) -> None:
    """All logits are equal, or differ too little for float64, or only some do."""
    rows = [
        SamplingParams(temperature=1.0, top_k=3, seed=1),
        SamplingParams(temperature=1.0, top_p=0.5, seed=2),
    ]
    logits = torch.linspace(0.0, spread, 70).flip(0).unsqueeze(0).repeat(2, 1)
    assert drawn(logits, rows, [5] * 2)[0] == expected(logits, rows, [5] * 2)[0]


@pytest.mark.parametrize(("number", "logits"), [(0.5, [0.0, 0.0]), (0.0, [-INF, 0.0])])
def test_a_number_on_the_edge_takes_the_next_token(
    number: float, logits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token's interval includes its lower end and excludes its upper end.

    An empty interval is never selected.
    """
    begin = sample._begin_kernel

    class Told:
        def __getitem__(self, grid: tuple[int]) -> Any:
            def run(keys: torch.Tensor, numbers: torch.Tensor, *rest: Any, **options: Any) -> None:
                begin[grid](keys, numbers, *rest, **options)
                numbers[:, search.RANDOM.value] = number

            return run

    monkeypatch.setattr(sample, "_begin_kernel", Told())
    assert drawn(torch.tensor([logits]), [SamplingParams(temperature=1.0)], [0])[0] == [1]


def test_masked_logits_are_never_drawn() -> None:
    logits = torch.full((6, 40), -INF)
    logits[:, 13], logits[:, 30] = 1.0, 1.0
    rows = [SamplingParams(temperature=1.0, seed=seed) for seed in range(6)]
    assert set(drawn(logits, rows, range(6))[0]) == {13, 30}


def test_greedy_rows_and_those_without_a_number_are_let_be() -> None:
    logits = torch.zeros(4, 50)
    logits[0, 7], logits[1, 9], logits[2, 3], logits[3, 20] = 5.0, NAN, INF, 90.0
    hot = SamplingParams(temperature=1.0, top_k=2, top_p=0.5, stop_token_ids=(20,))
    tokens, why = drawn(logits, [SamplingParams(), hot, hot, hot], [3] * 4)
    assert (tokens[0], tokens[3]) == (7, 20)
    assert why == [GOES_ON, NOT_A_NUMBER, NOT_A_NUMBER, END_TOKEN]


def test_what_nobody_asks_for_is_not_searched_for() -> None:
    warm = SamplingParams(temperature=0.5)
    assert drawing_of([SamplingParams(top_k=3), SamplingParams()]) is None
    assert drawing_of([SamplingParams(), warm]) == SamplingFilters(False, False)
    assert drawing_of([warm, SamplingParams(temperature=1.0, top_p=0.9)]) == SamplingFilters(
        False, True
    )


@pytest.mark.gpu
@pytest.mark.parametrize("vocabulary", [128_256, 248_320])
def test_rows_of_real_vocabularies(vocabulary: int, device: torch.device) -> None:
    """10,000 sampled rows, in graphs, with and without other rows."""
    count, drawing = 64, SamplingFilters(True, True)
    differ = 0
    for at in range(20):
        generator = torch.Generator(device).manual_seed(at)
        logits = torch.randn(count, vocabulary, device=device, generator=generator) * (1 + at % 4)
        rows = [
            SamplingParams(
                temperature=(0.0, 0.6, 1.0, 1.5)[row % 4],
                top_k=(0, 20, 1000, 50_000)[row // 4 % 4],
                top_p=(1.0, 0.95, 0.5, 1e-6)[row // 16],
                min_p=(0.0, 0.05)[at % 2],
                seed=1000 * at + row,
            )
            for row in range(count)
        ]
        positions = [17 * row for row in range(count)]
        choice = choice_of(rows, positions, vocabulary, chunk=search.CHUNK, device=device)
        choice.apply(logits, drawing)
        found = choice.tokens.clone()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            choice.apply(logits, drawing)
        choice.tokens.zero_()
        graph.replay()
        assert torch.equal(choice.tokens, found)
        alone = drawn(logits[5:6], rows[5:6], positions[5:6], chunk=search.CHUNK)[0]
        assert alone == found[5:6].tolist()
        wanted = expected(logits, rows, positions)[0]
        differ += int((np.array(wanted) != np.array(found.tolist())).sum())
    # Sums round differently here, so a number at the end of an interval may select the neighbor.
    assert differ <= 1
    assert math.isfinite(float(logits.sum()))


def test_random_numbers_are_the_operators() -> None:
    """For all seeds and positions. Seeds are signed 64-bit integers."""
    pairs = [(0, 0), (-1, 2**40), (-5, 3), (-(2**63), 2**33 + 1), (123456789, 7)]
    rows = [SamplingParams(temperature=1.0, seed=seed) for seed, _ in pairs]
    choice = choice_of(rows, [position for _, position in pairs], 2)
    choice.apply(torch.zeros(len(pairs), 2), SamplingFilters(False, False))
    numbers = choice.scratch.numbers[:, search.RANDOM.value].tolist()
    assert numbers == [uniform(seed, position) for seed, position in pairs]
