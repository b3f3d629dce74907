"""Rows of the table, exactly, and nothing beside them."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.targets.cuda.kernels.elementwise.embedding import embed


@pytest.mark.parametrize(("num_tokens", "width"), [(1, 16), (3, 100), (5, 1), (2, 1500)])
def test_rows(num_tokens: int, width: int, device: torch.device) -> None:
    table = torch.randn(50, width + 7, device=device).bfloat16()
    table[:, width:] = float("nan")
    tokens = torch.randint(0, 50, (num_tokens,), device=device)
    tokens[-1] = 49
    around = torch.full((num_tokens, width + 3), float("nan"), device=device)
    embed(around[:, :width], tokens, table)
    assert torch.equal(around[:, :width], table[tokens, :width].float())
    assert bool(around[:, width:].isnan().all())


@pytest.mark.gpu
def test_rows_of_a_large_table(device: torch.device) -> None:
    """More than 2 ** 31 elements: offsets are 64 bits wide."""
    table = torch.zeros(300_000, 8192, dtype=torch.bfloat16, device=device)
    table[299_999] = torch.randn(8192, device=device)
    out = torch.full((2, 8192), float("nan"), device=device)
    embed(out, torch.tensor([299_999, 0], device=device), table)
    assert torch.equal(out, table[[299_999, 0]].float())
