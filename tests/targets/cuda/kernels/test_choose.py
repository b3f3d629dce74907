"""The next token: the first of the largest, and the samples that the operator defines."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compiler import ops
from tilewright.compiler.ops.choose import Row, choose_tokens
from tilewright.compiler.targets.cuda.kernels.choose import choose, num_keys, sample, uniform
from tilewright.compiler.targets.step import GOES_ON, NOT_A_NUMBER, Choosing

NAN, INF = float("nan"), float("inf")


def chosen(logits: torch.Tensor, ends: list[list[int]]) -> tuple[list[int], list[int]]:
    """`choose` with poisoned outputs and scratch, larger than it needs to be."""
    num_rows, vocabulary = logits.shape
    device = logits.device
    tokens = torch.full((num_rows,), -77, device=device)
    why = torch.full((num_rows,), 77, dtype=torch.uint8, device=device)
    scratch = torch.full((num_rows + 1, num_keys(vocabulary) + 2), 2**62, device=device)
    end_tokens = torch.tensor(ends, dtype=torch.int64, device=device).view(num_rows, -1)
    choose(tokens, why, logits, end_tokens=end_tokens, scratch=scratch)
    return tokens.tolist(), why.tolist()


@pytest.mark.parametrize("vocabulary", [1, 7, 4096, 4097, 13000])
def test_the_largest(vocabulary: int, device: torch.device) -> None:
    logits = torch.randn(3, vocabulary, device=device)
    tokens, why = chosen(logits, [[-1, -1]] * 3)
    assert tokens == logits.argmax(-1).tolist()
    assert why == [0] * 3


@pytest.mark.parametrize("first", [0, 5, 4095, 4096, 8999])
@pytest.mark.parametrize("value", [3.0, 0.0, -2.0, INF])
def test_the_first_of_equals_wins(first: int, value: float, device: torch.device) -> None:
    logits = torch.full((2, 9000), value - 1 if value < INF else 1e30, device=device)
    logits[0, first:] = value
    logits[1, first::7] = value
    assert chosen(logits, [[-1]] * 2)[0] == [first, first]


def test_zeros_of_both_signs_are_equal(device: torch.device) -> None:
    logits = torch.full((2, 50), -1.0, device=device)
    logits[0, 3], logits[0, 9] = -0.0, 0.0
    logits[1, 3], logits[1, 9] = 0.0, -0.0
    assert chosen(logits, [[-1]] * 2)[0] == [3, 3]


def test_rows_without_a_number_to_choose_are_told_apart(device: torch.device) -> None:
    """As `ops.choose_tokens` does: one NaN is enough, and so is nothing but minus infinity."""
    logits = torch.full((6, 5000), NAN, device=device)
    logits[1], logits[1, 4500] = -4.0, NAN
    logits[2], logits[2, 7] = -4.0, INF
    logits[3] = -INF
    logits[4], logits[4, 4999] = -INF, torch.finfo(torch.float32).min
    logits[5], logits[5, 3] = 1.0, torch.finfo(torch.float32).max
    tokens, why = chosen(logits, [[-1]] * 6)
    assert tokens == [0, 4500, 7, 0, 4999, 3]
    assert why == [NOT_A_NUMBER] * 4 + [GOES_ON] * 2
    expected = choose_tokens(logits.cpu(), [Row(Choosing(), 0)] * 6)
    assert (tokens, [each != NOT_A_NUMBER for each in why]) == expected


def test_end_tokens_are_the_rows_own(device: torch.device) -> None:
    logits = torch.zeros(4, 100, device=device)
    for row, token in enumerate((7, 99, 0, 7)):
        logits[row, token] = 1.0
    ends = [[7, -1, -1], [3, 5, 99], [-1, -1, -1], [8, 6, -1]]
    assert chosen(logits, ends) == ([7, 99, 0, 7], [1, 1, 0, 0])


def test_no_end_tokens_at_all(device: torch.device) -> None:
    assert chosen(torch.eye(3, device=device), [[], [], []]) == ([0, 1, 2], [0] * 3)


def test_rows_of_a_wider_tensor(device: torch.device) -> None:
    logits = torch.full((3, 120), INF, device=device)[:, :100]
    logits.copy_(torch.randn(3, 100, device=device))
    assert chosen(logits, [[-1]] * 3)[0] == logits.argmax(-1).tolist()


words = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.tuples(words, words), min_size=1, max_size=20))
def test_uniform_is_the_operators(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = torch.tensor(pairs).unbind(-1)
    expected = [ops.uniform(seed, position) for seed, position in pairs]
    assert uniform(seeds, positions).tolist() == expected


rows = st.tuples(
    st.sampled_from([0.0, 1e-30, 1e-3, 0.3, 0.7, 1.0, 1.7, 100.0]),
    st.one_of(st.sampled_from([0, 1, 2, 50]), st.integers(0, 400)),
    st.one_of(st.sampled_from([1.0, 1e-9, 0.5, 0.9]), st.floats(0.01, 1.0)),
    words,
    st.integers(0, 2**40),
)


@given(
    parameters=st.lists(rows, min_size=1, max_size=8),
    vocabulary=st.integers(1, 300),
    levels=st.sampled_from([1, 2, 5, 40, 10**6]),
    seed=st.integers(0, 2**20),
)
def test_samples_are_the_operators(
    parameters: list[tuple[float, int, float, int, int]], vocabulary: int, levels: int, seed: int
) -> None:
    """Logits of a few levels are full of ties; every row has parameters of its own."""
    generator = torch.Generator().manual_seed(seed)
    size = (len(parameters), vocabulary)
    logits = torch.randint(-levels, levels + 1, size, generator=generator) * (6.0 / levels)
    columns = list(zip(*parameters, strict=True))
    heat, top_p = torch.tensor(columns[0]), torch.tensor(columns[2])
    top_k, seeds, positions = (torch.tensor(columns[i]) for i in (1, 3, 4))
    arguments = (logits, heat, top_k, top_p, seeds, positions)
    assert sample(*arguments).tolist() == ops.sample.reference(*arguments).tolist()


@pytest.mark.parametrize(("number", "logits"), [(0.5, [0.0, 0.0]), (0.0, [-INF, 0.0])])
def test_a_number_on_the_edge_takes_the_next_token(
    number: float, logits: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interval of a token is closed below and open above; an empty one is never hit."""
    name = "tilewright.compiler.targets.cuda.kernels.choose.uniform"
    monkeypatch.setattr(name, lambda seeds, _: torch.full(seeds.shape, number).double())
    ones, zeros = torch.ones(1), torch.zeros(1, dtype=torch.int64)
    assert sample(torch.tensor([logits]), ones, zeros, ones, zeros, zeros).tolist() == [1]


