"""RMSNorm with a matmul in one launch: the norm's bits, and the product of the rounded norm."""

from __future__ import annotations

import pytest
import torch

from tests.targets.cuda.kernels.test_gemv_triton import assert_near, expected, poisoned, weight
from tilewright.compiler.targets.cuda.kernels.elementwise.norm import rms_norm
from tilewright.compiler.targets.cuda.kernels.matmul.norm_linear_triton import norm_linear, takes
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight


@pytest.mark.parametrize(("num_tokens", "size"), [(1, (40, 200)), (3, (7, 64)), (8, (33, 576))])
def test_norm_linear_is_the_norm_then_the_matmul(
    num_tokens: int, size: tuple[int, int], device: torch.device
) -> None:
    packed, norm = weight("bf16", size, device), torch.randn(size[1], device=device)
    x = torch.randn(num_tokens, size[1] + 4, device=device)[:, : size[1]]
    (out, around), (normed, beyond) = (
        poisoned((num_tokens, width), device, dtype)
        for width, dtype in ((size[0], torch.float32), (size[1], torch.bfloat16))
    )
    norm_linear(out, normed, x, packed, norm, eps=1e-5)
    wanted, _ = poisoned((num_tokens, size[1]), device, torch.bfloat16)
    rms_norm(wanted, x, norm, eps=1e-5)
    # The order of summation may differ by a rounding.
    torch.testing.assert_close(normed, wanted, rtol=2.0**-7, atol=0)
    assert_near(out, expected(normed, packed))
    assert bool(around[:, size[0] :].isnan().all() and beyond[:, size[1] :].isnan().all())


def test_takes_small_bfloat16_weights_only() -> None:
    sizes = {"router": (257, 2048), "rows": (4096, 2048), "columns": (256, 8192)}
    found = {
        name: takes(PackedWeight("bf16", *size, torch.empty(0))) for name, size in sizes.items()
    }
    assert found == {"router": True, "rows": False, "columns": False}
    assert not takes(PackedWeight("bfp8", 256, 2048, torch.empty(0)))
