"""gemm_block_e4m3.cu: launches, and results on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.targets.cuda.kernels.test_gemv import (
    NAN,
    check_headers,
    gpu_of,
    shaped,
    swiglu_of,
    weight,
)
from tests.targets.cuda.lofi_bounds import check_sums
from tilewright.compiler.formats import get_format
from tilewright.compiler.targets.cuda.kernels.matmul import (
    e4m3,
    gemm_bf16,
    gemm_block,
    gemm_block_e4m3,
    gemv,
)
from tilewright.compiler.targets.cuda.weights.e4m3 import exact_rows, values
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight
from tilewright.compiler.targets.cuda.weights.packing import hold, unpack


@pytest.fixture(autouse=True)
def _processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gemm_bf16, gemm_block_e4m3):
        monkeypatch.setattr(module, "num_processors", lambda device: 132)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A GPU for gemm_block_e4m3.cu."""
    return gpu_of(device, gemm_block_e4m3.SOURCE)


def test_what_it_takes() -> None:
    """Only large weights with whole 64 columns."""
    taken = gemm_block_e4m3.rows_of(shaped("bfp4", 28672, 4096))
    assert [count in taken for count in (32, 33, 64, 65)] == [False, True, True, False]
    assert not gemm_block_e4m3.rows_of(shaped("bfp4", 4096, 4096))
    assert not gemm_block_e4m3.rows_of(shaped("bfp4", 28672, 4128))


@given(rows=st.integers(1, 300_000))
def test_tile_sizes_fit_and_cover_the_weight(rows: int) -> None:
    held = shaped("bfp4", rows, 4096)
    way = gemm_block_e4m3.choose_way(held)
    assert 1 <= way.tiles <= 16 and way.depth >= 2
    assert way.shared_bytes <= gemv.MOST_SHARED
    turns = -(-held.num_row_tiles // (132 * way.tiles))
    assert turns == -(-held.num_row_tiles // (132 * 16))


def test_every_header_is_named_once() -> None:
    check_headers(gemm_block_e4m3.SOURCE)


def order_of(columns: int) -> torch.Tensor:
    """Return the column at every position of x."""
    first = torch.arange(64).view(4, 2, 4, 2).permute(1, 3, 0, 2).flatten()
    return (torch.arange(0, columns, 64)[:, None] + first).flatten()


def test_codes_are_arranged_in_the_order_of_the_kernel(device: torch.device) -> None:
    """A lane has even columns, then odd columns."""
    x = torch.randn(3, 192, device=device)
    codes, scales = e4m3.round_rows(x)
    arranged, same = e4m3.round_rows(x, is_arranged=True)
    order = order_of(192).to(device)
    assert order[:16].tolist() == [0, 2, 4, 6, 16, 18, 20, 22, 32, 34, 36, 38, 48, 50, 52, 54]
    assert order[32:36].tolist() == [8, 10, 12, 14] and order[16] == 1
    assert torch.equal(arranged.view(torch.uint8), codes.view(torch.uint8)[:, order])
    assert torch.equal(scales, same)


def lofi_weight(
    size: tuple[int, int], gpu: torch.device, *, octaves: int, paired: bool = False
) -> tuple[PackedWeight, torch.Tensor, torch.Tensor]:
    """Return a weight, its e4m3 values and their row scales. Rows differ by ``octaves``."""
    dense = torch.randn(size, device=gpu) / size[1] ** 0.5
    dense *= torch.exp2(torch.arange(float(size[0]), device=gpu) % octaves - octaves)[:, None]
    held = hold(get_format("bfp4").round_trip(dense), "bfp4", paired=paired)
    exact = exact_rows(unpack(held))
    assert exact is not None
    return held, *exact


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 2.0**9])
def test_every_value_is_exact(scale: float, gpu: torch.device) -> None:
    """All mantissas and all exponents that a copy in e4m3 can have. Unit columns select them.

    With the two smallest exponents, only multiples of two and four are exact.
    """
    mantissas = torch.arange(16.0, device=gpu).clamp(max=14) - 7
    exponents = torch.arange(384, device=gpu) // 16 % 18
    values_of = mantissas.repeat(24) * torch.exp2(-exponents.float())
    step = torch.exp2((exponents - 15).clamp(min=0).float()) * torch.exp2(-exponents.float())
    dense = (values_of / step).trunc().mul(step).repeat(40, 1) * scale
    dense[1::2] *= 2.0**-5
    held = hold(dense, "bfp4", paired=False)
    exact = exact_rows(unpack(held))
    assert exact is not None and torch.equal(unpack(held), dense)
    for first in range(0, 384, 64):
        x = torch.eye(384, device=gpu)[first : first + 64]
        out = torch.full((64, 40), NAN, device=gpu)
        codes = e4m3.round_rows(x, is_arranged=True)
        gemm_block_e4m3.linear(out, codes, held, exact[1], epilogue=gemv.STORE)
        assert torch.equal(out, dense[:, first : first + 64].T)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(48, 1024), (200, 192), (35, 2048), (34000, 1088), (66000, 1152)])
