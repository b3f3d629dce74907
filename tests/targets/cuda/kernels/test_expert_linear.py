"""Products with experts against float64: every kind, odd sizes, padding, rows in any company."""

from __future__ import annotations

import pytest
import torch

from tests.grids import grid
from tests.targets.cuda.test_packing import random_mxfp4, whole_range_mxfp4
from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.targets.cuda.kernels.experts.expert_pairs import Shared
from tilewright.compiler.targets.cuda.kernels.experts.experts_triton import (
    DECODE_PAIRS,
    MOST_PAIRS,
    PREFILL_PAIRS,
    SHORT_PAIRS,
    Tiling,
    expert_linear,
    sum_experts,
)
from tilewright.compiler.targets.cuda.kernels.experts.route_triton import Groups, group
from tilewright.compiler.targets.cuda.weights.experts import place_experts
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight
from tilewright.compiler.targets.cuda.weights.packing import hold, unpack

NAN = float("nan")
KINDS = ["bf16", "bfp8", "bfp4", "mxfp4"]
NUM_EXPERTS = 5
TILINGS = (
    *((pairs, None) for pairs in (SHORT_PAIRS, PREFILL_PAIRS)),
    *((pairs, Tiling(128, 64, 4, 3)) for pairs in (SHORT_PAIRS, PREFILL_PAIRS)),
    *((pairs, Tiling(128, 64, 4, 4)) for pairs in (SHORT_PAIRS, PREFILL_PAIRS)),
    (PREFILL_PAIRS, Tiling(128, 64, 8, 6)),
    (PREFILL_PAIRS, Tiling(256, 64, 8, 4)),
    (MOST_PAIRS, Tiling(128, 64, 8, 3)),
    (MOST_PAIRS, Tiling(128, 64, 8, 6)),
    (MOST_PAIRS, Tiling(256, 64, 8, 4)),
    (MOST_PAIRS, Tiling(256, 64, 8, 3)),
)
"""Pairs of a tile, and the rest of a tiling. None: the default."""


def weight(
    fmt: str, size: tuple[int, int], device: torch.device, *, paired: bool = False
) -> PackedWeight:
    shape = (NUM_EXPERTS, *size)
    dense = torch.randn(shape, device=device) / size[1] ** 0.5
    if fmt == "mxfp4":
        dense = random_mxfp4(shape, device)
    return packed(dense, fmt, paired=paired)


def packed(dense: torch.Tensor, fmt: str, *, paired: bool = False) -> PackedWeight:
    """Pack experts ``[E, rows, columns]``."""
    num_experts, num_rows, _ = shape = tuple(dense.shape)
    recipe = WeightRecipe((Segment("w", num_experts * num_rows),), shape, fmt)
    return place_experts(
        recipe, fmt, lambda name: dense, dense.device, paired=paired, check=lambda *_: None
    )


def choice(num_tokens: int, top_k: int, device: torch.device) -> torch.Tensor:
    """Different experts of each token; the last token is padding, but of one."""
    rows = [torch.randperm(NUM_EXPERTS)[:top_k] for _ in range(num_tokens)]
    experts = torch.stack(rows).to(device, torch.int32)
    if num_tokens > 1:
        experts[-1] = -1
    return experts


def grouped(experts: torch.Tensor, tile_size: int) -> Groups:
    groups = Groups.empty(experts.numel(), NUM_EXPERTS, tile_size, experts.device)
    group(groups, experts)
    return groups


def values(held: PackedWeight) -> torch.Tensor:
    """float64 ``[E, rows, columns]``."""
    return unpack(held).double().view(NUM_EXPERTS, held.num_rows, -1)


