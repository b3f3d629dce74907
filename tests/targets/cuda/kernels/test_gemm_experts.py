"""gemm_experts.cu against float64: formats, padding, tile sizes; tile selection and memory."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.targets.cuda.kernels.test_expert_linear import (
    choice,
    expected,
    grouped,
    packed,
    weight,
)
from tests.targets.cuda.kernels.test_gemv import assembler_output, check_headers, gpu_of
from tests.targets.cuda.test_packing import whole_range_mxfp4
from tilewright.compiler.ops.dense import clamped_swiglu
from tilewright.compiler.targets.cuda.kernels.common.table import (
    ADA,
    EXACT,
    FAST,
    HOPPER,
    STRICT,
    Gpu,
)
from tilewright.compiler.targets.cuda.kernels.experts import experts_triton, gemm_experts
from tilewright.compiler.targets.cuda.kernels.experts.expert_pairs import Finish
from tilewright.compiler.targets.cuda.kernels.experts.gemm_experts import FORMATS, TILE_SIZES
from tilewright.compiler.targets.cuda.kernels.experts.route_triton import max_tiles
from tilewright.compiler.targets.cuda.kernels.experts.table import (
    BLOCKS,
    TRITON,
    PromptSite,
    prompt_kernel,
)

NAN = float("nan")
NUM_EXPERTS = 5


@pytest.mark.parametrize(
    ("formats", "num_columns", "arithmetic", "gpu", "kernel"),
    [
        (("bfp4", "bfp8"), 512, FAST, HOPPER, BLOCKS),
        (("mxfp4",), 2880, FAST, HOPPER, BLOCKS),
        (("mxfp4", "bf16"), 2880, FAST, HOPPER, TRITON),
        (("bfp8",), 511, FAST, HOPPER, TRITON),
        (("bfp8",), 512, STRICT, HOPPER, TRITON),
        (("bfp8",), 512, EXACT, HOPPER, TRITON),
        (("bfp8",), 512, FAST, ADA, TRITON),
    ],
)
def test_all_matmuls_of_a_plan_have_one_kernel(
    formats: tuple[str, ...], num_columns: int, arithmetic: str, gpu: Gpu, kernel: str
) -> None:
    sites = [PromptSite(fmt, arithmetic, gpu, num_columns) for fmt in formats]
    assert prompt_kernel(sites) == kernel


@pytest.mark.parametrize(("num_pairs", "size"), [(1, 32), (160, 32), (161, 64), (9999, 128)])
def test_tiles_hold_the_mean_of_an_expert(num_pairs: int, size: int) -> None:
    assert gemm_experts.tile_size(num_pairs, 5) == size


@given(num_pairs=st.integers(1, 4096), num_experts=st.integers(1, 300))
def test_scratch_has_a_place_for_every_pair(num_pairs: int, num_experts: int) -> None:
    size = gemm_experts.tile_size(num_pairs, num_experts)
    places = gemm_experts.arranged_bytes(num_pairs, num_experts, 130) / 512
    assert places == max_tiles(num_pairs, num_experts, size) * size >= num_pairs


def test_every_header_is_named_once() -> None:
    check_headers(gemm_experts.SOURCE)


def test_every_kernel_is_asked_for() -> None:
    matches = re.findall(
        r"^EXPERTS\((\w+), \w+, (\d+)\)", gemm_experts.SOURCE.path.read_text(), re.M
    )
    names = {f"gemm_experts_{fmt}_{eights}" for fmt, eights in matches}
    assert names | {"arrange_pairs"} == set(gemm_experts.SOURCE.names)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_it_compiles_without_spills_and_keeps_the_matrix_unit_fed(tmp_path: Path) -> None:
    output = assembler_output(gemm_experts.SOURCE, tmp_path)
    spills = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores", output, re.S
    )
    assert dict(spills) == dict.fromkeys(gemm_experts.SOURCE.names, "0")
    assert "serialized" not in output


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A GPU for gemm_experts.cu."""
    return gpu_of(device, gemm_experts.SOURCE)


