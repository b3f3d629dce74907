"""Attention against torch's, and over a cache against the stateless one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compiler import ops

T, D = 9, 8
SCALE = 0.3


def qkv(num_heads: int, num_kv_heads: int, length: int = T) -> tuple[torch.Tensor, ...]:
    return (
        torch.randn(length, num_heads, D),
        torch.randn(length, num_kv_heads, D),
        torch.randn(length, num_kv_heads, D),
    )


def torchs(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int = 0) -> torch.Tensor:
    at = torch.arange(len(q))
    distance = at[:, None] - at
    seen = (distance >= 0) & (distance < (window or len(q)))
    q_HTD, k_GTD, v_GTD = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q_HTD, k_GTD, v_GTD, attn_mask=seen, scale=SCALE, enable_gqa=True
    )
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("window", [0, 1, 4, 100])
def test_attention_is_torchs(heads: tuple[int, int], window: int) -> None:
    q, k, v = qkv(*heads)
    got = ops.attention(q, k, v, SCALE, window)
    torch.testing.assert_close(got, torchs(q, k, v, window), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [0, 4])
def test_a_soft_cap_is_a_tanh_of_the_scores(window: int) -> None:
    q, k, v = qkv(2, 2)
    at = torch.arange(T)
    distance = at[:, None] - at
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    scores = 0.7 * torch.tanh(scores / 0.7)
    scores = scores.masked_fill((distance < 0) | (distance >= (window or T)), float("-inf"))
    expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
    got = ops.attention(q, k, v, SCALE, window, 0.7)
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=1e-5)
    assert not torch.allclose(got, ops.attention(q, k, v, SCALE, window), atol=1e-3)


def test_a_window_matters() -> None:
    q, k, v = qkv(2, 2)
    assert not torch.allclose(ops.attention(q, k, v, SCALE), ops.attention(q, k, v, SCALE, 3))


def run_chunks(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sizes: list[int], window: int = 0
) -> torch.Tensor:
    """The same sequence through a cache in slot 1 of 3, piece by piece."""
    cache = torch.full((3, 2, 32, k.shape[1], D), float("nan"))
    parts, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        step = (torch.arange(start, start + size), torch.tensor([0, size]), torch.tensor([1]))
        parts.append(ops.attention_step(q[part], k[part], v[part], cache, *step, SCALE, window))
        start += size
    assert cache[[0, 2]].isnan().all(), "another slot was written"
    return torch.cat(parts)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from([0, 2, 5]))
def test_chunks_are_the_whole(sizes: list[int], window: int) -> None:
    q, k, v = qkv(4, 2, sum(sizes))
    got = run_chunks(q, k, v, sizes, window)
    torch.testing.assert_close(got, ops.attention(q, k, v, SCALE, window), atol=1e-5, rtol=1e-5)


def test_a_step_of_several_sequences_is_each_alone() -> None:
    lengths, slots = [3, 1, 4], [2, 0, 1]
    q, k, v = qkv(4, 2, sum(lengths))
    bounds = [0, 3, 4, 8]
    cache = torch.zeros(3, 2, 16, 2, D)
    positions = torch.cat([torch.arange(n) for n in lengths])
    got = ops.attention_step(
        q, k, v, cache, positions, torch.tensor(bounds), torch.tensor(slots), SCALE
    )
    for first, last in pairwise(bounds):
        alone = ops.attention(q[first:last], k[first:last], v[first:last], SCALE)
        torch.testing.assert_close(got[first:last], alone)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("interleaved", [False, True])
def test_the_fused_form_is_its_parts(packed: bool, interleaved: bool) -> None:
    q, k, v = qkv(4, 2)
    inv_freq, positions = torch.rand(D // 2), torch.arange(T)
    step = (positions, torch.tensor([0, T]), torch.tensor([0]))
    caches = [torch.zeros(1, 2, 16, 2, D) for _ in range(2)]
    turned = [ops.rope(x, positions, inv_freq, interleaved) for x in (q, k)]
    expected = ops.attention_step(*turned, v, caches[0], *step, SCALE, 3)
    flat = [x.flatten(1) for x in (q, k, v)]
    first = (torch.cat(flat, dim=-1), None, None) if packed else flat
    got = ops.rope_attention_step(*first, caches[1], *step, inv_freq, 4, SCALE, 3, interleaved)
    torch.testing.assert_close(got, expected.flatten(1))
    torch.testing.assert_close(caches[1], caches[0])