def test_products(size: tuple[int, int], gpu: torch.device) -> None:
    """Within the matrix unit's error, for single and several turns. Some outputs are checked."""
    held, weights, weight_scales = lofi_weight(size, gpu, octaves=20)
    order, bias = order_of(size[1]).to(gpu), torch.randn(size[0], device=gpu)
    for count in (33, 64):
        plain = torch.randn(count, size[1], device=gpu)
        x, codes = values(*e4m3.round_rows(plain)), e4m3.round_rows(plain, is_arranged=True)
        out = torch.full((count, size[0] + 3), NAN, device=gpu)[:, : size[0]]
        gemm_block_e4m3.linear(out, codes, held, weight_scales, epilogue=gemv.STORE)
        some = torch.arange(size[0], device=gpu)
        some = some[(some < 200) | (some >= size[0] - 200) | (some % 97 == 0)]
        wanted = values(weights[some], weight_scales[some])[:, order]
        check_sums(out[:, some], x[:, order], wanted)
        total = torch.ones_like(out)
        gemm_block_e4m3.linear(total, codes, held, weight_scales, epilogue=gemv.ADD, bias=bias)
        torch.testing.assert_close(total, out + bias + 1, rtol=1e-6, atol=0.0)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 576, 4096, 8192])
def test_codes_of_a_norm_are_those_of_its_rows(width: int, gpu: torch.device) -> None:
    x = torch.randn(33, width + 4, device=gpu)[:, :width] * 3
    x[1], x[2] = 0.0, x[2] * 2.0**-100
    norm = torch.rand(width, device=gpu) + 0.5
    normed = torch.empty(33, width, dtype=torch.bfloat16, device=gpu)
    gemv.rms_norm(normed, x, norm, eps=1e-5, num_tokens=33)
    for is_arranged in (False, True):
        found = gemm_block_e4m3.norm_codes(x, norm, 1e-5, is_arranged=is_arranged)
        wanted = e4m3.round_rows(normed, is_arranged=is_arranged)
        assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
        assert torch.equal(found[1], wanted[1])


@pytest.mark.gpu
def test_what_feeds_a_product_of_blocks(gpu: torch.device) -> None:
    """The output has the layout of `gemm_block.cu`."""
    held, weights, weight_scales = lofi_weight((16384, 2048), gpu, octaves=1, paired=True)
    down = weight("bfp8", (4096, 8192), gpu, paired=False)
    plain = torch.randn(60, 2048, device=gpu)
    x, codes = values(*e4m3.round_rows(plain)), e4m3.round_rows(plain, is_arranged=True)
    out = torch.zeros(60, 8192, dtype=torch.bfloat16, device=gpu)
    gemm_block_e4m3.linear(out, codes, held, weight_scales, epilogue=gemv.SWIGLU)
    wanted = swiglu_of(x, values(weights, weight_scales))
    torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
    way, behind = gemm_block.choose_way(down, 60), gemm_block.scratch(8192, gpu)
    want, fed = torch.zeros(2, 60, 4096, device=gpu)
    how = {"epilogue": gemv.STORE, "arranged": behind, "way": way}
    gemm_block.linear(want, out, down, **how)
    behind.fill_(0xFF)
    places = gemm_block.num_places(way, 60)
    gemm_block_e4m3.linear(behind, codes, held, weight_scales, epilogue=gemv.SWIGLU, feeds=places)
    gemm_block.linear(fed, out, down, is_there=True, **how)
    assert torch.equal(fed, want)
