"""The likeliest token of a row: the first of the largest."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.sampling.sampler import SamplingRow, choose_tokens
from tilewright.compiler.targets.cuda.kernels.sampling.argmax import choose, num_keys
from tilewright.compiler.targets.interface.step import GOES_ON, NOT_A_NUMBER

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
    """As `choose_tokens` does: one NaN is enough, and so is nothing but minus infinity."""
    logits = torch.full((6, 5000), NAN, device=device)
    logits[1], logits[1, 4500] = -4.0, NAN
    logits[2], logits[2, 7] = -4.0, INF
    logits[3] = -INF
    logits[4], logits[4, 4999] = -INF, torch.finfo(torch.float32).min
    logits[5], logits[5, 3] = 1.0, torch.finfo(torch.float32).max
    tokens, why = chosen(logits, [[-1]] * 6)
    assert tokens == [0, 4500, 7, 0, 4999, 3]
    assert why == [NOT_A_NUMBER] * 4 + [GOES_ON] * 2
    expected = choose_tokens(logits.cpu(), [SamplingRow(SamplingParams(), 0)] * 6)
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


@pytest.mark.gpu
def test_real_vocabularies(device: torch.device) -> None:
    logits = torch.randn(64, 151_936, device=device)
    logits[:, 100_000] = logits[:, 7] = 20.0
    assert chosen(logits, [[7]] * 64) == ([7] * 64, [True] * 64)