def expected(x_TKC: torch.Tensor, held: PackedWeight, experts: torch.Tensor) -> torch.Tensor:
    """float64 ``[T, K, rows]``; of padding NaN."""
    chosen = values(held)[experts.clamp(min=0).long()]
    y = torch.einsum("tkc,tkrc->tkr", x_TKC.double(), chosen)
    return y.masked_fill((experts < 0)[:, :, None], NAN)


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "size", "own", "tile_size", "kind"),
    grid(
        [
            *((1, 2, (40, 200), False, 8), (3, 3, (33, 130), True, 8)),
            *((7, 1, (16, 9), False, 8), (19, 4, (70, 64), True, 64)),
        ],
        KINDS,
    ),
)
def test_products(
    kind: str,
    num_tokens: int,
    top_k: int,
    size: tuple[int, int],
    own: bool,
    tile_size: int,
    device: torch.device,
) -> None:
    held, experts = weight(kind, size, device), choice(num_tokens, top_k, device)
    width = size[1] * (top_k if own else 1)
    around = torch.full((num_tokens, width + 3), NAN, dtype=torch.bfloat16, device=device)
    around[:, :width] = torch.randn(num_tokens, width, device=device)
    x = around[:, :width]
    out = torch.full((num_tokens, top_k * size[0] + 5), NAN, device=device)
    view = out[:, : top_k * size[0]]
    expert_linear(view, x, held, grouped(experts, tile_size), top_k=top_k)
    x_TKC = x.reshape(num_tokens, top_k if own else 1, -1).expand(-1, top_k, -1)
    want = expected(x_TKC, held, experts)
    torch.testing.assert_close(
        view.unflatten(1, (top_k, -1)).double(), want, rtol=2e-6, atol=4e-6, equal_nan=True
    )
    assert bool(out[:, top_k * size[0] :].isnan().all())


@pytest.mark.parametrize("kind", ["bf16", "bfp8", "bfp4"])
@pytest.mark.parametrize(("swiglu", "num_rows"), [(True, 48), (False, 33)])
def test_shared_expert(kind: str, swiglu: bool, num_rows: int, device: torch.device) -> None:
    """The shared expert has more rows, or fewer, and other columns."""
    held, experts = weight(kind, (64, 200), device, paired=swiglu), choice(3, 2, device)
    dense = torch.randn(num_rows * 2 if swiglu else num_rows, 136, device=device) / 11
    shared = hold(dense, kind, paired=swiglu)
    x, shared_x = torch.randn(3, 200, device=device), torch.randn(3, 136, device=device)
    x, shared_x = x.bfloat16(), shared_x.bfloat16()
    groups, width = grouped(experts, DECODE_PAIRS), 32 if swiglu else 64
    alone, out = (torch.full((3, 2 * width), NAN, device=device) for _ in range(2))
    shared_out = torch.full((3, num_rows + 5), NAN, device=device)
    expert_linear(alone, x, held, groups, top_k=2, swiglu=swiglu)
    named = Shared(shared_x, shared, shared_out[:, :num_rows])
    expert_linear(out, x, held, groups, top_k=2, swiglu=swiglu, shared=named)
    torch.testing.assert_close(out, alone, rtol=0, atol=0, equal_nan=True)
    want = shared_x.double() @ unpack(shared).double().T
    if swiglu:
        sides = want.unflatten(1, (-1, 2, 8))
        want = torch.nn.functional.silu(sides[:, :, 0]) * sides[:, :, 1]
        want = want.flatten(1)
    got = shared_out[:, :num_rows].double()
    torch.testing.assert_close(got, want, rtol=2e-6, atol=4e-6)
    assert bool(shared_out[:, num_rows:].isnan().all())


@pytest.mark.parametrize(("num_tokens", "tile_size"), [(2, 8), (19, 64)])
def test_all_exponents_of_mxfp4(num_tokens: int, tile_size: int, device: torch.device) -> None:
    dense, scales = whole_range_mxfp4((NUM_EXPERTS, 16, 124 * 32), device)
    held, experts = packed(dense, "mxfp4"), choice(num_tokens, 2, device)
    x = (torch.randn(num_tokens, len(scales), device=device) * scales).bfloat16()
    out = torch.full((num_tokens, 2 * 16), NAN, device=device)
    expert_linear(out, x, held, grouped(experts, tile_size), top_k=2)
    want = expected(x[:, None].expand(-1, 2, -1), held, experts).flatten(1)
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=2e-3, equal_nan=True)


