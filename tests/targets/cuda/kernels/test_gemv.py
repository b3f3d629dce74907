"""gemv.cu: launches, compilation without spills, and results on a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.matmul import gemv
from tilewright.compiler.targets.cuda.weights.coded import pack_coded, unpack_coded
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight
from tilewright.compiler.targets.cuda.weights.packing import hold
from tilewright.compiler.targets.cuda.weights.packing import unpack as unpack_blocks

KINDS = ["bf16", "bfp8", "bfp4", *gemv.CODED]
BATCHES = [1, 2, 5, 8, 13, 16, 30, 33, 64]


def batches(held: PackedWeight) -> list[int]:
    return [count for count in BATCHES if count <= gemv.most_tokens(held)]


SIZES = [(4096, 4096), (6144, 4096), (4096, 14336), (576, 1536), (960, 576), (48, 200), (35, 2052)]
USUAL = [(8192, 28672), (28672, 4096), (2048, 8192), (64, 28672), (12288, 2048), (28672, 2048)]
SOURCES = [gemv.source(), gemv.coded_source()]
NAN = float("nan")


def shaped(kind: str, num_rows: int, num_columns: int) -> PackedWeight:
    """Return a weight's metadata without data."""
    return PackedWeight(kind, num_rows, num_columns, torch.empty(0))


any_weight = st.builds(
    shaped, st.sampled_from(KINDS), st.integers(1, 300_000), st.integers(1, 32_768)
)


@given(held=any_weight, num_tokens=st.integers(2, 64))
def test_a_grid_is_a_kernel_that_fits(held: PackedWeight, num_tokens: int) -> None:
    num_tokens = min(num_tokens, gemv.most_tokens(held))
    grid = gemv.choose_grid(held, num_tokens)
    groups = next(count for count in (1, 2, 4, 8) if num_tokens <= 8 * count)
    assert grid.kernel(held.kind, groups) in gemv.source_of(held.kind).names
    assert grid.num_warps * 32 >= 128  # 128 threads copy x
    assert 1 <= grid.shared_bytes(held, groups) <= 225 * 1024


@given(held=any_weight, num_tokens=st.integers(1, 16))
def test_a_walk_is_a_kernel_that_fits(held: PackedWeight, num_tokens: int) -> None:
    walk = gemv.choose_walk(held, num_tokens)
    if walk is None:
        assert num_tokens > 1
        return
    assert walk.kernel(held.kind) in gemv.source_of(held.kind).names
    assert num_tokens <= max(1, 8 * walk.groups)
    num_bytes = walk.shared_bytes(held.kind, held.num_column_tiles)
    fixed = (2 + max(1, walk.groups * 8)) * 1024  # and the reserved memory per block
    assert walk.blocks_each * (num_bytes + fixed) <= 228 * 1024
    if num_tokens == 1:  # a multiprocessor has no further block
        assert (walk.blocks_each + 1) * (num_bytes + 1024) > 228 * 1024


@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_has_a_product(kind: str) -> None:
    """Machine code is compiled at model start, so it has no unused kernel."""
    chosen = set()
    for num_rows, num_columns in [*SIZES, *USUAL]:
        held = shaped(kind, num_rows, num_columns)
        for num_tokens in (1, 8, 16, 32, 64):
            walk, groups = gemv.choose_walk(held, num_tokens), num_tokens // 8
            if walk is not None:
                chosen.add(walk.kernel(kind, leaves=num_tokens == 1 and gemv.leaves_norm(held)))
                chosen.add(walk.kernel(kind))
            elif num_tokens <= gemv.most_tokens(held):
                chosen.add(gemv.choose_grid(held, num_tokens).kernel(kind, groups))
    assert {name for name in gemv.source_of(kind).names if kind in name} == chosen


@pytest.mark.parametrize(
    ("held", "walk"),
    [
        (shaped("bf16", 6144, 4096), gemv.Walk(3, 2)),
        (shaped("bf16", 28672, 4096), gemv.Walk(3, 2)),
        (shaped("bf16", 4096, 14336), gemv.Walk(2, 2)),
        (shaped("bf16", 2048, 8192), gemv.Walk(2, 2)),
        (shaped("bfp8", 4096, 4096), gemv.Walk(4, 2)),
        (shaped("bfp8", 4096, 14336), gemv.Walk(4, 2)),
        (shaped("bfp8", 3072, 2048), gemv.Walk(4, 2)),
        (shaped("bfp8", 8192, 28672), gemv.Walk(3, 2)),
        (shaped("bfp4", 28672, 4096), gemv.Walk(10, 2)),
        (shaped("bfp4", 4096, 14336), gemv.Walk(8, 2)),
        (shaped("q40", 28672, 4096), gemv.Walk(10, 2)),
        (shaped("q40", 8192, 28672), gemv.Walk(6, 2)),
    ],
    ids=lambda each: f"{each.kind} {each.num_rows}" if isinstance(each, PackedWeight) else "",
)
def test_walks_of_usual_shapes(held: PackedWeight, walk: gemv.Walk) -> None:
    assert gemv.choose_walk(held) == walk


