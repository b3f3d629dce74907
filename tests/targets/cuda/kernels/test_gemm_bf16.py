"""gemm_bf16.cu: launches, and results on a GPU."""

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
    tokens,
    weight,
)
from tilewright.compiler.targets.cuda.kernels.matmul import gemm_bf16, gemm_block, gemv
from tilewright.compiler.targets.cuda.kernels.matmul.gemm_bf16 import DenseTileConfig
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight
from tilewright.compiler.targets.cuda.weights.packing import unpack

SIZES = [
    (4096, 4096),
    (4096, 14336),
    (28672, 4096),
    (12352, 2048),
    (960, 576),
    (48, 200),
    (35, 520),
]
BATCHES = [1, 9, 16, 17, 33, 64, 65, 128]


@pytest.fixture(autouse=True)
def _processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm_bf16, "num_processors", lambda device: 132)


def test_what_it_takes() -> None:
    """Large and long weights take more rows. Rows of x must be aligned."""
    taken = [n in gemm_bf16.rows_of(shaped("bf16", 6144, 4096)) for n in (4, 5, 64, 65)]
    assert taken == [False, True, True, False]
    for size in ((28672, 4096), (4096, 14336)):
        assert [n in gemm_bf16.rows_of(shaped("bf16", *size)) for n in (128, 129)] == [
            True,
            False,
        ]
    assert [n in gemm_bf16.rows_of(shaped("bf16", 128256, 4096)) for n in (64, 65)] == [
        True,
        False,
    ]
    assert 32 not in gemm_bf16.rows_of(shaped("bfp8", 6144, 4096))
    x = torch.zeros(16, 104, dtype=torch.bfloat16)
    assert gemm_bf16.has_room(x[:, :96])
    assert not gemm_bf16.has_room(torch.zeros(16, 100, dtype=torch.bfloat16)[:, :96])
    assert not gemm_bf16.has_room(x[:, 1:97])


