"""Compare route.cu and experts.cu with float64: formats, padding, batches."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.targets.cuda.kernels.test_expert_linear import packed
from tests.targets.cuda.test_packing import random_mxfp4, whole_range_mxfp4
from tilewright.compiler.ops.dense import clamped_swiglu
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.experts import experts as native_experts
from tilewright.compiler.targets.cuda.kernels.experts import route as native_route
from tilewright.compiler.targets.cuda.kernels.experts.expert_pairs import Finish, Shared
from tilewright.compiler.targets.cuda.kernels.experts.experts import PRODUCTS
from tilewright.compiler.targets.cuda.kernels.experts.route import TILE_PAIRS, Tiles
from tilewright.compiler.targets.cuda.kernels.experts.route_triton import max_tiles
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight
from tilewright.compiler.targets.cuda.weights.packing import unpack

NAN = float("nan")
CUDA = torch.device("cuda")
KINDS = ["bf16", "bfp8", "bfp4", "mxfp4"]


def weight(
    kind: str, shape: tuple[int, int, int], device: torch.device, *, paired: bool = False
) -> PackedWeight:
    dense = torch.randn(shape, device=device) / shape[2] ** 0.5
    if kind == "mxfp4":
        dense = random_mxfp4(shape, device)
    return packed(dense, kind, paired=paired)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record launched kernels by name."""
    names, launch = list[str](), nvrtc.launch

    def recorded(source: Any, name: str, **how: Any) -> None:
        names.append(name)
        launch(source, name, **how)

    monkeypatch.setattr(nvrtc, "launch", recorded)
    return names


class Step:
    """Routed tokens. The last of several tokens is padding."""

    def __init__(self, num_tokens: int, num_experts: int, top_k: int) -> None:
        wide = torch.randn(num_tokens, num_experts + 3, device=CUDA)
        self.logits = wide[:, :num_experts]
        self.positions = torch.arange(num_tokens, device=CUDA)
        if num_tokens > 1:
            self.positions[-1] = -1
        self.weights = torch.full((num_tokens, top_k), NAN, device=CUDA)
        self.experts = torch.full((num_tokens, top_k), 77, dtype=torch.int32, device=CUDA)
        self.tiles = Tiles.empty(num_tokens, top_k, num_experts, CUDA)
        self.tiles.tiles.fill_(-7)
        self.tiles.pairs.fill_(-7)

    def route(self, *, renormalise: bool = True, first: int = 0, count: int | None = None) -> None:
        native_route.route(
            self.weights,
            self.experts,
            self.logits,
            self.positions,
            self.tiles,
            renormalise=renormalise,
            first=first,
            count=count,
        )

    def some(self, rows: slice) -> Step:
        """Return a step for fewer tokens."""
        few = Step(1, self.logits.shape[1], self.weights.shape[1])
        few.logits, few.positions = self.logits[rows], self.positions[rows]
        few.weights, few.experts = self.weights[rows].clone(), self.experts[rows].clone()
        top_k, num_experts = self.weights.shape[1], self.logits.shape[1]
        few.tiles = Tiles.empty(len(few.logits), top_k, num_experts, CUDA)
        few.route()
        return few


