"""gemm_swiglu_bf16.cu: launches, and results on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.targets.cuda.kernels.test_gemv import (
    NAN,
    check_headers,
    gpu_of,
    swiglu_of,
    unpack,
    weight,
)
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.matmul import gemm_swiglu_bf16, gemv
from tilewright.compiler.targets.cuda.kernels.matmul.gemm_swiglu_bf16 import SwiGLUTileConfig
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight
from tilewright.compiler.targets.cuda.weights.packing import hold

H200 = 132
BLOCKS = st.integers(1, 2048).map(lambda count: 16 * count)


@pytest.mark.parametrize(
    ("num_rows", "num_tokens", "way"),
    [
        (28672, 128, SwiGLUTileConfig(28, columns=1, rows=128, turns=1, turned=True)),
        (28672, 192, SwiGLUTileConfig(24, columns=1, rows=112, turns=2)),
        (28672, 256, SwiGLUTileConfig(28, columns=2, rows=64, turns=2, turned=True)),
        (28672, 384, SwiGLUTileConfig(28, columns=3, rows=44, turns=3, turned=True)),
        (28672, 512, SwiGLUTileConfig(28, columns=4, rows=32, turns=4, turned=True)),
        (28672, 768, SwiGLUTileConfig(24, columns=4, rows=32, turns=7)),
        (28672, 896, SwiGLUTileConfig(28, columns=4, rows=32, turns=7)),
        (28672, 2048, SwiGLUTileConfig(32, columns=8, rows=16, turns=14)),
        (57344, 1024, SwiGLUTileConfig(32, columns=4, rows=32, turns=14)),
        (1152, 200, SwiGLUTileConfig(24, columns=2, rows=10, turns=1)),
    ],
)
def test_ways_of_usual_shapes(num_rows: int, num_tokens: int, way: SwiGLUTileConfig) -> None:
    assert gemm_swiglu_bf16.choose_way(num_rows, num_tokens, H200) == way


def takes(num_rows: int, num_tokens: int, processors: int) -> bool:
    return any(num_tokens in rows for rows in gemm_swiglu_bf16.rows_of(num_rows, processors))


def test_what_it_takes() -> None:
    """Token counts with a busy device, also with two turns of a single column.

    Large weights only.
    """
    counts = (64, 65, 128, 129, 192, 256, 257, 384, 512, 640, 768, 784, 896, 1024, 2048, 4096, 4097)
    taken = [each for each in counts if takes(28672, each, H200)]
    assert taken == [65, 128, 192, 256, 384, 512, 640, 768, 896, 1024, 2048, 4096]
    assert takes(24576, 100, H200) and not takes(22016, 100, 131)
    assert not any(takes(8192, each, H200) for each in counts)


@given(st.integers(1, 1 << 15))
def test_launches_cover_all_tokens(num_tokens: int) -> None:
    """The number of launches is minimal."""
    parts = [range(num_tokens)[tokens] for tokens in gemm_swiglu_bf16.launches_of(num_tokens)]
    assert [token for part in parts for token in part] == [*range(num_tokens)]
    most = gemm_swiglu_bf16.MAX_TOKENS
    assert max(map(len, parts)) <= most and len(parts) == -(-num_tokens // most)
    assert len(parts) == 1 or min(map(len, parts)) > most // 4


@given(
    num_rows=BLOCKS,
    num_tokens=st.integers(1, gemm_swiglu_bf16.MAX_TOKENS),
    processors=st.integers(64, 160),
)
def test_every_way_covers_the_product_and_fits(
    num_rows: int, num_tokens: int, processors: int
) -> None:
    """All blocks are resident concurrently, because a cluster waits for all its blocks.

    Clusters are complete.
    """
    for turned, eights in gemm_swiglu_bf16.MADE:
        way = gemm_swiglu_bf16.way_of(eights, num_rows, num_tokens, processors, turned=turned)
        rows, tokens = way.block
        assert way.kernel in gemm_swiglu_bf16.SOURCE.names
        assert way.columns * way.rows <= processors
        assert (way.columns if way.shares_rows else way.rows) % 2 == 0
        assert way.columns * tokens >= num_tokens and way.turns * way.rows * rows >= num_rows
        assert way.depth >= 4 and way.shared_bytes <= nvrtc.MOST_SHARED - 256


def test_every_header_is_named_once() -> None:
    check_headers(gemm_swiglu_bf16.SOURCE)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A GPU for gemm_swiglu_bf16.cu."""
    return gpu_of(device, gemm_swiglu_bf16.SOURCE)