@pytest.mark.parametrize(
    ("held", "num_tokens", "walk"),
    [
        (shaped("bf16", 12352, 2048), 4, gemv.Walk(3, 1, 1)),
        (shaped("bf16", 12352, 2048), 16, gemv.Walk(3, 1, 2)),
        (shaped("bf16", 2048, 4096), 8, gemv.Walk(3, 1, 1)),
        (shaped("bf16", 2048, 4096), 9, None),
        (shaped("bf16", 6144, 4096), 8, None),
        (shaped("bf16", 257, 2048), 16, None),
        (shaped("bf16", 248320, 2048), 8, None),
        (shaped("bfp8", 3072, 2048), 13, gemv.Walk(4, 1, 2)),
        (shaped("bfp4", 4096, 4096), 2, None),
        (shaped("bf16", 12352, 2048), 17, None),
    ],
)
def test_walks_of_some_tokens(held: PackedWeight, num_tokens: int, walk: gemv.Walk | None) -> None:
    assert gemv.choose_walk(held, num_tokens) == walk


@given(held=any_weight)
def test_slices_depend_on_the_weight_alone(held: PackedWeight) -> None:
    assert gemv.num_slices(held) == (1 if held.num_rows > 1023 * 16 else 8)


def test_names_of_kernels() -> None:
    text = "GEMV(bf16, BF16, 0, 3)\n#define GEMV(name, F, A)\nGEMM(bfp8, BFP8, 4, 2, 3)\n"
    assert gemv.kernel_names(text) == ("gemv_bf16_0_3", "gemm_bfp8_4_2_3")


def check_headers(source: nvrtc.KernelSource) -> None:
    """NVRTC reads no directory: a source lists all its headers once."""
    asked, found = {source.path.name}, set[str]()
    while asked - found:
        name = min(asked - found)
        found.add(name)
        text = nvrtc.header_path(source.path, name).read_text()
        asked |= set(re.findall(r'^#include "(.+)"', text, re.M))
    assert sorted(found) == sorted((*source.headers, source.path.name))


def test_every_header_is_named_once() -> None:
    check_headers(gemv.source())
    check_headers(gemv.coded_source())


def test_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert nvrtc.gpu_of(torch.device("cpu")).why_no_cpp == "no GPU"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    gpu = nvrtc.gpu_of(torch.device("cuda", 0))
    assert gpu.why_no_cpp == "made for compute capability 9.0"


