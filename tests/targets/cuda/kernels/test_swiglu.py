"""silu(gate) * up against float64, in the three places its inputs may lie."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.targets.cuda.kernels.elementwise.swiglu import swiglu, swiglu_apart

NAN = float("nan")
DTYPES = [torch.bfloat16, torch.float32]


def check(gate: torch.Tensor, up: torch.Tensor, dtype: torch.dtype, place: str) -> None:
    num_rows, width = gate.shape
    around = torch.full((num_rows, width + 5), NAN, dtype=dtype, device=gate.device)
    out = around[:, :width]
    if place == "apart":
        swiglu_apart(out, gate, up)
    elif place == "halves":
        swiglu(out, torch.cat((gate, up), dim=1), paired=False)
    else:
        turns = torch.stack((gate.unflatten(1, (-1, 8)), up.unflatten(1, (-1, 8))), dim=2)
        swiglu(out, turns.flatten(1), paired=True)
    wide = gate.double()
    expected = wide / (1 + torch.exp(-wide)) * up.double()
    epsilon = 2.0**-8 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(out.double(), expected, rtol=epsilon, atol=1e-30)
    assert bool(around[:, width:].isnan().all())


@pytest.mark.parametrize("place", ["apart", "halves", "paired"])
@pytest.mark.parametrize("inner", DTYPES)
@pytest.mark.parametrize("outer", DTYPES)
@pytest.mark.parametrize("width", [8, 56, 1200])
def test_swiglu(
    width: int, inner: torch.dtype, outer: torch.dtype, place: str, device: torch.device
) -> None:
    gate = (torch.randn(3, width, device=device) * 4).to(inner)
    up = torch.randn(3, width, device=device).to(inner)
    check(gate, up, outer, place)


@pytest.mark.parametrize("place", ["apart", "halves"])
def test_odd_widths(place: str, device: torch.device) -> None:
    check(torch.randn(2, 13, device=device), torch.randn(2, 13, device=device), DTYPES[1], place)


def test_rounds_once_to_the_nearest(device: torch.device) -> None:
    gate, up = torch.randn(4, 64, device=device), torch.randn(4, 64, device=device)
    exact = torch.full((4, 64), NAN, device=device)
    swiglu_apart(exact, gate, up)
    rounded = torch.full((4, 64), NAN, dtype=torch.bfloat16, device=device)
    swiglu_apart(rounded, gate, up)
    assert torch.equal(rounded, exact.bfloat16())


def test_a_row_of_a_wider_tensor(device: torch.device) -> None:
    """Rows of the input further apart than they are long."""
    around = torch.full((3, 40), NAN, device=device)
    around[:, :32] = torch.randn(3, 32, device=device)
    out, expected = torch.empty(3, 16, device=device), torch.empty(3, 16, device=device)
    swiglu(out, around[:, :32], paired=True)
    swiglu(expected, around[:, :32].contiguous(), paired=True)
    assert torch.equal(out, expected)
    assert not bool(out.isnan().any())


@pytest.mark.parametrize("is_paired", [True, False])
def test_scales_of_tokens_and_columns(is_paired: bool, device: torch.device) -> None:
    """Powers of two in bfloat16 do not change the rounding."""
    gate_up = torch.randn(5, 48, device=device).bfloat16()
    x_scales, weight_scales = (
        torch.exp2(torch.arange(float(count), device=device) % 7 - 3)[:, None] for count in (5, 48)
    )
    out, expected = torch.full((2, 5, 24), NAN, dtype=torch.bfloat16, device=device)
    swiglu(out, gate_up, paired=is_paired, scales=(x_scales, weight_scales))
    swiglu(expected, gate_up * x_scales * weight_scales.T, paired=is_paired)
    assert torch.equal(out, expected) and out.isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["apart", "halves", "paired"])
def test_real_shapes(place: str, device: torch.device) -> None:
    gate = torch.randn(64, 14336, device=device).bfloat16()
    check(gate, torch.randn(64, 14336, device=device).bfloat16(), torch.bfloat16, place)