def check(x: Tensor, held: PackedWeight, rows: Tensor, way: SwiGLUTileConfig, bias: Tensor) -> None:
    """Compare with float64. Padding stays unchanged, and bits repeat."""
    width, count = held.num_rows // 2, len(x)
    want = swiglu_of(x, rows.float(), bias)
    around = torch.full((count + 3, width + 64), NAN, dtype=torch.bfloat16, device=x.device)
    out = around[:count, :width]
    for _ in range(3):
        before = out.clone()
        gemm_swiglu_bf16.swiglu(out, x, rows, held, bias=bias, way=way)
        torch.testing.assert_close(out.double(), want, rtol=2**-7, atol=2e-3)
        assert bool(before.isnan().all()) or torch.equal(before, out)
        assert bool(around[count:].isnan().all()) and bool(around[:, width:].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(1136, 520), (2304, 64), (18432, 192)])
def test_every_way(size: tuple[int, int], gpu: torch.device) -> None:
    """Odd block counts with a partial block, a partial chunk of K, single and several turns, and a
    partial block of tokens. The other block copies half.
    """
    held = weight("bf16", size, gpu, paired=True)
    bias = torch.randn(size[0], device=gpu)
    rows = held.data[: size[0], : size[1]]
    for count in (65, 129, 200, 256, 500, 1100):
        x = torch.randn(count, size[1], device=gpu).bfloat16()
        for turned, eights in gemm_swiglu_bf16.MADE:
            for processors in (132, 16):
                way = gemm_swiglu_bf16.way_of(eights, size[0], count, processors, turned=turned)
                check(x, held, rows, way, bias)


@pytest.mark.gpu
def test_products_in_a_graph_wait_for_each_other(gpu: torch.device) -> None:
    """A norm writes x just before. Both are overwritten just after."""
    size, count = (16384, 2048), 768
    held, others = (
        weight("bf16", size, gpu, paired=True),
        torch.randn(8, count, size[1], device=gpu),
    )
    rows, norm = held.data[: size[0]], torch.ones(size[1], device=gpu)
    x = torch.empty(count, size[1], dtype=torch.bfloat16, device=gpu)
    out = torch.empty(count, size[0] // 2, dtype=torch.bfloat16, device=gpu)
    kept = torch.empty(len(others), *out.shape, dtype=torch.bfloat16, device=gpu)

    def run() -> None:
        for each, place in zip(others, kept, strict=True):
            gemv.rms_norm(x, each, norm, eps=1e-5, num_tokens=count)
            gemm_swiglu_bf16.swiglu(out, x, rows, held)
            place.copy_(out)

    run()
    torch.cuda.synchronize()
    expected = kept.clone()
    for each, found in zip(others, expected, strict=True):
        gemv.rms_norm(x, each, norm, eps=1e-5, num_tokens=count)
        torch.testing.assert_close(
            found.double(), swiglu_of(x, unpack(held)), rtol=2**-7, atol=2e-3
        )
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for _ in range(5):
        for place in (x, out, kept):
            place.fill_(NAN)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(kept, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["bfp8", "q40", "nvfp4"])
def test_values_of_copies(name: str, gpu: torch.device) -> None:
    """For a weight in blocks or codes with a dequantized copy."""
    held = weight(name, (2048, 512), gpu, paired=True)
    rows = hold(unpack(held).float(), "bf16", paired=False).data
    x = torch.randn(300, 512, device=gpu).bfloat16()
    check(
        x, held, rows, gemm_swiglu_bf16.choose_way(2048, 300, H200), torch.zeros(2048, device=gpu)
    )
