"""x * sigmoid(gate) against float64, between other columns."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.targets.cuda.kernels.elementwise.sigmoid_gate import sigmoid_gate

NAN = float("nan")


@pytest.mark.parametrize("gates", [1, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates(gates: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(3, 304, device=device).to(dtype)[:, :300]
    gate = torch.randn(3, 310, device=device)[:, 5 : 5 + gates]
    out = torch.full((3, 302), NAN, dtype=dtype, device=device)
    sigmoid_gate(out[:, :300], x, gate)
    want = x.double() * gate.double().sigmoid()
    epsilon = 2.0**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(out[:, :300].double(), want, rtol=epsilon, atol=1e-6)
    assert bool(out[:, 300:].isnan().all())
