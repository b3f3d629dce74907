"""router.cu: logits against float64, and what is made of them against route.cu, bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.targets.cuda.kernels.test_gemv import check_headers, shaped
from tests.targets.cuda.kernels.test_native_experts import Step
from tilewright.compiler.targets.cuda.kernels.experts import router as native_router
from tilewright.compiler.targets.cuda.kernels.experts.route import Tiles
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight
from tilewright.compiler.targets.cuda.weights.packing import hold

CUDA = torch.device("cuda")
NAN = float("nan")


@pytest.mark.parametrize(
    ("held", "num_experts", "is_taken"),
    [
        (shaped("bf16", 257, 2048), 256, True),
        (shaped("bf16", 128, 1024), 128, True),
        (shaped("bf16", 257, 2112), 256, False),
        (shaped("bf16", 384, 2048), 256, False),
        (shaped("bf16", 300, 2048), 300, False),
        (shaped("bfp8", 257, 2048), 256, False),
    ],
)
def test_what_it_takes(held: PackedWeight, num_experts: int, is_taken: bool) -> None:
    assert native_router.takes(held, num_experts) == is_taken


def test_headers_are_named() -> None:
    check_headers(native_router.SOURCE)


class Routed(Step):
    """A step whose logits are a product of x."""

    def __init__(self, num_tokens: int, num_experts: int, top_k: int, columns: int, more: int):
        super().__init__(num_tokens, num_experts, top_k)
        dense = torch.randn(num_experts + more, columns, device=CUDA) / columns**0.5
        self.packed = hold(dense.bfloat16(), "bf16", paired=False)
        self.exact = dense.bfloat16().double()
        self.x = torch.randn(num_tokens, columns + 8, device=CUDA).bfloat16()[:, :columns]
        self.around = torch.full((num_tokens + 1, num_experts + more + 3), NAN, device=CUDA)
        self.all = self.around[:-1, : num_experts + more]
        self.logits = self.all[:, :num_experts]

    def run(self, **given: Any) -> None:
        native_router.router(
            self.weights,
            self.experts,
            self.all,
            self.x,
            self.packed,
            self.positions,
            self.tiles,
            renormalise=True,
            num_experts=self.logits.shape[1],
            **given,
        )


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("experts", "columns", "more"),
    [((256, 8), 2048, 1), ((128, 8), 1024, 0), ((60, 4), 1408, 1), ((9, 9), 192, 0)],
)
@pytest.mark.parametrize("num_tokens", [5, 16, 23, 32])
def test_all_that_route_makes(
    num_tokens: int, experts: tuple[int, int], columns: int, more: int
) -> None:
    step = Routed(num_tokens, *experts, columns, more)
    ranks = [(0, None), (experts[0] // 3, experts[0] // 2)]
    for first, count in ranks:
        step.all.fill_(NAN), step.weights.fill_(NAN)
        step.run(first=first, count=count)
        torch.testing.assert_close(
            step.all.double(), step.x.double() @ step.exact.T, rtol=1e-5, atol=1e-5
        )
        assert bool(step.around[-1].isnan().all())
        assert bool(step.around[:, step.all.shape[1] :].isnan().all())
        found = [each.clone() for each in (step.weights, step.experts)]
        tiles, step.tiles = step.tiles, Tiles.empty(num_tokens, experts[1], experts[0], CUDA)
        step.route(first=first, count=count)
        assert torch.equal(found[0], step.weights) and torch.equal(found[1], step.experts)
        used = int(step.tiles.tiles[0])
        assert torch.equal(tiles.tiles[: 1 + used], step.tiles.tiles[: 1 + used])
        assert torch.equal(tiles.pairs[:used], step.tiles.pairs[:used])
        step.tiles = tiles


@pytest.mark.gpu
def test_a_chain_in_a_graph_is_the_chain() -> None:
    """Launches that begin before the one before has ended read what that has written."""
    steps = [Routed(30, 256, 8, 2048, 1) for _ in range(2)]
    given = [step.x.clone() for step in steps]
    outs = torch.empty(12, 30, 257, device=CUDA)

    def chain() -> None:
        for index, out in enumerate(outs):
            step = steps[index % 2]
            step.x.copy_(given[index % 3 % 2])
            step.run()
            out.copy_(step.all)

    chain()
    wanted = outs.clone()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(10):
        outs.fill_(NAN)
        graph.replay()
        assert torch.equal(outs, wanted)
