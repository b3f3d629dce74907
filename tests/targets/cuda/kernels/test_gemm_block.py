"""gemm_block.cu: launches, compilation without spills, and results on a GPU."""

from __future__ import annotations

import itertools
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.targets.cuda.kernels.test_gemv import (
    NAN,
    assembler_output,
    check_headers,
    gpu_of,
    shaped,
    swiglu_of,
    tokens,
    unpack,
    weight,
)
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.matmul import gemm_block, gemv
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight

KINDS = ["bfp8", "bfp4", *gemv.CODED]
BATCHES = [17, 33, 64, 65, 128, 192, 200, 384, 512]


def source_of(kind: str) -> nvrtc.KernelSource:
    return gemm_block.CODED_SOURCE if kind in gemv.CODED else gemm_block.SOURCE


def step_us(kind: str) -> dict[gemm_block.BlockTileConfig, float]:
    return gemm_block._CODED_STEP_US if kind in gemv.SUMMED else gemm_block._STEP_US


def test_what_it_takes() -> None:
    """Large weights take more rows. A split K takes rows only while faster."""
    assert [n in gemm_block.rows_of(shaped("bfp8", 28672, 4096)) for n in (16, 17, 512, 513)] == [
        *(False, True, True, False)
    ]
    assert [n in gemm_block.rows_of(shaped("bfp4", 28672, 4096)) for n in (32, 33)] == [
        False,
        True,
    ]
    assert [n in gemm_block.rows_of(shaped("bfp8", 6144, 4096)) for n in (16, 17, 256, 257)] == [
        *(False, True, True, False)
    ]
    assert [n in gemm_block.rows_of(shaped("bfp8", 4096, 4096)) for n in (32, 33)] == [False, True]
    large, small = (
        [n in gemm_block.rows_of(shaped("bfp8", *size), same_bits=False) for n in (512, 513, 1025)]
        for size in ((8192, 8192), (4096, 14336))
    )
    assert large == [True, True, False] and small == [True, False, False]
    assert 64 not in gemm_block.rows_of(shaped("bfp8", 48, 202))
    assert 64 not in gemm_block.rows_of(shaped("bf16", 48, 200))


@pytest.mark.parametrize("same_bits", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [4096, 28672])
def test_what_is_chosen_is_there_and_fits(kind: str, rows: int, same_bits: bool) -> None:
    held, room = shaped(kind, rows, 4096), gemm_block.scratch(4096, torch.device("cpu")).numel()
    for count in range(17, gemm_block.MAX_TOKENS + 1):
        way = gemm_block.choose_way(held, count, same_bits=same_bits)
        assert way.kernel(held) in source_of(kind).names
        is_split = isinstance(way, gemm_block.SplitTileConfig)
        resident = 1 if is_split else way.resident
        assert resident * (way.shared_bytes(held) + 2048) <= gemv.MOST_SHARED + 3072
        assert is_split == (not same_bits and count in gemm_block.splits_of(held))
        assert way.depth(held) >= 2
        assert gemm_block.num_places(way, count) * 4096 * 2 <= room
        if same_bits and gemv.num_slices(held) > 1:
            assert way.kernel(held).startswith(("cut", "joined"))