@pytest.mark.gpu
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("tile_size", TILE_SIZES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_products(fmt: str, tile_size: int, own: bool, gpu: torch.device) -> None:
    """Experts with full, partial and no tiles; rows and columns that are no whole tiles; NaN beside
    the operands.
    """
    held, experts = weight(fmt, (203, 338), gpu), choice(170, 3, gpu)
    experts[experts == 2] = -1
    width = 338 * (3 if own else 1)
    around = torch.full((170, width + 6), NAN, dtype=torch.bfloat16, device=gpu)
    around[:, :width] = torch.randn(170, width, device=gpu)
    out = torch.full((170, 3 * 203 + 5), NAN, dtype=torch.bfloat16, device=gpu)
    x, view = around[:, :width], out[:, : 3 * 203]
    bias = torch.randn(NUM_EXPERTS, 203, 1, device=gpu)
    gemm_experts.expert_linear(
        view, x, held, grouped(experts, tile_size), top_k=3, finish=Finish(bias)
    )
    want = expected(x.reshape(170, 3 if own else 1, -1).expand(-1, 3, -1), held, experts)
    want += bias[experts.clamp(min=0).long(), :, 0]
    got = view.unflatten(1, (3, -1)).double()
    torch.testing.assert_close(got, want, rtol=2.0**-8, atol=8e-6, equal_nan=True)
    assert bool(out[:, 3 * 203 :].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [0.0, 0.5])
@pytest.mark.parametrize("tile_size", TILE_SIZES)
@pytest.mark.parametrize("fmt", FORMATS)
def test_swiglu(fmt: str, tile_size: int, limit: float, gpu: torch.device) -> None:
    inner = 77
    held, experts = weight(fmt, (2 * inner, 130), gpu, paired=True), choice(90, 2, gpu)
    x = torch.randn(90, 130, device=gpu).bfloat16()
    bias = torch.randn(NUM_EXPERTS, 2 * inner, 1, device=gpu)
    finish = Finish(bias, limit, 1.702)
    out = torch.full((90, 2 * inner), NAN, dtype=torch.bfloat16, device=gpu)
    gemm_experts.expert_linear(
        out, x, held, grouped(experts, tile_size), top_k=2, swiglu=True, finish=finish
    )
    y = expected(x[:, None].expand(-1, 2, -1), held, experts)
    sides = y.unflatten(-1, (-1, 2, 8))
    gate, up = (sides[..., side, :].flatten(2)[..., :inner] for side in (0, 1))
    some = bias[experts.clamp(min=0).long(), :, 0].double()
    gate, up = gate + some[..., :inner], up + some[..., inner:]
    want = torch.nn.functional.silu(gate) * up
    if limit:
        want = clamped_swiglu(gate, up, limit=limit, alpha=1.702)
    got = out.unflatten(1, (2, inner)).double()
    torch.testing.assert_close(got, want, rtol=2.0**-7, atol=8e-6, equal_nan=True)


@pytest.mark.gpu
def test_all_exponents_of_mxfp4(gpu: torch.device) -> None:
    dense, scales = whole_range_mxfp4((NUM_EXPERTS, 16, 124 * 32), gpu)
    held, experts = packed(dense, "mxfp4"), choice(50, 2, gpu)
    x = (torch.randn(50, len(scales), device=gpu) * scales).bfloat16()
    out = torch.full((50, 2 * 16), NAN, dtype=torch.bfloat16, device=gpu)
    gemm_experts.expert_linear(out, x, held, grouped(experts, 32), top_k=2)
    want = expected(x[:, None].expand(-1, 2, -1), held, experts).flatten(1)
    torch.testing.assert_close(out.double(), want, rtol=2.0**-7, atol=2e-2, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
def test_bits_are_those_of_all_tile_sizes(fmt: str, gpu: torch.device) -> None:
    held, experts = weight(fmt, (256, 640), gpu), choice(300, 2, gpu)
    x = torch.randn(300, 640, device=gpu).bfloat16()
    outputs = []
    for size in TILE_SIZES:
        out = torch.zeros(300, 2 * 256, dtype=torch.bfloat16, device=gpu)
        gemm_experts.expert_linear(out, x, held, grouped(experts, size), top_k=2)
        outputs.append(out)
    want = torch.zeros_like(outputs[0])
    experts_triton.expert_linear(want, x, held, grouped(experts, 64), top_k=2)
    assert all(torch.equal(each, outputs[0]) for each in outputs)
    torch.testing.assert_close(outputs[0], want, rtol=2.0**-7, atol=1e-5)