def assembler_output(source: nvrtc.KernelSource, tmp_path: Path) -> str:
    """Compile a source with nvcc, and return the output of the assembler."""
    target = "-gencode=arch=compute_90a,code=sm_90a"
    folders = {nvrtc.header_path(source.path, name).parent for name in source.headers}
    command = ["nvcc", "-std=c++17", "-cubin", target, "-Xptxas", "-v", str(source.path)]
    done = subprocess.run(
        [*command, *(f"-I{folder}" for folder in folders), "-o", str(tmp_path / "kernels.cubin")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[:2000]
    return done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.path.stem)
def test_it_compiles_without_spills(source: nvrtc.KernelSource, tmp_path: Path) -> None:
    output = assembler_output(source, tmp_path)
    kernels = re.findall(
        r"Compiling entry function '(\w+)'.*?(\d+) bytes spill stores.*?Used (\d+) registers",
        output,
        re.S,
    )
    assert {name for name, *_ in kernels} == set(source.names)
    assert [name for name, spilled, _ in kernels if spilled != "0"] == []
    for name, _, used in kernels:
        if name.startswith("gemv"):  # three blocks of one token fit, and two of more or of 4 bits
            four_bits = tuple(f"gemv_{kind}" for kind in ("q40", "bfp4", "nvfp4"))
            has_three = "_0_" in name and not name.startswith(four_bits)
            assert int(used) <= (80 if has_three else 128), name


def gpu_of(device: torch.device, source: nvrtc.KernelSource) -> torch.device:
    """Return the first GPU, or skip if it cannot run the kernels."""
    place = torch.device(device.type, 0) if device.type == "cuda" else device
    if reason := nvrtc.gpu_of(place).why_no_cpp:
        pytest.skip(reason)
    nvrtc.load(place, source)
    return torch.device("cuda", 0)


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A GPU for gemv.cu."""
    return gpu_of(device, gemv.source())


def weight(kind: str, size: tuple[int, int], gpu: torch.device, *, paired: bool) -> PackedWeight:
    dense = torch.randn(size, device=gpu) / size[1] ** 0.5
    if kind not in gemv.CODED:
        return hold(dense, kind, paired=paired)
    recipe = WeightRecipe((Segment("w", size[0]),), size, kind)
    held = pack_coded(recipe, lambda name: dense, gpu, paired=paired)
    if held.second_scales is None:
        return held
    return replace(
        held, second_scales=held.second_scales * (torch.rand_like(held.second_scales) + 1)
    )


def unpack(held: PackedWeight) -> torch.Tensor:
    return unpack_coded(held) if held.kind in gemv.CODED else unpack_blocks(held)


def tokens(held: PackedWeight, gpu: torch.device) -> torch.Tensor:
    """Return bfloat16 ``[64, whole tiles]`` with zero padding."""
    x = torch.zeros(64, held.num_column_tiles * 128, dtype=torch.bfloat16, device=gpu)
    x[:, : held.num_columns] = torch.randn(64, held.num_columns, device=gpu)
    return x


def swiglu_of(
    x: torch.Tensor, dense: torch.Tensor, bias: torch.Tensor | float = 0.0
) -> torch.Tensor:
    """Return SwiGLU in float64 for ``x [M, K]``, paired rows ``[N, K]`` and their bias."""
    gates, ups = (x.double() @ dense.double().T + bias).unflatten(1, (-1, 2, 8)).unbind(2)
    return (torch.nn.functional.silu(gates) * ups).flatten(1)


def poisoned(width: int, gpu: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.full((66, width + 8), NAN, dtype=dtype, device=gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [*SIZES, (28672, 4096), (16391, 2048)])
def test_products_and_their_bits(kind: str, size: tuple[int, int], gpu: torch.device) -> None:
    """Compare with float64.

    The first token has equal bits in all batches. Padding stays unchanged.
    """
    held = weight(kind, size, gpu, paired=False)
    x = tokens(held, gpu)
    bias = torch.randn(size[0], device=gpu)
    want = x[:, : size[1]].double() @ unpack(held).double().T + bias
    first = None
    for num_tokens in batches(held):
        around = poisoned(size[0], gpu)
        out = around[:64, : size[0]]
        gemv.linear(out, x, held, epilogue=gemv.STORE, num_tokens=num_tokens, bias=bias)
        torch.testing.assert_close(
            out[:num_tokens].double(), want[:num_tokens], rtol=1e-4, atol=1e-4
        )
        assert bool(around[num_tokens:].isnan().all())
        assert bool(around[:, size[0] :].isnan().all())
        first = out[0].clone() if first is None else first
        assert torch.equal(out[0], first)
        total = torch.ones(64, size[0], device=gpu)
        gemv.linear(total, x, held, epilogue=gemv.ADD, num_tokens=num_tokens, bias=bias)
        assert torch.equal(total[:num_tokens], 1 + out[:num_tokens])
        assert bool((total[num_tokens:] == 1).all())


def variants() -> list[tuple[str, int, gemv.Walk | gemv.LaunchGrid]]:
    """Return the kernels by format, maximum tokens and launch sizes."""
    found: list[tuple[str, int, gemv.Walk | gemv.LaunchGrid]] = []
    for name in (name for source in SOURCES for name in source.names if name != "rms_norm"):
        family, kind, *rest = name.split("_")
        sizes = [int(size) for size in rest]
        if family == "leaves":  # matmul with a norm: see test_a_norm_inside
            continue
        if family == "gemv":
            groups, depth = sizes
            most = max(1, 8 * groups)
            found += [(kind, most, gemv.Walk(depth, each, groups)) for each in (1, 2)]
        else:
            groups, tiles_per_warp, depth = sizes
            found.append((kind, 8 * groups, gemv.LaunchGrid(5, tiles_per_warp, depth)))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(2064, 2176), (16400, 640), (80, 8192), (64, 64), (512, 128)])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kernel_gives_the_same_bits(
    kind: str, size: tuple[int, int], gpu: torch.device
) -> None:
    held = weight(kind, size, gpu, paired=False)
    x = tokens(held, gpu)
    want = poisoned(size[0], gpu)[:64, : size[0]]
    depths = {"bf16": 2, "bfp4": 4, "q40": 4, "nvfp4": 4}
    reference = gemv.LaunchGrid(4, 1, depths.get(kind, 3))
    count = gemv.most_tokens(held)
    gemv.linear(want, x, held, epilogue=gemv.STORE, num_tokens=count, grid=reference)
    exact = x[:, : size[1]].double() @ unpack(held).double().T
    torch.testing.assert_close(want[:count].double(), exact[:count], rtol=1e-4, atol=1e-4)
    for of, most, chosen in variants():
        if of != kind:
            continue
        if isinstance(chosen, gemv.Walk):
            is_cut = gemv.num_slices(held) > 1
            if not chosen.has_room(kind, held.num_column_tiles) or (chosen.groups and not is_cut):
                continue
        around = poisoned(size[0], gpu)
        out = around[:64, : size[0]]
        for num_tokens in {1} if most == 1 else {max(2, most // 2 + 1), most - 1, most}:
            if num_tokens > count:
                continue
            how = {"walk": chosen} if isinstance(chosen, gemv.Walk) else {"grid": chosen}
            gemv.linear(out, x, held, epilogue=gemv.STORE, num_tokens=num_tokens, **how)
            assert torch.equal(out[:num_tokens], want[:num_tokens]), (chosen, num_tokens)
        assert bool(around[most:].isnan().all()), chosen


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(28672, 4096), (16384, 2048), (3072, 576), (48, 200)])
def test_swiglu(kind: str, size: tuple[int, int], gpu: torch.device) -> None:
    held = weight(kind, size, gpu, paired=True)
    x = tokens(held, gpu)
    want = swiglu_of(x[:, : size[1]], unpack(held))
    first = None
    for num_tokens in batches(held):
        around = poisoned(size[0] // 2, gpu, torch.bfloat16)
        out = around[:64, : size[0] // 2]
        gemv.linear(out, x, held, epilogue=gemv.SWIGLU, num_tokens=num_tokens)
        torch.testing.assert_close(
            out[:num_tokens].double(), want[:num_tokens], rtol=2.0**-7, atol=1e-4
        )
        assert bool(around[num_tokens:].isnan().all())
        assert bool(around[:, size[0] // 2 :].isnan().all())
        first = out[0].clone() if first is None else first
        assert torch.equal(out[0], first)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [(6144, 4096), (128, 8192), (28672, 4096), (960, 576), (48, 200)])
def test_a_norm_inside_has_the_bits_of_one_before(
    kind: str, size: tuple[int, int], gpu: torch.device
) -> None:
    held = weight(kind, size, gpu, paired=False)
    x, gain = torch.randn(5, size[1], device=gpu) * 3, torch.rand(size[1], device=gpu) + 0.5
    normed = torch.zeros(64, held.num_column_tiles * 128, dtype=torch.bfloat16, device=gpu)
    gemv.rms_norm(normed, x, gain, eps=1e-5, num_tokens=5)
    want = x.double() * torch.rsqrt(x.double().pow(2).mean(-1, keepdim=True) + 1e-5) * gain
    got = normed[:5, : size[1]].double()
    torch.testing.assert_close(got, want, rtol=2.0**-8, atol=1e-6)
    assert bool((normed[5:] == 0).all())
    inside, before = poisoned(size[0], gpu)[:64], poisoned(size[0], gpu)[:64]
    norm = gain, 1e-5
    gemv.linear(inside, x, held, epilogue=gemv.STORE, num_tokens=1, norm=norm)
    if gemv.leaves_norm(held):
        left, again = torch.full_like(normed[:1], NAN), poisoned(size[0], gpu)[:64]
        given = {"norm": norm, "normed": left}
        gemv.linear(again, x, held, epilogue=gemv.STORE, num_tokens=1, **given)
        assert torch.equal(left, normed[:1])  # zero padding in the columns too
        assert torch.equal(again[0, : size[0]], inside[0, : size[0]])
    gemv.linear(before, normed, held, epilogue=gemv.STORE, num_tokens=3)
    assert torch.equal(inside[0, : size[0]], before[0, : size[0]])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_in_a_graph_is_the_chain(kind: str, gpu: torch.device) -> None:
    """Kernels that start early still read complete inputs."""
    helds = [weight(kind, (1024, 1024), gpu, paired=False) for _ in range(6)]
    x = torch.randn(1, 1024, device=gpu)
    gain = torch.ones(1024, device=gpu)
    outs = [torch.zeros(1, 1024, device=gpu) for _ in helds]

    def chain() -> None:
        for before, out, held in zip([x, *outs[:-1]], outs, helds, strict=True):
            norm = (gain, 1e-5)
            gemv.linear(out, before, held, epilogue=gemv.STORE, num_tokens=1, norm=norm)

    chain()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(20):
        x.normal_()
        graph.replay()
        got = outs[-1].clone()
        chain()
        assert torch.equal(got, outs[-1])