@given(data=st.data())
@settings(max_examples=50, deadline=None)
def test_there_is_room_for_every_tile(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 40))
    top_k = data.draw(st.integers(1, num_experts))
    counts = [0] * num_experts
    num_tokens = data.draw(st.integers(1, 64))
    for _ in range(num_tokens):
        for expert in data.draw(st.permutations(range(num_experts)))[:top_k]:
            counts[expert] += 1
    most = max_tiles(num_tokens * top_k, num_experts, TILE_PAIRS)
    assert sum(-(-count // 8) for count in counts) <= most


@pytest.mark.parametrize(
    ("shape", "num_tokens", "top_k", "is_taken"),
    [
        ((256, 2048, 512), 64, 8, True),
        ((512, 2048, 512), 64, 10, True),
        ((256, 2048, 512), 65, 8, False),
        ((256, 2048, 500), 64, 8, False),
        ((600, 2048, 512), 64, 8, False),
        ((64, 2048, 512), 64, 32, False),
    ],
)
def test_what_it_takes(
    shape: tuple[int, int, int], num_tokens: int, top_k: int, is_taken: bool
) -> None:
    held = PackedWeight("bf16", *shape[1:], torch.empty(0), num_experts=shape[0])
    found = native_experts.takes(held, num_tokens=num_tokens, top_k=top_k, is_sum=True)
    assert found == is_taken


def test_every_kernel_is_asked_for() -> None:
    made = re.findall(r"^(LINEAR|SUM)\((\w+), \w+, (\d)\)", PRODUCTS.path.read_text(), re.M)
    names = {f"expert_{what.lower()}_{kind}_{depth}" for what, kind, depth in made}
    assert names == set(PRODUCTS.names) and len(made) == len(names)


def test_products_always_have_room() -> None:
    """Sums may have fewer steps in flight."""
    for kind in KINDS:
        held = PackedWeight(kind, 2048, 512, torch.empty(0), num_experts=512)
        assert native_experts.takes(held, num_tokens=64, top_k=32, is_sum=False)


@pytest.mark.gpu
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize(
    "size", [(1, 256, 8), (64, 256, 8), (37, 512, 10), (5, 7, 7), (64, 33, 32), (2, 3, 1)]
)
def test_route(size: tuple[int, int, int], renormalise: bool) -> None:
    top_k = size[2]
    step = Step(*size)
    step.route(renormalise=renormalise)
    shares = step.logits.double().softmax(-1)
    weights, experts = shares.topk(top_k)
    if renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    there = step.positions >= 0
    assert torch.equal(step.experts[there].long(), experts[there])
    torch.testing.assert_close(step.weights[there].double(), weights[there], rtol=1e-5, atol=1e-9)
    assert bool((step.experts[~there] == -1).all()) and bool((step.weights[~there] == 0).all())
    check_tiles(step.tiles, step.experts)


@pytest.mark.gpu
@pytest.mark.parametrize(("num_tokens", "first"), [(1, 6), (2, 3), (19, 5), (64, 1)])
def test_ranks_experts_are_all_together(num_tokens: int, first: int) -> None:
    """Those before the first one, and the rest: pairs of their own, whose sums add up."""
    whole = Step(num_tokens, 10, 3)
    whole.route()
    torch.cuda.synchronize()
    held = weight("bf16", (10, 48, 256), CUDA)
    x = torch.randn(num_tokens, 256, device=CUDA).bfloat16()
    total = torch.zeros(num_tokens, 48, device=CUDA)
    sums = torch.full_like(total, NAN)
    native_experts.expert_sum(sums, x, held, whole.tiles, whole.weights, residual=False)
    for low, high in ((0, first), (first, 10)):
        step = Step(num_tokens, 10, 3)
        step.logits, step.positions = whole.logits, whole.positions
        step.tiles = Tiles.empty(num_tokens, 3, high - low, CUDA)
        step.route(first=low, count=high - low)
        torch.cuda.synchronize()
        is_own = (whole.experts >= low) & (whole.experts < high)
        assert torch.equal(step.experts, torch.where(is_own, whole.experts - low, -1))
        assert torch.equal(step.weights, torch.where(is_own, whole.weights, 0.0))
        check_tiles(step.tiles, step.experts)
        rows = held.data.view(10, -1, held.data.shape[1])[low:high].flatten(0, 1)
        part = PackedWeight("bf16", 48, 256, rows, num_experts=high - low)
        native_experts.expert_sum(total, x, part, step.tiles, step.weights, residual=True)
    torch.testing.assert_close(total, sums, rtol=1e-5, atol=1e-5)


def check_tiles(tiles: Tiles, experts: torch.Tensor) -> None:
    """Every pair once, at most 8 of one expert in a tile; of several tokens by expert and token."""
    count = int(tiles.tiles[0])
    found = tiles.pairs[:count].tolist()
    owners = tiles.tiles[1 : 1 + count].tolist()
    flat = experts.flatten().tolist()
    pairs = [[pair for pair in row if pair >= 0] for row in found]
    assert all(
        row[len(kept) :] == [-1] * (8 - len(kept)) for row, kept in zip(found, pairs, strict=True)
    )
    assert all(
        flat[pair] == owner for row, owner in zip(pairs, owners, strict=True) for pair in row
    )
    expected = [(expert, pair) for pair, expert in enumerate(flat) if expert >= 0]
    if len(experts) > 1:
        expected.sort()
    assert [pair for row in pairs for pair in row] == [pair for _, pair in expected]
    assert all(row for row in pairs)


@pytest.mark.gpu
def test_of_equals_the_first_and_of_no_numbers_some() -> None:
    step = Step(3, 40, 3)
    step.positions[:] = 1
    step.logits[:2] = 0.0
    step.logits[1] = NAN
    step.route()
    assert step.experts[0].tolist() == [0, 1, 2]
    assert len(set(step.experts[1].tolist())) == 3
    assert bool(((step.experts >= 0) & (step.experts < 40)).all())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("swiglu", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "experts", "rows", "columns"),
    [(1, (9, 3), 64, 256), (19, (5, 2), 24, 128), (64, (40, 8), 48, 384), (33, (3, 3), 512, 2048)],
)
def test_products(
    num_tokens: int, experts: tuple[int, int], rows: int, columns: int, swiglu: bool, kind: str
) -> None:
    num_experts, top_k = experts
    step = Step(num_tokens, num_experts, top_k)
    step.route()
    held = weight(kind, (num_experts, rows * (2 if swiglu else 1), columns), CUDA, paired=swiglu)
    x = torch.randn(num_tokens, columns + 8, device=CUDA).bfloat16()[:, :columns]
    dtype = torch.bfloat16 if swiglu else torch.float32
    out = torch.full((num_tokens, top_k * rows), NAN, device=CUDA, dtype=dtype)
    native_experts.expert_linear(out, x, held, step.tiles, top_k=top_k, swiglu=swiglu)
    chosen = unpack(held).double().view(num_experts, held.num_rows, -1)
    y = torch.einsum("tc,tkrc->tkr", x.double(), chosen[step.experts.clamp(min=0).long()])
    if swiglu:
        gate, up = y.unflatten(2, (-1, 2, 8)).unbind(3)
        y = (torch.nn.functional.silu(gate) * up).flatten(2)[:, :, :rows]
    there = step.positions >= 0
    found = out.double().view(num_tokens, top_k, rows)
    scale = y.abs().max()
    torch.testing.assert_close(
        found[there], y[there], rtol=2.0**-7 if swiglu else 1e-5, atol=float(2e-6 * scale)
    )
    assert bool(found[~there].isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "experts", "rows", "columns"),
    [(1, (9, 3), 64, 256), (64, (40, 8), 40, 128), (16, (256, 8), 2048, 512)],
)
def test_sums(
    num_tokens: int,
    experts: tuple[int, int],
    rows: int,
    columns: int,
    has_shared: bool,
    residual: bool,
    kind: str,
) -> None:
    num_experts, top_k = experts
    step = Step(num_tokens, num_experts, top_k)
    step.route()
    held = weight(kind, (num_experts, rows, columns), CUDA)
    x = torch.randn(num_tokens, top_k * columns, device=CUDA).bfloat16()
    before = torch.randn(num_tokens, rows, device=CUDA)
    wide = torch.randn(num_tokens, rows + 5, device=CUDA)
    shared, gate = (wide[:, :rows], wide[:, -1:]) if has_shared else (None, None)
    bias = torch.randn(num_experts, rows, 1, device=CUDA) if residual else None
    torch.cuda.synchronize()
    out = before.clone()
    native_experts.expert_sum(
        out,
        x,
        held,
        step.tiles,
        step.weights,
        residual=residual,
        gate=gate,
        shared=shared,
        finish=Finish(bias),
    )
    selected = step.experts.clamp(min=0).long()
    chosen = unpack(held).double().view(num_experts, rows, -1)[selected]
    y = torch.einsum("tkc,tkrc->tkr", x.double().view(num_tokens, top_k, columns), chosen)
    if bias is not None:
        y += bias[selected, :, 0].double()
    y = (y * step.weights.double()[:, :, None]).sum(1)
    if shared is not None and gate is not None:
        y += shared.double() * gate.double().sigmoid()
    if residual:
        y += before.double()
    torch.testing.assert_close(out.double(), y, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 2, 19, 64])
