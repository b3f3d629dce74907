"""The Triton matmul against float64: all formats, odd sizes, and all fused parts."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch

from tests.grids import grid
from tilewright.compiler.targets.cuda.kernels.matmul import gemv_triton
from tilewright.compiler.targets.cuda.kernels.matmul.gemv_triton import linear
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight
from tilewright.compiler.targets.cuda.weights.packing import hold, unpack

NAN = float("nan")
KINDS = ["bf16", "bfp8", "bfp4"]


def weight(
    kind: str, size: tuple[int, int], device: torch.device, *, paired: bool = False
) -> PackedWeight:
    dense = torch.randn(size, device=device) / size[1] ** 0.5
    return hold(dense, kind, paired=paired)


def tokens(size: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Return bfloat16 ``size`` with NaN gaps between rows."""
    around = torch.full((size[0], size[1] + 3), NAN, dtype=torch.bfloat16, device=device)
    around[:, : size[1]] = torch.randn(size, device=device)
    return around


def poisoned(
    size: tuple[int, int], device: torch.device, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return an output filled with NaN, and its surrounding memory."""
    around = torch.full((size[0], size[1] + 5), NAN, dtype=dtype, device=device)
    return around[:, : size[1]], around


def expected(x: torch.Tensor, held: PackedWeight) -> torch.Tensor:
    """Return the matmul in float64."""
    return x[:, : held.num_columns].double() @ unpack(held).double().T


def assert_near(got: torch.Tensor, want: torch.Tensor) -> None:
    """The tolerance is for float32 sums, and for rounding if the output is bfloat16."""
    epsilon = 2.0**-8 if got.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(got.double(), want, rtol=epsilon, atol=4e-6)


@pytest.mark.parametrize(
    ("num_tokens", "size", "kind"),
    grid(
        [
            (1, (40, 200)),
            (2, (16, 128)),
            (3, (33, 576)),
            (8, (64, 80)),
            (17, (48, 130)),
            (64, (7, 9)),
        ],
        KINDS,
    ),
)
def test_product(kind: str, num_tokens: int, size: tuple[int, int], device: torch.device) -> None:
    held, x = weight(kind, size, device), tokens((num_tokens, size[1]), device)
    out, around = poisoned((num_tokens, size[0]), device)
    linear(out, x, held)
    assert_near(out, expected(x, held))
    assert bool(around[:, size[0] :].isnan().all())
    rounded, _ = poisoned((num_tokens, size[0]), device, torch.bfloat16)
    linear(rounded, x, held)
    assert torch.equal(rounded, out.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_small_integers_are_exact(kind: str, device: torch.device) -> None:
    """Each weight element is selected by a one-hot token."""
    dense = torch.randint(-7, 8, (48, 300), device=device) / 8
    held = hold(dense, kind, paired=False)
    assert kind == "bfp4" or torch.equal(unpack(held), dense)
    x = torch.randint(-3, 4, (5, 300), device=device).bfloat16()
    out, _ = poisoned((5, 48), device)
    linear(out, x, held)
    assert torch.equal(out.double(), expected(x, held))
    one_hot = torch.eye(300, device=device, dtype=torch.bfloat16)
    picked, _ = poisoned((300, 48), device)
    linear(picked, one_hot, held)
    assert torch.equal(picked, unpack(held).T)


@pytest.mark.parametrize(
    ("kind", "segments"),
    [("bf16", 2), ("bf16", 4), ("bfp8", 2), ("bfp8", 16), ("bfp4", 2), ("bfp4", 16)],
)
def test_any_number_of_segments(
    kind: str, segments: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With all segments in each step (512 columns by 2), and with empty segments."""
    monkeypatch.setattr(gemv_triton, "segments_of", lambda packed: segments)
    held, x = weight(kind, (80, 512), device), tokens((3, 512), device)
    out, _ = poisoned((3, 80), device)
    linear(out, x, held)
    assert_near(out, expected(x, held))
    paired = weight(kind, (96, 200), device, paired=True)
    halves, _ = poisoned((3, 48), device)
    linear(halves, x, paired, swiglu=True)
    assert_near(halves, gated(expected(x, paired)))


@pytest.mark.parametrize(
    ("kind", "size", "segments"),
    [
        ("bf16", (4096, 14336), 4),
        ("bfp4", (28672, 4096), 4),
        ("bfp8", (4096, 14336), 16),
        ("bfp8", (6144, 4096), 8),
    ],
)
def test_segments_are_selected_by_size(kind: str, size: tuple[int, int], segments: int) -> None:
    held = PackedWeight(kind, *size, torch.empty(0))
    assert gemv_triton.segments_of(held) == segments


def gated(product: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up for pairs in turns of 8, in float64."""
    sides = product.unflatten(1, (-1, 2, 8))
    gate, up = sides[:, :, 0].flatten(1), sides[:, :, 1].flatten(1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("kind", KINDS)
def test_bias_and_residual(kind: str, device: torch.device) -> None:
    held, x = weight(kind, (40, 200), device), tokens((3, 200), device)
    bias = torch.randn(40, device=device)
    out, _ = poisoned((3, 40), device)
    linear(out, x, held, bias=bias)
    assert_near(out, expected(x, held) + bias)
    before = torch.randn(3, 40, device=device)
    total, around = poisoned((3, 40), device)
    total.copy_(before)
    linear(total, x, held, bias=bias, residual=True)
    assert torch.equal(total, before + out)
    assert bool(around[:, 40:].isnan().all())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 9])
def test_swiglu(kind: str, num_tokens: int, device: torch.device) -> None:
    held = weight(kind, (80, 200), device, paired=True)
    x = tokens((num_tokens, 200), device)
    out, around = poisoned((num_tokens, 40), device, torch.bfloat16)
    linear(out, x, held, swiglu=True)
    assert_near(out, gated(expected(x, held)))
    assert bool(around[:, 40:].isnan().all())


@functools.cache
def rows_are_alike_in_numpy(smallest: int) -> bool:
    """Return whether NumPy's bits are equal in batches from ``smallest`` rows, on this CPU."""
    weights, x = np.random.default_rng(0).random((2, 128, 128), np.float32) - 0.5
    batches = [np.ascontiguousarray(x[:, :count]) for count in (smallest, 16, 32)]
    whole = weights[:16] @ x
    return all(
        np.array_equal(weights[:16] @ batch, whole[:, : batch.shape[1]]) for batch in batches
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_in_every_batch(kind: str, device: torch.device) -> None:
    is_gpu, ranges = device.type == "cuda", [(3, 12), (20, 37), (6, 70)]
    if not is_gpu and not rows_are_alike_in_numpy(16):
        pytest.skip("the interpreter multiplies by NumPy, whose bits of a row depend on the others")
    held = weight(kind, (48, 260), device)
    x = torch.randn(70, 260, device=device).bfloat16()
    whole, _ = poisoned((70, 48), device)
    linear(whole, x, held)
    if is_gpu or rows_are_alike_in_numpy(8):
        ranges += [(0, 1), (5, 7), (3, 11)]
    for first, last in ranges:
        part, _ = poisoned((last - first, 48), device)
        linear(part, x[first:last], held)
        assert torch.equal(part, whole[first:last])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 3, 8, 16, 33, 64, 200])
@pytest.mark.parametrize(
    "size", [(6144, 4096), (4096, 14336), (28672, 4096), (2048, 2048), (128_256, 1024)]
)
def test_real_shapes(
    kind: str, num_tokens: int, size: tuple[int, int], device: torch.device
) -> None:
    held, x = weight(kind, size, device, paired=True), tokens((num_tokens, size[1]), device)
    out, _ = poisoned((num_tokens, size[0]), device)
    linear(out, x, held)
    torch.testing.assert_close(out.double(), expected(x, held), rtol=1e-4, atol=1e-4)
    alone, _ = poisoned((1, size[0]), device)
    linear(alone, x[-1:], held)
    assert torch.equal(alone, out[-1:])
    halves, _ = poisoned((num_tokens, size[0] // 2), device, torch.bfloat16)
    linear(halves, x, held, swiglu=True)
    torch.testing.assert_close(halves.double(), gated(out.double()), rtol=2.0**-8, atol=1e-5)