@given(
    rows=st.integers(1, 300_000),
    columns=st.integers(1, 32_768),
    count=st.integers(1, gemm_bf16.MAX_TOKENS),
)
def test_what_is_chosen_is_there_and_fits(rows: int, columns: int, count: int) -> None:
    way = gemm_bf16.choose_way(shaped("bf16", rows, columns), count)
    assert way.kernel in gemm_bf16.SOURCE.names
    assert count <= 8 * way.eights and way.depth >= 2
    assert way.resident * (way.shared_bytes + 2048) <= gemv.MOST_SHARED + 3072
    assert way.slices == 1 or way.slices * -(-rows // (64 * way.groups)) <= 132


def test_every_kernel_has_a_product() -> None:
    """Machine code is compiled at model start, so it has no unused kernel."""
    chosen = set()
    for size in (*SIZES, (16384, 14336), (128256, 4096)):
        held = shaped("bf16", *size)
        for count in range(9, gemm_bf16.MAX_TOKENS + 1):
            if count in gemm_bf16.rows_of(held):
                chosen.add(gemm_bf16.choose_way(held, count).kernel)
    assert set(gemm_bf16.SOURCE.names) == chosen


@pytest.mark.parametrize(
    ("size", "ways"),
    [
        (
            (28672, 4096),
            [
                DenseTileConfig(2, 1, 1, 2),
                DenseTileConfig(4, 1, 1, 2),
                DenseTileConfig(8, 4),
                DenseTileConfig(16, 4),
            ],
        ),
        (
            (128256, 4096),
            [
                DenseTileConfig(2, 1, 1, 2),
                DenseTileConfig(4, 1, 1, 2),
                DenseTileConfig(8, 2),
                DenseTileConfig(16, 4),
            ],
        ),
        (
            (12352, 2048),
            [
                DenseTileConfig(2, 1, 1, 2),
                DenseTileConfig(4, 1, 1, 2),
                DenseTileConfig(8, 2),
                DenseTileConfig(16, 2),
            ],
        ),
        (
            (6144, 4096),
            [
                DenseTileConfig(2, 1),
                DenseTileConfig(4, 1),
                DenseTileConfig(8, 1),
                DenseTileConfig(16, 1),
            ],
        ),
        (
            (4096, 14336),
            [
                DenseTileConfig(2, 1, 2),
                DenseTileConfig(4, 1, 2),
                DenseTileConfig(8, 1, 2),
                DenseTileConfig(16, 1, 2),
            ],
        ),
        (
            (2048, 4096),
            [
                DenseTileConfig(2, 1, 4, 2),
                DenseTileConfig(4, 1, 4, 2),
                DenseTileConfig(8, 1, 4, 2),
                DenseTileConfig(16, 1, 4),
            ],
        ),
        (
            (48, 200),
            [
                DenseTileConfig(2, 1),
                DenseTileConfig(4, 1),
                DenseTileConfig(8, 1),
                DenseTileConfig(16, 1),
            ],
        ),
    ],
)
def test_ways_of_usual_shapes(size: tuple[int, int], ways: list[DenseTileConfig]) -> None:
    held = shaped("bf16", *size)
    assert [gemm_bf16.choose_way(held, count) for count in (16, 32, 64, 128)] == ways


@pytest.mark.parametrize("count", [16, 32, 64])
def test_choose_way_of_four_slices_leaves_room_for_another_block(count: int) -> None:
    """Fewer slices keep the deeper ring."""
    held = shaped("bf16", 2048, 4096)
    way = gemm_bf16.choose_way(held, count)
    assert way.slices == 4 and 2 * (way.shared_bytes + 1024) <= gemv.MOST_SHARED + 1024
    assert gemm_bf16.choose_way(shaped("bf16", 4096, 4096), count).resident == 1


def test_every_header_is_named_once() -> None:
    check_headers(gemm_bf16.SOURCE)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A GPU for gemm_bf16.cu."""
    return gpu_of(device, gemm_bf16.SOURCE)


def ways_of(held: PackedWeight, count: int) -> list[DenseTileConfig]:
    """Return all kernels with all possible slices."""
    chunks = -(-2 * held.num_columns // 128)
    return [
        DenseTileConfig(eights, groups, slices)
        for eights, groups in gemm_bf16.MADE
        for slices in (1, 2, 4, 8)
        if 8 * eights >= count and slices <= max(1, chunks // 2) and 1 in (groups, slices)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
def test_products(size: tuple[int, int], gpu: torch.device) -> None:
    """Compare the selected kernel with float64. Padding stays unchanged, and bits repeat."""
    held = weight("bf16", size, gpu, paired=False)
    x = torch.cat([tokens(held, gpu) for _ in range(2)])[:, : size[1]]
    bias = torch.randn(size[0], device=gpu)
    want = x.double() @ unpack(held).double().T + bias
    for count in BATCHES:
        around = torch.full((130, size[0] + 8), NAN, device=gpu)
        out = around[:count, : size[0]]
        gemm_bf16.linear(out, x[:count], held, epilogue=gemv.STORE, bias=bias)
        torch.testing.assert_close(out.double(), want[:count], rtol=1e-4, atol=1e-4)
        assert bool(around[count:].isnan().all()) and bool(around[:, size[0] :].isnan().all())
        for added in (bias, None, None):
            old = torch.randn(count, size[0], device=gpu)
            total, plain = old.clone(), torch.empty_like(old)
            gemm_bf16.linear(plain, x[:count], held, epilogue=gemv.STORE, bias=added)
            gemm_bf16.linear(total, x[:count], held, epilogue=gemv.ADD, bias=added)
            assert torch.equal(total, old + plain)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(17000, 640), (200, 2176)])
@pytest.mark.parametrize("count", [5, 30, 60, 100])
def test_every_way(size: tuple[int, int], count: int, gpu: torch.device) -> None:
    """Compare with float64, for single and several turns."""
    held = weight("bf16", size, gpu, paired=False)
    x = torch.cat([tokens(held, gpu) for _ in range(2)])[:count, : size[1]]
    want = x.double() @ unpack(held).double().T
    for way in ways_of(held, count):
        out = torch.full((count, size[0]), NAN, device=gpu)
        gemm_bf16.linear(out, x, held, epilogue=gemv.STORE, way=way)
        torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(57344, 640), (1536, 576)])
def test_swiglu(size: tuple[int, int], gpu: torch.device) -> None:
    held = weight("bf16", size, gpu, paired=True)
    x = tokens(held, gpu)[:, : size[1]]
    want = swiglu_of(x, unpack(held))
    for count in (16, 64):
        out = torch.full((count, size[0] // 2), NAN, dtype=torch.bfloat16, device=gpu)
        gemm_bf16.linear(out, x[:count], held, epilogue=gemv.SWIGLU)
        torch.testing.assert_close(out.double(), want[:count], rtol=2**-7, atol=1e-3)


@pytest.mark.gpu
def test_what_feeds_a_product_of_blocks(gpu: torch.device) -> None:
    """The output has the layout of `gemm_block.cu`."""
    held = weight("bf16", (16384, 2048), gpu, paired=True)
    down = weight("bfp8", (4096, 8192), gpu, paired=False)
    x = tokens(held, gpu)[:60]
    way = gemm_block.choose_way(down, 60)
    out = torch.zeros(60, 8192, dtype=torch.bfloat16, device=gpu)
    gemm_bf16.linear(out, x, held, epilogue=gemv.SWIGLU)
    want, fed = torch.zeros(2, 60, 4096, device=gpu)
    behind = gemm_block.scratch(8192, gpu)
    how = {"epilogue": gemv.STORE, "arranged": behind, "way": way}
    gemm_block.linear(want, out, down, **how)
    behind.fill_(0xFF)
    places = gemm_block.num_places(way, 60)
    gemm_bf16.linear(behind, x, held, epilogue=gemv.SWIGLU, feeds=places)
    gemm_block.linear(fed, out, down, is_there=True, **how)
    assert torch.equal(fed, want)