@pytest.mark.parametrize("limit", [0.0, 0.75])
def test_biases_and_a_clamp_with_columns_that_are_no_whole_tiles(
    limit: float, num_tokens: int, kind: str, launched: list[str]
) -> None:
    """Also, kernels for few tokens have the same bits. Memory after x is NaN."""
    num_experts, top_k, columns, inner = 9, 4, 200, 72
    step = Step(num_tokens, num_experts, top_k)
    step.route()
    up = weight(kind, (num_experts, 2 * inner, columns), CUDA, paired=True)
    down = weight(kind, (num_experts, columns, inner), CUDA)
    up_bias = torch.randn(num_experts, 2 * inner, 1, device=CUDA)
    down_bias = torch.randn(num_experts, columns, 1, device=CUDA)
    x = torch.full((num_tokens + 1, columns + 56), NAN, device=CUDA).bfloat16()
    x = x[:num_tokens, :columns].normal_()
    chosen = step.experts.clamp(min=0).long()
    gate, above = unpack(up).view(num_experts, -1, 2, 8, columns).unbind(2)
    gate, above = (half.flatten(1, 2)[chosen].double() for half in (gate, above))
    first, second = up_bias[chosen, :, 0].double().chunk(2, -1)
    gate = torch.einsum("tc,tkrc->tkr", x.double(), gate) + first
    above = torch.einsum("tc,tkrc->tkr", x.double(), above) + second
    expected = torch.nn.functional.silu(gate) * above
    if limit:
        expected = clamped_swiglu(gate, above, limit, 1.702)
    there, inners, outs = step.positions >= 0, [], []
    few = (0, None) if num_tokens <= 2 else (0,)
    for depth in few:
        y = torch.full((num_tokens + 1, top_k * inner), NAN, device=CUDA).bfloat16()[:num_tokens]
        how = {"top_k": top_k, "swiglu": True, "small_depth": depth}
        finish = Finish(up_bias, limit, 1.702)
        native_experts.expert_linear(y, x, up, step.tiles, finish=finish, **how)  # type: ignore[arg-type]
        inners.append(y)
        out = torch.full((num_tokens, columns), NAN, device=CUDA)
        native_experts.expert_sum(
            out,
            y,
            down,
            step.tiles,
            step.weights,
            residual=False,
            finish=Finish(down_bias),
            small_depth=depth,
        )
        outs.append(out)
    products = [name for name in launched if name.startswith("expert_")]
    assert [f"_small_{kind}_" in name for name in products] == [False, False, True, True][
        : 2 * len(few)
    ]
    found = inners[0].double().view(num_tokens, top_k, inner)
    torch.testing.assert_close(found[there], expected[there], rtol=2.0**-7, atol=1e-3)
    products = (
        torch.einsum(
            "tkc,tkrc->tkr", found, unpack(down).double().view(num_experts, columns, inner)[chosen]
        )
        + down_bias[chosen, :, 0].double()
    )
    summed = (products * step.weights.double()[:, :, None]).sum(1)
    torch.testing.assert_close(outs[0][there].double(), summed[there], rtol=1e-5, atol=1e-5)
    for again, out in zip(inners, outs, strict=True):
        assert torch.equal(again[there], inners[0][there])
        assert torch.equal(out[there], outs[0][there])


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [1, 2, 9, 64])
def test_all_exponents_of_mxfp4(num_tokens: int, launched: list[str]) -> None:
    """A matmul and a sum, each in its kernel for this token count."""
    num_experts, top_k, rows, columns = 6, 2, 48, 124 * 32
    step = Step(num_tokens, num_experts, top_k)
    step.route()
    dense, scales = whole_range_mxfp4((num_experts, rows, columns), CUDA)
    held = packed(dense, "mxfp4")
    x = (torch.randn(num_tokens, columns, device=CUDA) * scales).bfloat16()
    y = torch.einsum("tc,erc->ter", x.double(), dense.double())
    torch.cuda.synchronize()
    launched.clear()
    out = torch.full((num_tokens, top_k * rows), NAN, device=CUDA)
    native_experts.expert_linear(out, x, held, step.tiles, top_k=top_k)
    total = torch.full((num_tokens, rows), NAN, device=CUDA)
    native_experts.expert_sum(total, x, held, step.tiles, step.weights, residual=False)
    small = num_tokens <= 2
    assert launched == [
        "expert_linear_small_mxfp4_8" if small else "expert_linear_mxfp4_3",
        "expert_sum_small_mxfp4_4" if small else "expert_sum_mxfp4_3",
    ]
    there = step.positions >= 0
    selected = step.experts.clamp(min=0).long()
    expected = y.gather(1, selected[:, :, None].expand(-1, -1, rows))
    found = out.double().view(num_tokens, top_k, rows)
    torch.testing.assert_close(found[there], expected[there], rtol=1e-5, atol=2e-3)
    summed = (expected * step.weights.double()[:, :, None]).sum(1)
    torch.testing.assert_close(total[there].double(), summed[there], rtol=1e-5, atol=2e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 9, 64])