@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        ((28672, 4096), (4, 4, 14, 1)),
        ((128256, 4096), (4, 4, 16, 1)),
        ((6144, 4096), (4, 4, 6, 2)),
        ((4096, 14336), (4, 4, 4, 2)),
        ((64, 256), (4, 4, 1, 2)),
    ],
)
def test_split_way_fills_the_device(
    size: tuple[int, int], sizes: tuple[int, int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Large weights have a block per multiprocessor, small weights have pairs."""
    monkeypatch.setattr(gemm_block, "num_processors", lambda device: 132)
    held = shaped("bfp8", *size)
    assert gemm_block.split_way(held) == gemm_block.SplitTileConfig(*sizes)
    assert [count in gemm_block.splits_of(held) for count in (17, 32, 33)] == [True, True, False]
    assert 32 not in gemm_block.splits_of(shaped("q80", *size))


@pytest.mark.parametrize("kind", ["bfp8", "bfp4"])
@pytest.mark.parametrize("tiles", range(1, 17))
def test_sets_of_groups_have_stages_of_their_own(kind: str, tiles: int) -> None:
    held, way = shaped(kind, 4096, 4096), gemm_block.SplitTileConfig(4, 4, tiles, 2)
    assert way.sets * -(-tiles // 4) <= way.groups
    assert way.depth(held) % way.sets == 0 and way.depth(held) > way.sets
    assert way.joined * way.sets <= gemv.SLICES
    assert way.shared_bytes(held) <= gemv.MOST_SHARED


@pytest.mark.parametrize(
    ("size", "sizes"),
    [
        ((8192, 28672), ("8_2", "16_2", "16_2", "24_2", "16_2")),
        ((10240, 8192), ("16_2", "24_2", "16_2", "16_2", "24_2")),
        ((4096, 14336), ("8_4", "8_2", "8_2", "16_2", "16_2")),
        ((28672, 4096), ("16_2", "24_2", "16_2", "24_2", "16_2")),
    ],
)
def test_many_tokens_take_the_way_that_fills_the_device(
    size: tuple[int, int], sizes: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With other bits, the fastest sizes on an H100 are selected, within a tolerance."""
    monkeypatch.setattr(gemm_block, "num_processors", lambda device: 132)
    held = shaped("bfp8", *size)
    ways = [gemm_block.choose_way(held, n, same_bits=False) for n in (128, 192, 256, 384, 512)]
    assert [way.kernel(held).rpartition("bfp8_")[2] for way in ways] == list(sizes)


def test_every_header_is_named_once() -> None:
    check_headers(gemm_block.SOURCE)
    check_headers(gemm_block.CODED_SOURCE)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("source", [gemm_block.SOURCE, gemm_block.CODED_SOURCE])
def test_it_compiles_without_spills_and_keeps_the_matrix_unit_fed(
    source: nvrtc.KernelSource, tmp_path: Path
) -> None:
    """The assembler reports matmuls that wait for other matmuls."""
    output = assembler_output(source, tmp_path)
    found = re.findall(r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores", output, re.S)
    assert dict(found) == dict.fromkeys(source.names, "0")
    assert "serialized" not in output


def check_sums(x: torch.Tensor, held: PackedWeight, how: dict[str, Any]) -> None:
    """Compare sums with the residual, with and without a bias."""
    for bias in (how.get("bias"), None):
        old = torch.randn(len(x), held.num_rows, device=x.device)
        total, plain = old.clone(), torch.empty_like(old)
        gemm_block.linear(plain, x, held, epilogue=gemv.STORE, **{**how, "bias": bias})
        gemm_block.linear(total, x, held, epilogue=gemv.ADD, **{**how, "bias": bias})
        assert torch.equal(total, old + plain)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A GPU for gemm_block.cu."""
    return gpu_of(device, gemm_block.SOURCE)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "size", [(4096, 4096), (4096, 14336), (28672, 4096), (960, 576), (48, 200), (35, 2052)]
)
def test_products_and_their_bits(kind: str, size: tuple[int, int], gpu: torch.device) -> None:
    """Compare with float64. A token has the bits of gemv.cu. Padding stays unchanged."""
    held = weight(kind, size, gpu, paired=False)
    x = torch.cat([tokens(held, gpu) for _ in range(8)])
    bias = torch.randn(size[0], device=gpu)
    want = x[:, : size[1]].double() @ unpack(held).double().T + bias
    few = torch.zeros(64, size[0], device=gpu)
    gemv.linear(few, x, held, epilogue=gemv.STORE, num_tokens=64, bias=bias)
    arranged = gemm_block.scratch(size[1], gpu)
    for count in BATCHES:
        around = torch.full((514, size[0] + 8), NAN, device=gpu)
        out = around[:count, : size[0]]
        arranged.fill_(0xFF)
        how = {"arranged": arranged, "bias": bias}
        gemm_block.linear(out, x[:count], held, epilogue=gemv.STORE, **how)
        torch.testing.assert_close(out.double(), want[:count], rtol=1e-4, atol=1e-4)
        assert bool(around[count:].isnan().all()) and bool(around[:, size[0] :].isnan().all())
        assert torch.equal(out[:64], few[: min(count, 64)])
        check_sums(x[:count], held, how)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(17000, 640), (4096, 2176)])
def test_every_way_gives_the_same_bits(kind: str, size: tuple[int, int], gpu: torch.device) -> None:
    held = weight(kind, size, gpu, paired=False)
    x = torch.cat([tokens(held, gpu) for _ in range(5)])[:300]
    arranged = gemm_block.scratch(size[1], gpu)
    want = torch.cat([x.new_zeros(64, size[0], dtype=torch.float32) for _ in range(5)])
    for first in range(0, 300, 64):
        part = slice(first, min(300, first + 64))
        gemv.linear(want[part], x[part], held, epilogue=gemv.STORE, num_tokens=part.stop - first)
    norm = torch.rand(size[1], device=gpu) + 0.5
    raw = torch.randn(300, size[1] + 4, device=gpu)[:, : size[1]]
    normed = torch.zeros_like(x)
    gemv.rms_norm(normed, raw, norm, eps=1e-5, num_tokens=300)
    both = [torch.empty(300, size[0], device=gpu) for _ in range(2)]
    how = {"epilogue": gemv.STORE, "arranged": arranged}
    gemm_block.linear(both[0], normed, held, **how)
    gemm_block.linear(both[1], raw, held, norm=(norm, 1e-5), **how)
    assert torch.equal(*both)
    cut = "cut" if gemv.num_slices(held) > 1 else "gemm_block"
    ways = [
        gemm_block.BlockTileConfig(*way, resident)
        for way in gemm_block.ways_of(kind)[cut]
        for resident in (1, 2)
    ]
    if cut == "cut":
        ways.append(gemm_block.JOINED)
    for way in ways:
        if way.depth(held) < 2:
            continue
        out = torch.full((300, size[0]), NAN, device=gpu)
        how = {"epilogue": gemv.STORE, "arranged": arranged, "way": way}
        gemm_block.linear(out, x, held, **how)
        assert torch.equal(out, want[:300]), way


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_every_way_of_a_whole_k(kind: str, gpu: torch.device) -> None:
    """For a weight with a split K in gemv.cu: equal bits in all sizes, near float64."""
    held = weight(kind, (4096, 2176), gpu, paired=False)
    x = torch.cat([tokens(held, gpu) for _ in range(8)])[:500]
    want = x[:, : held.num_columns].double() @ unpack(held).double().T
    bias, found = torch.randn(4096, device=gpu), []
    chosen = (each for each in step_us(kind) if each.is_whole)
    for way in (gemm_block.BlockTileConfig(4, 2, is_whole=True), *chosen):
        out = torch.full((500, 4096), NAN, device=gpu)
        arranged = gemm_block.scratch(held.num_columns, gpu).fill_(0xFF)
        how = {"arranged": arranged, "way": way}
        gemm_block.linear(out, x, held, epilogue=gemv.STORE, **how)
        total = torch.ones(500, 4096, device=gpu)
        gemm_block.linear(total, x, held, epilogue=gemv.ADD, **how)
        assert torch.equal(total, 1 + out)
        gemm_block.linear(total, x, held, epilogue=gemv.STORE, bias=bias, **how)
        assert torch.equal(total, out + bias)
        found.append(out)
    torch.testing.assert_close(found[0].double(), want, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bfp8", "bfp4"])
@pytest.mark.parametrize(
    "size",
    [
        *[(4096, 14336), (6144, 4096), (7168, 2560), (10240, 1152), (28672, 4096), (40000, 256)],
        *[(960, 576), (48, 200), (35, 2052), (35, 100)],
    ],
)
def test_split_matmul_is_near_float64(kind: str, size: tuple[int, int], gpu: torch.device) -> None:
    """Compare with float64. Padding stays unchanged, and results repeat."""
    held = weight(kind, size, gpu, paired=False)
    x = torch.cat([tokens(held, gpu) for _ in range(2)])
    bias = torch.randn(size[0], device=gpu)
    want = x[:, : size[1]].double() @ unpack(held).double().T + bias
    arranged = gemm_block.scratch(size[1], gpu)
    for count in (1, 17, 32, 60, 128):
        around = torch.full((130, size[0] + 8), NAN, device=gpu)
        out = around[:count, : size[0]]
        arranged.fill_(0xFF)
        how = {"arranged": arranged, "bias": bias, "way": gemm_block.split_way(held)}
        gemm_block.linear(out, x[:count], held, epilogue=gemv.STORE, **how)
        torch.testing.assert_close(out.double(), want[:count], rtol=1e-4, atol=1e-4)
        assert bool(around[count:].isnan().all()) and bool(around[:, size[0] :].isnan().all())
        check_sums(x[:count], held, how)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bfp8", "bfp4"])
@pytest.mark.parametrize("count", [20, 60])
def test_a_split_matmul_feeds_the_next(kind: str, count: int, gpu: torch.device) -> None:
    held = weight(kind, (16384, 2048), gpu, paired=True)
    down = weight(kind, (4096, 8192), gpu, paired=False)
    x = torch.cat([tokens(held, gpu) for _ in range(2)])[:count]
    few, out = torch.zeros(2, count, 8192, dtype=torch.bfloat16, device=gpu)
    arranged, behind = (gemm_block.scratch(each, gpu) for each in (2048, 8192))
    how = {"epilogue": gemv.SWIGLU, "arranged": arranged}
    gemm_block.linear(few, x, held, **how)
    how["way"] = gemm_block.split_way(held)
    gemm_block.linear(out, x, held, **how)
    torch.testing.assert_close(out, few, rtol=2e-2, atol=1e-2)
    way = gemm_block.split_way(down)
    want, fed = torch.zeros(2, count, 4096, device=gpu)
    after = {"epilogue": gemv.STORE, "arranged": behind, "way": way}
    gemm_block.linear(want, out, down, **after)
    behind.fill_(0xFF)
    gemm_block.linear(behind, x, held, feeds=gemm_block.num_places(way, count), **how)
    gemm_block.linear(fed, out, down, is_there=True, **after)
    assert torch.equal(fed, want)


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", list(itertools.product(["bfp8", "bfp4"], repeat=2)))
@pytest.mark.parametrize("size", [(6144, 4096), (28672, 4096), (10240, 5120), (10240, 8192)])
@pytest.mark.parametrize("count", [17, 32])
def test_a_split_matmul_defers_the_norm_before_the_next(
    kinds: tuple[str, str], size: tuple[int, int], count: int, gpu: torch.device
) -> None:
    """The residual has the same bits. The next matmul is compared with float64."""
    rows, width = size
    first = weight(kinds[0], (width, 2048), gpu, paired=False)
    way_of_first = gemm_block.split_way(first)
    norm = torch.rand(width, device=gpu) + 0.5
    squares = torch.full((32 * width // 16,), NAN, device=gpu)
    x, old = tokens(first, gpu)[:count], 3 * torch.randn(count, width, device=gpu)
    how: dict[str, Any] = {"arranged": gemm_block.scratch(2048, gpu), "way": way_of_first}
    plain, total = torch.empty_like(old), old.clone()
    gemm_block.linear(plain, x, first, epilogue=gemv.STORE, **how)
    for is_swiglu in (False, True):
        second = weight(kinds[1], size, gpu, paired=is_swiglu)
        way = gemm_block.split_way(second)
        arranged = gemm_block.scratch(width, gpu).fill_(0xFF)
        groups = gemm_block.norm_groups_of(first, way_of_first)
        places = gemm_block.num_places(way, count)
        deferred = gemm_block.DeferredNorm(norm, 1e-5, arranged, squares, groups, places)
        total.copy_(old)
        gemm_block.linear(total, x, first, epilogue=gemv.ADD, after=deferred, **how)
        assert torch.equal(total, old + plain)
        bias = None if is_swiglu else torch.randn(rows, device=gpu)
        dtype = torch.bfloat16 if is_swiglu else torch.float32
        out = torch.full((count, rows // (1 + is_swiglu)), NAN, dtype=dtype, device=gpu)
        gemm_block.linear(
            out,
            total,
            second,
            epilogue=gemv.SWIGLU if is_swiglu else gemv.STORE,
            arranged=arranged,
            bias=bias,
            way=way,
            is_there=True,
            before=deferred,
        )
        factor = torch.rsqrt(total.double().square().mean(1, keepdim=True) + 1e-5)
        normed, dense = (total * norm).bfloat16().double() * factor, unpack(second)
        if is_swiglu:
            want = swiglu_of(normed, dense)
            torch.testing.assert_close(out.double(), want, rtol=2**-7, atol=1e-3)
        else:
            want = normed @ dense.double().T + bias
            torch.testing.assert_close(out.double(), want, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_swiglu(kind: str, gpu: torch.device) -> None:
    held = weight(kind, (16384, 2048), gpu, paired=True)
    x = torch.cat([tokens(held, gpu), tokens(held, gpu)])
    few = torch.zeros(64, 8192, dtype=torch.bfloat16, device=gpu)
    gemv.linear(few, x, held, epilogue=gemv.SWIGLU, num_tokens=64)
    out = torch.full((100, 8192), NAN, dtype=torch.bfloat16, device=gpu)
    arranged = gemm_block.scratch(2048, gpu)
    gemm_block.linear(out, x[:100], held, epilogue=gemv.SWIGLU, arranged=arranged)
    assert torch.equal(out[:64], few) and bool(out.isfinite().all())
    down = weight(kind, (256, 8192), gpu, paired=False)
    want, fed = torch.zeros(100, 256, device=gpu), torch.zeros(100, 256, device=gpu)
    behind = gemm_block.scratch(8192, gpu)
    how = {"epilogue": gemv.STORE, "arranged": behind}
    gemm_block.linear(want, out, down, **how)
    behind.fill_(0xFF)
    places = gemm_block.num_places(gemm_block.choose_way(down, 100), 100)
    gemm_block.linear(behind, x[:100], held, epilogue=gemv.SWIGLU, arranged=arranged, feeds=places)
    gemm_block.linear(fed, out, down, is_there=True, **how)
    assert torch.equal(fed, want)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [190, 380, 500])
def test_a_product_feeds_one_that_is_walked_over_whole(count: int, gpu: torch.device) -> None:
    """The next matmul has other token blocks."""
    held = weight("bfp8", (16384, 2048), gpu, paired=True)
    down = weight("bfp8", (4096, 8192), gpu, paired=False)
    x = torch.cat([tokens(held, gpu) for _ in range(8)])[:count]
    out = torch.zeros(count, 8192, dtype=torch.bfloat16, device=gpu)
    arranged, behind = (gemm_block.scratch(each, gpu) for each in (2048, 8192))
    gemm_block.linear(out, x, held, epilogue=gemv.SWIGLU, arranged=arranged)
    for way in (each for each in gemm_block._STEP_US if each.is_whole):
        want, fed = torch.zeros(2, count, 4096, device=gpu)
        how = {"epilogue": gemv.STORE, "arranged": behind, "way": way}
        gemm_block.linear(want, out, down, **how)
        behind.fill_(0xFF)
        gemm_block.linear(
            behind,
            x,
            held,
            epilogue=gemv.SWIGLU,
            arranged=arranged,
            feeds=gemm_block.num_places(way, count),
        )
        gemm_block.linear(fed, out, down, is_there=True, **how)
        assert torch.equal(fed, want), way
