"""Causal convolution and the gated delta rule: transformers' results, in one go, token by token,
and in chunks of any length.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from tilewright.compiler import ops
from tilewright.compiler.ops import delta_rule

G, H, K, V = 2, 4, 8, 12
WIDTH = 2 * G * K + H * V


def operands(num_tokens: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """qkv, a, b, a_log and dt_bias."""
    torch.manual_seed(seed)
    qkv, a, b = (torch.randn(num_tokens, width) for width in (WIDTH, H, H))
    return qkv, a, b, torch.rand(H).log() + 1, torch.randn(H)


@pytest.mark.parametrize("theirs", [torch_chunk_gated_delta_rule, torch_recurrent_gated_delta_rule])
@pytest.mark.parametrize("num_tokens", [1, 63, 150])
def test_the_rule_is_transformers(theirs: Any, num_tokens: int) -> None:
    qkv, a, b, a_log, dt_bias = given_ = operands(num_tokens)
    q, k, v = qkv.split((G * K, G * K, H * V), dim=-1)
    heads = [each.view(1, num_tokens, G, K) for each in (q, k)]
    heads = [each.repeat_interleave(H // G, dim=2) for each in heads]
    decay = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias)
    expected, _ = theirs(
        *heads,
        v.view(1, num_tokens, H, V),
        g=decay[None],
        beta=b.sigmoid()[None],
        initial_state=None,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    got = ops.gated_delta_rule(*given_, G, K)
    torch.testing.assert_close(got, expected[0], atol=2e-5, rtol=0)


def test_the_pieces_of_a_step() -> None:
    found = list(delta_rule.pieces(torch.tensor([0, 3, 4]), torch.tensor([2, 0])))
    assert found == [(slice(0, 3), 2), (slice(3, 4), 0)]


@pytest.mark.parametrize("chunk", [1, 2, 5, 16, 64, 200])
def test_chunks_of_any_size_are_the_recurrence(chunk: int) -> None:
    qkv, a, b, a_log, dt_bias = operands(130)
    heads = delta_rule.split_heads(qkv, G, K, H)
    gates = delta_rule.gates(a, b, a_log, dt_bias)
    before = torch.randn(H, K, V)
    expected, after = delta_rule.recurrent_delta_rule(*heads, *gates, before)
    got, state = delta_rule.chunked_delta_rule(*heads, *gates, before, chunk)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)
    torch.testing.assert_close(state, after, atol=2e-5, rtol=0)


def test_a_state_that_fades_at_once_stays_finite() -> None:
    """exp of a large negative sum is 0; differences of such sums must not be infinite."""
    qkv, a, b, _, dt_bias = operands(100)
    out = ops.gated_delta_rule(qkv, a + 50, b, torch.full((H,), 3.0), dt_bias, G, K)
    assert out.isfinite().all()


def stepwise(operator: Any, rows: Any, rest: Any, state: Tensor, lengths: list[int]) -> Tensor:
    """One sequence in slot 1 of three, in steps of these lengths; other slots stay as they are."""
    found, others = [], state[::2].clone()
    for first, last in pairwise([0, *torch.tensor(lengths).cumsum(0).tolist()]):
        where = torch.arange(first, last), torch.tensor([0, last - first]), torch.tensor([1])
        found.append(operator(*(each[first:last] for each in rows), *rest, state, *where))
    assert torch.equal(state[::2], others)
    return torch.cat(found)


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=6)


@settings(deadline=None)
@given(LENGTHS)
def test_steps_of_any_lengths_go_on_from_the_state(lengths: list[int]) -> None:
    qkv, a, b, a_log, dt_bias = operands(sum(lengths))
    expected = ops.gated_delta_rule(qkv, a, b, a_log, dt_bias, G, K)
    state = torch.randn(3, H, K, V)  # what is left of a sequence before
    rest = a_log, dt_bias, G, K
    got = stepwise(ops.gated_delta_rule_step, (qkv, a, b), rest, state, lengths)
    torch.testing.assert_close(got, expected, atol=2e-5, rtol=0)


@settings(deadline=None)
@given(LENGTHS, st.integers(2, 5))
def test_a_convolution_in_steps_is_one_in_one_go(lengths: list[int], width: int) -> None:
    x, weight = torch.randn(sum(lengths), 6), torch.randn(6, 1, width)
    padded = torch.cat((torch.zeros(width - 1, 6), x))
    windows = padded.unfold(0, width, 1)
    expected = torch.nn.functional.silu((windows * weight[:, 0]).sum(-1))
    torch.testing.assert_close(ops.causal_conv1d(x, weight), expected, atol=1e-5, rtol=1e-5)
    window = torch.randn(3, 6, width - 1)

    def step(x: Tensor, window: Tensor, *where: Tensor) -> Tensor:
        return ops.causal_conv1d_step(x, weight, window, *where)

    got = stepwise(step, (x,), (), window, lengths)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert torch.equal(window[1], padded[-(width - 1) :].T)


def test_sequences_of_a_step_do_not_meet() -> None:
    """Two that go on and one that begins, in one step, each as alone."""
    qkv, a, b, a_log, dt_bias = operands(12)
    state = torch.randn(4, H, K, V)
    alone = state.clone()
    bounds, slots, firsts = [0, 5, 6, 12], [2, 0, 3], [4, 9, 0]
    positions = torch.cat([f + torch.arange(n) for f, n in zip(firsts, (5, 1, 6), strict=True)])
    rest = a_log, dt_bias, G, K
    where = positions, torch.tensor(bounds), torch.tensor(slots)
    together = ops.gated_delta_rule_step(qkv, a, b, *rest, state, *where)
    for (first, last), slot in zip(pairwise(bounds), slots, strict=True):
        part = slice(first, last)
        where = positions[part], torch.tensor([0, last - first]), torch.tensor([slot])
        one = ops.gated_delta_rule_step(qkv[part], a[part], b[part], *rest, alone, *where)
        torch.testing.assert_close(together[part], one)
    assert torch.equal(state, alone)