def test_an_expert_of_all_tokens_runs_along(num_tokens: int, kind: str) -> None:
    """The shared expert does not change the results for selected experts."""
    num_experts, top_k, columns, inner, wide = 12, 4, 256, 128, 384
    step = Step(num_tokens, num_experts, top_k)
    step.positions[:] = 1
    step.route()
    up = weight(kind, (num_experts, 2 * inner, columns), CUDA, paired=True)
    shared_up = weight(kind, (1, 2 * wide, columns), CUDA, paired=True)
    down = weight(kind, (num_experts, columns, inner), CUDA)
    shared_down = weight(kind, (1, columns, wide), CUDA)
    x = torch.randn(num_tokens, columns, device=CUDA).bfloat16()
    gate = torch.randn(num_tokens, 1, device=CUDA)
    torch.cuda.synchronize()
    y = torch.full((num_tokens, wide), NAN, device=CUDA, dtype=torch.bfloat16)
    ys = [torch.full((num_tokens, top_k * inner), NAN, device=CUDA).bfloat16() for _ in range(2)]
    run = partial(native_experts.expert_linear, top_k=top_k, swiglu=True)
    run(ys[0], x, up, step.tiles, shared=Shared(x, shared_up, y))
    run(ys[1], x, up, step.tiles)
    assert torch.equal(*ys)
    gate_y, up_y = (x.double() @ unpack(shared_up).double().T).unflatten(1, (-1, 2, 8)).unbind(2)
    expected = (torch.nn.functional.silu(gate_y) * up_y).flatten(1)
    torch.testing.assert_close(y.double(), expected, rtol=2.0**-7, atol=1e-4)
    alone = (y.double() @ unpack(shared_down).double().T).float()
    outs = [torch.zeros(num_tokens, columns, device=CUDA) for _ in range(2)]
    add = partial(native_experts.expert_sum, residual=False, gate=gate)
    add(outs[0], ys[0], down, step.tiles, step.weights, shared=Shared(y, shared_down))
    add(outs[1], ys[0], down, step.tiles, step.weights, shared=alone)
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_token_s_bits_do_not_depend_on_its_company(kind: str) -> None:
    num_experts, top_k, columns = 30, 4, 512
    step = Step(64, num_experts, top_k)
    step.route()
    up = weight(kind, (num_experts, 256, columns), CUDA, paired=True)
    down = weight(kind, (num_experts, 512, 128), CUDA)
    x = torch.randn(64, columns, device=CUDA).bfloat16()

    def run(step: Step, x: torch.Tensor) -> torch.Tensor:
        torch.cuda.synchronize()
        inner = torch.zeros(len(x), top_k * 128, device=CUDA, dtype=torch.bfloat16)
        native_experts.expert_linear(inner, x, up, step.tiles, top_k=top_k, swiglu=True)
        out = torch.zeros(len(x), 512, device=CUDA)
        native_experts.expert_sum(out, inner, down, step.tiles, step.weights, residual=True)
        return out

    whole = run(step, x)
    assert torch.equal(whole, run(step, x))
    for rows in (slice(0, 1), slice(7, 16), slice(40, 64)):
        assert torch.equal(run(step.some(rows), x[rows]), whole[rows])


