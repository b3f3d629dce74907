"""Held weights back as rows: the very values, and nothing written beside them."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.targets.cuda.kernels.matmul.dequantise import dequantise
from tilewright.compiler.targets.cuda.weights.packing import hold, unpack

NAN = float("nan")
KINDS = ["bf16", "bfp8", "bfp4"]


def wide_range(kind: str, size: tuple[int, int]) -> torch.Tensor:
    """Every exponent that a kind may hold, blocks of zeros among them."""
    low, high = (-126, 0) if kind == "bfp8" else (-123, 0)
    powers = torch.randint(low, high, (size[0], -(-size[1] // 16)))
    scale = torch.exp2(powers.float()).repeat_interleave(16, dim=1)[:, : size[1]]
    dense = torch.randn(size).clamp(-1.9, 1.9).mul(scale)
    dense[:, ::16] = scale[:, ::16]
    dense[torch.rand(size) < 0.1] = 0.0
    dense[size[0] // 2] = 0.0
    return torch.where(dense.abs() < 2.0**low, 0.0, dense)


def check(kind: str, size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    held = hold(wide_range(kind, size).to(device), kind, paired=False)
    around = torch.full((size[0], size[1] // 8 * 8 + 16), NAN, dtype=dtype, device=device)
    out = around[:, : size[1]]
    dequantise(out, held)
    assert torch.equal(out.float(), unpack(held))
    assert bool(around[:, size[1] :].isnan().all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [(16, 128), (17, 200), (33, 640), (5, 1), (40, 1040)])
@pytest.mark.parametrize("kind", KINDS)
def test_values(kind: str, size: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    check(kind, size, dtype, device)


@pytest.mark.parametrize("kind", KINDS)
def test_pairs_stay_in_turns(kind: str, device: torch.device) -> None:
    dense = torch.randn(48, 100, device=device) * 0.1
    held = hold(dense, kind, paired=True)
    out = torch.full((48, 100), NAN, device=device)  # rows of 400 bytes
    dequantise(out, held)
    assert torch.equal(out, unpack(held))
    plain = unpack(hold(dense, kind, paired=False))
    assert torch.equal(out[8:16], plain[24:32])


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(28672, 4096), (4096, 14336), (128256, 2048), (5, 3000)])
@pytest.mark.parametrize("kind", KINDS)
def test_values_of_real_shapes(kind: str, size: tuple[int, int], device: torch.device) -> None:
    check(kind, size, torch.bfloat16, device)
