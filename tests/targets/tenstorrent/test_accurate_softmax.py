"""Attention of Blackhole prompts with a float32 Dst."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.targets.tenstorrent.test_arithmetic import an_attention, normal
from tilewright.compiler.targets.tenstorrent.emulate import accurate_softmax, arithmetic
from tilewright.compiler.targets.tenstorrent.emulate.arithmetic import attend


@pytest.mark.parametrize(("accurate", "low", "high"), [(True, 0.17, 0.19), (False, 0.6, 0.8)])
def test_accurate_attention_has_the_published_error(
    accurate: bool, low: float, high: float
) -> None:
    """The vendor's table has 0.18 % on normal inputs."""
    length, rows = 1024, 64
    shapes = (rows, 1, 128), (length, 1, 128), (length, 1, 128)
    q, k, v = (normal(*shape, seed=seed).bfloat16() for seed, shape in enumerate(shapes))
    attention = an_attention(k_chunk=256, scale=128**-0.5)
    got = attend(q, k, v, length - rows, attention, sign_error=False, accurate=accurate)
    scores = q.double()[:, 0] @ k.double()[:, 0].T * attention.scale
    hidden = torch.arange(length) > torch.arange(length - rows, length).unsqueeze(1)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v.double()[:, 0]
    error = (got.double()[:, 0] - expected).norm() / expected.norm()
    assert low < 100 * error < high


def test_the_accurate_exponential_has_the_published_ripple() -> None:
    x = torch.linspace(-12, 0, 100_001)
    ratio = accurate_softmax.exponential(x, 1.0).double() / x.double().exp()
    assert ratio.mean().item() == pytest.approx(0.970, abs=5e-4)
    assert (ratio.max() - ratio.min()) / 2 / ratio.mean() < 0.0015
    zeros = accurate_softmax.exponential(torch.tensor([-22.0, -1e30, -torch.inf]), 1.0)
    assert not zeros.any()
    # A rounded maximum can be below a score.
    assert 1.0 < accurate_softmax.exponential(torch.tensor(0.1), 1.0) < 1.1


def test_accurate_attention_writes_bfloat16_and_casts() -> None:
    q, k, v = (normal(*shape).bfloat16() for shape in ((3, 4, 32), (3, 2, 32), (3, 2, 32)))
    attention = an_attention()
    wide = attend(q, k, v, 0, attention, accurate=True)
    narrow = replace(attention, out=replace(attention.out, format="bfp8"))
    assert torch.equal(attend(q, k, v, 0, narrow, accurate=True), arithmetic.cast(wide, "bfp8"))
    assert torch.equal(arithmetic.cast(wide, "bf16"), wide)