@pytest.mark.gpu
def test_layers_in_a_graph_are_those_one_by_one() -> None:
    """A layer's sum reads its tiles before the previous kernel ends."""
    num_experts, top_k, columns, num_layers, num_tokens = 64, 8, 512, 6, 20
    ups = [weight("bf16", (num_experts, 256, columns), CUDA, paired=True) for _ in range(2)]
    downs = [weight("bf16", (num_experts, columns, 128), CUDA) for _ in range(2)]
    x = torch.randn(num_tokens, columns, device=CUDA).bfloat16()
    logits = torch.randn(num_layers, num_tokens, num_experts, device=CUDA)
    positions = torch.arange(num_tokens, device=CUDA)
    out = torch.zeros(num_layers, num_tokens, columns, device=CUDA)

    def layer(index: int) -> None:
        weights = torch.empty(num_tokens, top_k, device=CUDA)
        experts = torch.empty(num_tokens, top_k, dtype=torch.int32, device=CUDA)
        tiles = Tiles.empty(num_tokens, top_k, num_experts, CUDA)
        route = partial(native_route.route, renormalise=True)
        route(weights, experts, logits[index], positions, tiles)
        inner = torch.empty(num_tokens, top_k * 128, device=CUDA, dtype=torch.bfloat16)
        up, down = ups[index % 2], downs[index % 2]
        native_experts.expert_linear(inner, x, up, tiles, top_k=top_k, swiglu=True)
        native_experts.expert_sum(out[index], inner, down, tiles, weights, residual=False)

    for index in range(num_layers):
        layer(index)
        torch.cuda.synchronize()
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(num_layers):
            layer(index)
    for _ in range(5):
        out.fill_(NAN)
        graph.replay()
        assert torch.equal(out, expected)