def test_masked_logits_are_never_sampled(device: torch.device) -> None:
    logits = torch.full((64, 40), -INF, device=device)
    logits[:, 13], logits[:, 30] = 1.0, 1.0
    ones = torch.ones(64, device=device)
    seeds = torch.arange(64, device=device)
    picked = sample(logits, ones, torch.zeros_like(seeds), ones, seeds, seeds)
    assert set(picked.tolist()) == {13, 30}


def test_a_row_does_not_depend_on_its_neighbours(device: torch.device) -> None:
    logits = torch.randn(9, 200, device=device)
    heat = torch.linspace(0.0, 2.0, 9, device=device)
    top_k = torch.arange(9, device=device) * 10
    top_p = torch.linspace(1.0, 0.3, 9, device=device)
    seeds = torch.arange(9, device=device)
    arguments = (logits, heat, top_k, top_p, seeds, seeds * 3)
    together = sample(*arguments)
    for row in range(9):
        alone = sample(*(argument[row : row + 1] for argument in arguments))
        assert torch.equal(alone, together[row : row + 1])


@pytest.mark.gpu
def test_real_vocabularies(device: torch.device) -> None:
    logits = torch.randn(64, 151_936, device=device)
    logits[:, 100_000] = logits[:, 7] = 20.0
    assert chosen(logits, [[7]] * 64) == ([7] * 64, [True] * 64)


@pytest.mark.gpu
def test_sampling_in_a_captured_graph(device: torch.device) -> None:
    logits = torch.randn(32, 128_256, device=device)
    heat = torch.linspace(0.0, 1.5, 32, device=device)
    top_k = torch.arange(32, device=device) * 3
    top_p = torch.linspace(0.5, 1.0, 32, device=device)
    seeds, positions = torch.arange(32, device=device), torch.arange(32, device=device) + 100
    arguments = (logits, heat, top_k, top_p, seeds, positions)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        sample(*arguments)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sample(*arguments)
    positions += 1
    graph.replay()
    expected = ops.sample.reference(*(argument.cpu() for argument in arguments))
    # Sums are rounded otherwise here than there: a number on the edge of a token may fall over it.
    assert int((captured.cpu() != expected).sum()) <= 1
    assert math.isfinite(float(captured.double().sum()))