@pytest.mark.parametrize("tile_size", [SHORT_PAIRS, PREFILL_PAIRS, MOST_PAIRS])
@pytest.mark.parametrize("own", [False, True])
def test_copied_tiles(own: bool, tile_size: int, device: torch.device) -> None:
    """Tiles of pairs are full and not. The last program has a part of its rows, and the width is no
    whole step.
    """
    held, experts = weight("bf16", (300, 200), device), choice(170, 4, device)
    x = torch.randn(170, 800 if own else 200, device=device).bfloat16()
    out = torch.full((170, 4 * 300), NAN, device=device)
    groups = grouped(experts, tile_size)
    expert_linear(out, x, held, groups, top_k=4, has_copy_engine=True)
    want = expected(x.view(170, -1, 200).expand(-1, 4, -1), held, experts)
    got = out.unflatten(1, (4, -1)).double()
    torch.testing.assert_close(got, want, rtol=2e-6, atol=8e-6, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("swiglu", [False, True])
def test_tilings_give_the_same_bits(swiglu: bool) -> None:
    device = torch.device("cuda")
    held, experts = weight("bf16", (1024, 512), device, paired=swiglu), choice(700, 3, device)
    x = torch.randn(700, 512, device=device).bfloat16()
    found = []
    for tile_size, tiling in TILINGS:
        out = torch.zeros(700, 3 * (512 if swiglu else 1024), device=device)
        groups = grouped(experts, tile_size)
        expert_linear(out, x, held, groups, top_k=3, swiglu=swiglu, tiling=tiling)
        found.append(out)
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("tile_size", [8, 128])
@pytest.mark.parametrize("inner", [24, 13])
@pytest.mark.parametrize("kind", KINDS)
def test_swiglu_of_halves_that_need_not_be_whole_tiles(
    kind: str, inner: int, tile_size: int, device: torch.device
) -> None:
    held, experts = weight(kind, (2 * inner, 70), device, paired=True), choice(4, 2, device)
    x = torch.randn(4, 70, device=device).bfloat16()
    out = torch.full((4, 2 * inner), NAN, dtype=torch.bfloat16, device=device)
    expert_linear(out, x, held, grouped(experts, tile_size), top_k=2, swiglu=True)
    y = expected(x[:, None].expand(-1, 2, -1), held, experts)
    sides = y.unflatten(-1, (-1, 2, 8))
    gate, up = (sides[..., side, :].flatten(2)[..., :inner] for side in (0, 1))
    want = torch.nn.functional.silu(gate) * up
    got = out.unflatten(1, (2, inner)).double()
    torch.testing.assert_close(got, want, rtol=2.0**-8, atol=4e-6, equal_nan=True)


def test_float32_operands_make_float32_products(device: torch.device) -> None:
    held, experts = weight("bfp8", (40, 90), device), choice(3, 2, device)
    x = torch.randn(3, 90, device=device)
    out = torch.full((3, 80), NAN, device=device)
    expert_linear(out, x, held, grouped(experts, 8), top_k=2)
    want = expected(x[:, None].expand(-1, 2, -1), held, experts).flatten(1)
    torch.testing.assert_close(out.double(), want, rtol=2e-6, atol=2e-6, equal_nan=True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_s_bits_do_not_depend_on_others(kind: str, device: torch.device) -> None:
    """Twenty tokens of one expert: three tiles; and each alone."""
    held = weight(kind, (32, 130), device)
    x = torch.randn(20, 130, device=device).bfloat16()
    experts = torch.full((20, 1), 3, dtype=torch.int32, device=device)
    together, alone = torch.empty(2, 20, 32, device=device)
    expert_linear(together, x, held, grouped(experts, 8), top_k=1)
    for row in (0, 7, 8, 19):
        part = slice(row, row + 1)
        expert_linear(alone[part], x[part], held, grouped(experts[part], 8), top_k=1)
        assert torch.equal(alone[part], together[part])


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("has_shared", [False, True])
def test_the_sum_of_a_token_s_products(
    residual: bool, has_shared: bool, device: torch.device
) -> None:
    products = torch.randn(3, 2 * 40, device=device)
    experts = torch.tensor([[4, 0], [1, 3], [-1, -1]], dtype=torch.int32, device=device)
    products[2] = NAN  # of padding nothing was written
    weights = torch.rand(3, 2, device=device)
    around = torch.full((3, 43), NAN, device=device)
    out = around[:, :40]
    before = torch.randn(3, 40, device=device)
    if residual:
        out.copy_(before)
    y = torch.randn(3, 60, device=device)
    shared = (y[:, :40], y[:, 50:51]) if has_shared else None
    sum_experts(out, products, weights, experts, residual=residual, shared=shared)
    want = (products.unflatten(1, (2, 40)) * weights[:, :, None]).sum(1)
    want[2] = 0.0
    if has_shared:
        want += y[:, :40] * y[:, 50:51].sigmoid()
    torch.testing.assert_close(out, want + before if residual else want)
    assert bool(around[:, 40:].isnan().all())
