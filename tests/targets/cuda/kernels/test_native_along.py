"""along.cu: what it takes along, and on a GPU the bits of two launches of linear.cu."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from tests.targets.cuda.kernels.test_native import (
    NAN,
    any_weight,
    check_headers,
    gpu_of,
    poisoned,
    shaped,
    weight,
)
from tilewright.compiler.targets.cuda.held import HeldWeight
from tilewright.compiler.targets.cuda.kernels import native, native_along, nvrtc

KINDS = ["bfp8", "bfp4"]


@pytest.fixture
def gpu(device: torch.device) -> torch.device:
    """A GPU on which along.cu runs."""
    return gpu_of(device, native_along.why_not)


def test_every_header_is_named_once() -> None:
    check_headers(native_along.SOURCE)


@pytest.mark.parametrize("kind", KINDS)
def test_both_walk_as_they_do_alone(kind: str) -> None:
    """A kernel for each format, of the depth that linear.cu has for its usual shapes"""
    walk = native.choose_walk(shaped(kind, 12288, 2048))
    assert walk is not None
    assert [name for name in native_along.SOURCE.names if kind in name] == [
        f"gemv_along_{kind}_{walk.depth}"
    ]
    assert native.Walk(native_along._DEPTH, 2).kernel("bf16") in native.source().names


@pytest.mark.parametrize(
    ("held", "small", "is_taken"),
    [
        (shaped("bfp8", 12288, 2048), shaped("bf16", 64, 2048), True),
        (shaped("bfp4", 16384, 5120), shaped("bf16", 96, 5120), True),
        (shaped("bfp8", 12288, 2048), shaped("bf16", 128, 2048), True),
        (shaped("bfp8", 12288, 2048), shaped("bf16", 129, 2048), False),
        (shaped("bf16", 12288, 2048), shaped("bf16", 64, 2048), False),
        (shaped("bfp8", 12288, 2048), shaped("bfp8", 64, 2048), False),
        (shaped("bfp8", 12288, 2048), shaped("bf16", 64, 1024), False),
        (shaped("bfp8", 12288, 8196), shaped("bf16", 64, 8196), False),
    ],
)
def test_small_ones_of_bfloat16_go_along(
    held: HeldWeight, small: HeldWeight, is_taken: bool
) -> None:
    assert native_along.takes(held, small) == is_taken


@given(held=any_weight)
def test_what_is_taken_has_room(held: HeldWeight) -> None:
    """As many blocks on a multiprocessor as without it; 512 bytes of sums and more are fixed"""
    if not native_along.takes(held, shaped("bf16", 64, held.num_columns)):
        return
    walk = native.choose_walk(held)
    assert walk is not None and not walk.groups
    each = native_along._shared_bytes(held, walk) + 3200 + 1024
    assert walk.blocks_each * each <= nvrtc.MOST_SHARED + 1024


def both_of(
    kind: str, size: tuple[int, int], rows: int, gpu: torch.device, *, paired: bool = False
) -> tuple[HeldWeight, HeldWeight, torch.Tensor, tuple[torch.Tensor, float]]:
    """Two weights, x and a norm."""
    held = weight(kind, size, gpu, paired=paired)
    small = weight("bf16", (rows, size[1]), gpu, paired=False)
    gain = torch.rand(size[1], device=gpu) + 0.5
    return held, small, torch.randn(1, size[1], device=gpu) * 3, (gain, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize(
    ("size", "rows"),
    [((12288, 2048), 64), ((16400, 640), 128), ((48, 200), 3), ((960, 576), 40), ((80, 8192), 96)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_both_have_the_bits_of_two_launches(
    kind: str, size: tuple[int, int], rows: int, paired: bool, gpu: torch.device
) -> None:
    """And nothing else is written"""
    held, small, x, norm = both_of(kind, size, rows, gpu, paired=paired)
    assert native_along.takes(held, small)
    width, epilogue = size[0] // 2 if paired else size[0], native.SWIGLU if paired else native.STORE
    bias = torch.randn(size[0], device=gpu)
    how = {"norm": norm, "num_tokens": 1}
    found = []
    for is_one in (False, True):
        outs = [
            poisoned(width, gpu, torch.bfloat16 if paired else torch.float32),
            poisoned(rows, gpu),
        ]
        out, behind = outs[0][:1, :width], outs[1][:1, :rows]
        if is_one:
            given = native_along.Small(small, behind)
            native_along.linear(out, x, held, given, epilogue=epilogue, norm=norm, bias=bias)
        else:
            native.linear(out, x, held, epilogue=epilogue, bias=bias, **how)  # type: ignore[arg-type]
            native.linear(behind, x, small, epilogue=native.STORE, **how)  # type: ignore[arg-type]
        found.append(outs)
    for apart, along in zip(*found, strict=True):
        torch.testing.assert_close(along, apart, rtol=0, atol=0, equal_nan=True)
        assert bool(along[0, :-8].isfinite().all()) and bool(along[1:].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_in_a_graph_is_the_chain(kind: str, gpu: torch.device) -> None:
    """What begins before its inputs are written still reads them, in the blocks of either"""
    size = (1024, 1024)
    weights = [both_of(kind, size, 64, gpu)[:2] for _ in range(6)]
    _, _, x, norm = both_of(kind, size, 64, gpu)
    outs, smalls = torch.zeros(6, 1, 1024, device=gpu), torch.zeros(6, 1, 64, device=gpu)
    how = {"epilogue": native.STORE, "norm": norm}

    def chain(*, is_one: bool) -> None:
        for index, (held, small) in enumerate(weights):
            before = outs[index - 1] if index else x
            if is_one:
                given = native_along.Small(small, smalls[index])
                native_along.linear(outs[index], before, held, given, **how)  # type: ignore[arg-type]
            else:
                native.linear(outs[index], before, held, num_tokens=1, **how)  # type: ignore[arg-type]
                native.linear(smalls[index], before, small, num_tokens=1, **how)  # type: ignore[arg-type]

    chain(is_one=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain(is_one=True)
    for _ in range(20):
        x.normal_()
        outs.fill_(NAN), smalls.fill_(NAN)
        graph.replay()
        got = outs.clone(), smalls.clone()
        chain(is_one=False)
        assert torch.equal(got[0], outs) and torch.equal(got[1], smalls)
