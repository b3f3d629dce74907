"""What a sample is: generator, filters, distribution, and what it does not depend on."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compiler.ops import sample
from tilewright.compiler.sampling.rng import uniform

MASK = 0xFFFFFFFF


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 as the paper writes it: an implementation of this test's own."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for round_number in range(10):
        if round_number:
            k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return [c0, c1, c2, c3]


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([MASK] * 4, [MASK] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_published_vectors(counter: list[int], key: list[int], expected: str) -> None:
    """The known answers that Random123 publishes for philox4x32 with 10 rounds."""
    assert " ".join(f"{word:08x}" for word in philox(counter, key)) == expected


def test_the_first_published_word() -> None:
    assert uniform(0, 0) == 0x6627E8D5 / 2**32


@given(st.integers(-(2**70), 2**70), st.integers(0, 2**64 - 1))
def test_uniform_is_the_first_word_of_philox(seed: int, position: int) -> None:
    counter = [position & MASK, position >> 32, 0, 0]
    key = [seed & MASK, (seed >> 32) & MASK]
    assert uniform(seed, position) == philox(counter, key)[0] / 2**32
    assert 0.0 <= uniform(seed, position) < 1.0


def test_uniform_is_spread_evenly() -> None:
    """Chi-square over 64 bins of 20,000 positions: 63 degrees, 5 standard deviations."""
    for seed in (0, 1, 2**40):
        counts = Counter(int(uniform(seed, position) * 64) for position in range(20_000))
        expected = 20_000 / 64
        chi = sum((counts[bin_] - expected) ** 2 / expected for bin_ in range(64))
        assert abs(chi - 63) < 5 * math.sqrt(2 * 63)


def choose(
    logits: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    positions: list[int] | None = None,
) -> list[int]:
    """One row of logits, sampled for every position."""
    wanted = positions if positions is not None else [0]
    rows = len(wanted)
    tokens: torch.Tensor = sample(
        logits.expand(rows, -1).contiguous(),
        torch.full((rows,), temperature),
        torch.full((rows,), top_k),
        torch.full((rows,), top_p),
        torch.full((rows,), seed),
        torch.tensor(wanted),
    )
    return tokens.tolist()


def test_greedy_is_argmax_and_the_first_of_equals() -> None:
    logits = torch.randn(31)
    assert choose(logits, temperature=0.0) == [int(logits.argmax())]
    assert choose(torch.tensor([0.0, 2.0, 2.0]), temperature=0.0) == [1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-38, 1e-44])
def test_a_tiny_temperature_is_nearly_greedy(temperature: float) -> None:
    logits = torch.tensor([-100.0, 30.0, 29.0, 100.0, -3.0])
    assert set(choose(logits, temperature=temperature, positions=list(range(50)))) == {3}


def slow_support(logits: list[float], temperature: float, top_k: int, top_p: float) -> set[int]:
    """The tokens that may be chosen, by the definition of the filters, in plain Python."""
    ranked = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if 0 < top_k < len(logits):
        ranked = ranked[:top_k]
    largest = logits[ranked[0]]
    weights = [math.exp((logits[token] - largest) / temperature) for token in ranked]
    kept: set[int] = set()
    mass = 0.0
    for token, weight in zip(ranked, weights, strict=True):
        if kept and mass / sum(weights) >= top_p:
            break
        kept.add(token)
        mass += weight
    return kept


@given(
    st.lists(st.integers(-6, 6), min_size=2, max_size=8),
    st.sampled_from([0.5, 1.0, 2.0]),
    st.integers(0, 9),
    st.sampled_from([0.0, 0.131, 0.503, 0.771, 0.907, 1.0]),
    st.integers(0, 1000),
)
def test_filters_keep_what_their_definition_keeps(
    values: list[int], temperature: float, top_k: int, top_p: float, seed: int
) -> None:
    """Sampled tokens lie in the support, and the inverse CDF over it in id order gives them."""
    logits = [value / 3 for value in values]
    support = slow_support(logits, temperature, top_k, top_p)
    positions = list(range(20))
    chosen = choose(
        torch.tensor(logits),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        positions=positions,
    )
    weights = {token: math.exp(logits[token] / temperature) for token in sorted(support)}
    for position, token in zip(positions, chosen, strict=True):
        assert token in support
        below = sum(weight for other, weight in weights.items() if other < token)
        total = sum(weights.values())
        drawn = uniform(seed, position)
        assert below / total - 1e-5 <= drawn <= (below + weights[token]) / total + 1e-5


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.7, 0, 1.0), (1.0, 5, 1.0), (1.3, 0, 0.8)]
)
def test_frequencies_match_probabilities(temperature: float, top_k: int, top_p: float) -> None:
    """Chi-square over 6,000 positions stays within 5 standard deviations."""
    logits = torch.randn(12)
    support = sorted(slow_support(logits.tolist(), temperature, top_k, top_p))
    weights = (logits[support].double() / temperature).softmax(-1).tolist()
    count = 6000
    found = Counter(
        choose(
            logits,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=7,
            positions=list(range(count)),
        )
    )
    assert set(found) <= set(support)
    chi = sum(
        (found[t] - count * w) ** 2 / (count * w) for t, w in zip(support, weights, strict=True)
    )
    degrees = len(support) - 1
    assert chi < degrees + 5 * math.sqrt(2 * degrees)


def test_a_row_depends_on_its_seed_and_position_alone() -> None:
    rows = 6
    logits = torch.randn(rows, 40)
    settings = (
        torch.tensor([1.0, 0.0, 2.0, 0.5, 1.0, 1.0]),
        torch.tensor([0, 3, 5, 0, 40, 100]),
        torch.tensor([1.0, 1.0, 0.9, 0.5, 1.0, 0.99]),
        torch.tensor([1, 2, 3, 1, 2**62, -5]),
        torch.tensor([0, 9, 4, 11, 5, 5]),
    )
    together = sample(logits, *settings)
    assert torch.equal(together, sample(logits, *settings)), "the same twice"
    for row in range(rows):
        one = slice(row, row + 1)
        assert sample(logits[one], *(value[one] for value in settings)) == together[row]
    order = torch.tensor([4, 2, 0, 5, 3, 1])
    shuffled = sample(logits[order], *(value[order] for value in settings))
    assert torch.equal(shuffled, together[order])


def test_seeds_and_positions_make_a_difference() -> None:
    logits = torch.zeros(1000)
    first = choose(logits, seed=1, positions=list(range(20)))
    assert len(set(first)) > 15
    assert first != choose(logits, seed=2, positions=list(range(20)))
