"""The Triton matmul of many tokens with a block-format weight against float64."""

from __future__ import annotations

import pytest
import torch

from tests.grids import grid
from tests.targets.cuda.kernels.test_gemv_triton import (
    assert_near,
    expected,
    gated,
    poisoned,
    tokens,
    weight,
)
from tilewright.compiler.targets.cuda.kernels.matmul import gemm_block_triton
from tilewright.compiler.targets.cuda.kernels.matmul.gemm_block_triton import linear, split_scratch

KINDS = ["bfp8", "bfp4"]


@pytest.mark.parametrize(
    ("num_tokens", "size", "kind"),
    grid([(9, (40, 200)), (17, (160, 576)), (64, (7, 9)), (33, (64, 1024))], KINDS),
)
def test_linear_of_odd_sizes_is_near_float64(
    kind: str, num_tokens: int, size: tuple[int, int], device: torch.device
) -> None:
    packed, x = weight(kind, size, device), tokens((num_tokens, size[1]), device)
    scratch = split_scratch(device)
    out, around = poisoned((num_tokens, size[0]), device)
    linear(out, x, packed, scratch)
    assert_near(out, expected(x, packed))
    assert bool(around[:, size[0] :].isnan().all())
    assert not scratch.arrived.any()
    rounded, _ = poisoned((num_tokens, size[0]), device, torch.bfloat16)
    linear(rounded, x, packed, scratch)
    assert torch.equal(rounded, out.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_linear_of_one_hot_tokens_returns_the_weight(kind: str, device: torch.device) -> None:
    packed, x = weight(kind, (80, 300), device), torch.eye(300, device=device).bfloat16()
    scratch, out = split_scratch(device), torch.empty(300, 80, device=device)
    for first in range(0, 300, 64):
        linear(out[first : first + 64], x[first : first + 64], packed, scratch)
    assert torch.equal(out.T, expected(x, packed).T.float())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("max_splits", [1, 4])
def test_epilogues_follow_the_sum_of_splits(
    kind: str, max_splits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(gemm_block_triton._TUNING, "max_splits", max_splits)
    packed, x = weight(kind, (80, 200), device, paired=True), tokens((9, 200), device)
    scratch, bias = split_scratch(device), torch.randn(80, device=device)
    out, _ = poisoned((9, 80), device)
    linear(out, x, packed, scratch, bias=bias)
    assert_near(out, expected(x, packed) + bias)
    before = torch.randn(9, 80, device=device)
    total = before.clone()
    linear(total, x, packed, scratch, bias=bias, residual=True)
    assert torch.equal(total, before + out)
    halves, around = poisoned((9, 40), device, torch.bfloat16)
    linear(halves, x, packed, scratch, swiglu=True)
    assert_near(halves, gated(expected(x, packed)))
    assert bool(around[:, 40:].isnan().all())


@pytest.mark.parametrize(
    ("num_rows", "rows", "splits"),
    [(4096, 64, 4), (6144, 64, 2), (16384, 128, 2), (28672, 128, 1), (128256, 128, 1)],
)
def test_tiling_fills_the_gpu(num_rows: int, rows: int, splits: int) -> None:
    found = gemm_block_triton.tiling_of(num_rows, has_wgmma=True)
    assert (found.rows, found.splits) == (rows, splits)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [9, 16, 33, 64])
@pytest.mark.parametrize("size", [(6144, 4096), (4096, 14336), (28672, 4096), (128_256, 1024)])
def test_linear_of_real_shapes_repeats_its_bits(
    kind: str, num_tokens: int, size: tuple[int, int], device: torch.device
) -> None:
    packed, x = weight(kind, size, device, paired=True), tokens((num_tokens, size[1]), device)
    scratch = split_scratch(device)
    out, _ = poisoned((num_tokens, size[0]), device)
    linear(out, x, packed, scratch)
    torch.testing.assert_close(out.double(), expected(x, packed), rtol=1e-4, atol=1e-4)
    for _ in range(3):
        again, _ = poisoned((num_tokens, size[0]), device)
        linear(again, x, packed, scratch)
        assert torch.equal(again, out)
    halves, _ = poisoned((num_tokens, size[0] // 2), device, torch.bfloat16)
    linear(halves, x, packed, scratch, swiglu=True)
    torch.testing.assert_close(halves.double(), gated(out.double()), rtol=2.0**-8, atol=1e-5)
