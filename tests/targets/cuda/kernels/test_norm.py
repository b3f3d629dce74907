"""RMSNorm against float64, in both output formats and at odd widths."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.targets.cuda.kernels.elementwise.norm import rms_norm, rms_norm_heads

NAN = float("nan")


def reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.double()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def check(num_rows: int, width: int, device: torch.device) -> None:
    x = torch.full((num_rows, width + 4), NAN, device=device)[:, :width]
    x.copy_(torch.randn(num_rows, width, device=device) * 10)
    weight = torch.randn(width, device=device)
    exact = torch.full((num_rows, width + 2), NAN, device=device)
    rms_norm(exact, x, weight, eps=1e-5)
    torch.testing.assert_close(
        exact[:, :width].double(), reference(x, weight, 1e-5), rtol=3e-6, atol=1e-30
    )
    assert bool(exact[:, width:].isnan().all())
    narrow = torch.full((num_rows, width + 2), NAN, dtype=torch.bfloat16, device=device)
    rms_norm(narrow, x, weight, eps=1e-5)
    assert torch.equal(narrow[:, :width], exact[:, :width].bfloat16())
    assert bool(narrow[:, width:].isnan().all())


@pytest.mark.parametrize("width", [1, 64, 80, 576, 1000])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_norm(num_rows: int, width: int, device: torch.device) -> None:
    check(num_rows, width, device)


def test_eps_counts(device: torch.device) -> None:
    """Values whose squares are far below eps, and a row of zeros."""
    x = torch.full((2, 32), 1e-4, device=device)
    x[1] = 0.0
    weight = torch.full((32,), 2.0, device=device)
    out = torch.full((2, 32), NAN, device=device)
    rms_norm(out, x, weight, eps=1e-2)
    torch.testing.assert_close(out.double(), reference(x, weight, 1e-2), rtol=3e-6, atol=0.0)


def test_a_row_is_the_same_in_every_batch(device: torch.device) -> None:
    x, weight = torch.randn(7, 300, device=device), torch.randn(300, device=device)
    whole, alone = torch.empty_like(x), torch.empty_like(x[:1])
    rms_norm(whole, x, weight, eps=1e-5)
    rms_norm(alone, x[4:5], weight, eps=1e-5)
    assert torch.equal(alone, whole[4:5])


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2048, 4096, 8192, 14336, 16384])
def test_norm_of_real_shapes(width: int, device: torch.device) -> None:
    check(64, width, device)


@pytest.mark.parametrize("head_dim", [16, 80, 128])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(1, 1), (3, 1), (4, 2)])
def test_heads_of_q_and_k_are_normed_in_place(
    head_dim: int, num_heads: int, num_kv_heads: int, device: torch.device
) -> None:
    """Values of v stay, and so does what lies beside the rows."""
    count = num_heads + 2 * num_kv_heads
    rows = torch.full((3, count * head_dim + 5), NAN, device=device)
    qkv = rows[:, : count * head_dim]
    qkv.copy_(torch.randn(qkv.shape, device=device) * 10)
    q_weight, k_weight = torch.randn(2, head_dim, device=device)
    heads = qkv.clone().unflatten(-1, (count, head_dim))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    expected = torch.cat((reference(q, q_weight, 1e-5), reference(k, k_weight, 1e-5), v), dim=1)
    between = rows.clone()[:, : count * head_dim]
    apart = torch.full((3, count * head_dim + 2), NAN, device=device)
    arguments = (q_weight, k_weight)
    rms_norm_heads(apart[:, :-2], between, *arguments, num_heads=num_heads, eps=1e-5)
    rms_norm_heads(qkv, qkv, *arguments, num_heads=num_heads, eps=1e-5)
    assert torch.equal(apart[:, :-2], qkv) and bool(apart[:, -2:].isnan().all())
    torch.testing.assert_close(qkv.double(), expected.flatten(1), rtol=3e-6, atol=1e-30)
    assert torch.equal(qkv.unflatten(-1, (count, head_dim))[:, num_heads + num_kv_heads :], v)
    assert bool(rows[:, count * head_dim :].isnan().all())
