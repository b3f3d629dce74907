"""moe_small.cu has the bits of experts.cu: with other kernels, in graphs, and with its own
selection.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from tests.targets.cuda.kernels.test_native_experts import CUDA, KINDS, NAN, Step, weight
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.experts import experts as native_experts
from tilewright.compiler.targets.cuda.kernels.experts import moe_small
from tilewright.compiler.targets.cuda.kernels.experts.expert_pairs import Shared
from tilewright.compiler.targets.cuda.kernels.experts.route import Tiles, TopKParams
from tilewright.compiler.targets.cuda.kernels.matmul import gemv
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight
from tilewright.compiler.targets.cuda.weights.packing import hold


def empty(kind: str, rows: int, columns: int, num_experts: int = 1) -> PackedWeight:
    return PackedWeight(kind, rows, columns, torch.empty(0), num_experts=num_experts)


def test_the_kernels_that_are_taken_are_made() -> None:
    taken = [
        moe_small.kernel(kind, depths[is_sum], is_sum=is_sum)
        for kind, depths in moe_small.DEPTHS.items()
        for is_sum in (False, True)
    ]
    assert sorted(moe_small.NAMES) == sorted(taken)


@pytest.mark.parametrize("kind", KINDS)
def test_a_block_of_one_token_s_sum_fits_beside_one_of_the_product(kind: str) -> None:
    """A multiprocessor has 228 KB and reserves a part for each block."""
    up, shared_up = empty(kind, 1024, 2048, 256), empty(kind, 1024, 2048)
    down, shared_down = empty(kind, 2048, 512, 256), empty(kind, 2048, 512)
    total = 0
    for is_sum, pair in enumerate(((up, shared_up), (down, shared_down))):
        how = {"num_tokens": 1, "top_k": 8, "is_sum": bool(is_sum)}
        depth = moe_small.depth_of(*pair, **how)
        assert depth
        used = moe_small.room(*pair, **how, depth=depth)
        total += (used if is_sum else moe_small.launch_bytes(up, used, 132)) + 1024
    assert total <= nvrtc.MOST_SHARED + 1024


@pytest.mark.parametrize("num_tokens", [1, 2])
@pytest.mark.parametrize(
    ("fmt", "hidden", "inner", "top_k"),
    [
        ("bf16", 2048, 512, 8),
        ("bfp4", 2048, 512, 8),
        ("mxfp4", 2880, 2880, 4),
        ("bfp4", 4096, 1536, 8),
    ],
)
def test_two_blocks_of_the_product_share_no_multiprocessor_with_a_small_sum(
    fmt: str, hidden: int, inner: int, top_k: int, num_tokens: int
) -> None:
    """Each multiprocessor then has a place for the sum. Large sums have more blocks than places."""
    up, down = empty(fmt, 2 * inner, hidden, 256), empty(fmt, hidden, inner, 256)
    sizes = {"num_tokens": num_tokens, "top_k": top_k}
    depths = moe_small.DEPTHS[fmt]
    used = moe_small.room(up, None, **sizes, is_sum=False, depth=depths[0])
    taken = moe_small.launch_bytes(up, used, 132)
    of_sum = moe_small.room(down, None, **sizes, is_sum=True, depth=depths[1])
    assert max(taken, of_sum) <= gemv.MOST_SHARED
    if hidden > 132 * 16:
        assert taken == used
    else:
        assert 2 * (taken + 1024) > (228 << 10) >= taken + of_sum + 2048


def test_what_few_tokens_kernels_take() -> None:
    def depth(held: PackedWeight, shared: PackedWeight | None, num_tokens: int, top_k: int) -> int:
        sizes = {"num_tokens": num_tokens, "top_k": top_k}
        return moe_small.depth_of(held, shared, **sizes, is_sum=False)

    up = empty("bfp8", 1024, 2048, 256)
    assert depth(up, None, 2, 16) and not depth(up, None, 3, 8) and not depth(up, None, 2, 17)
    assert not depth(up, empty("bfp8", 1024, 1024), 1, 8)  # a common x for all
    takes = partial(moe_small.takes_choice, top_k=8)
    down = empty("bfp8", 2048, 512, 256)
    assert takes([(up, None), (down, None)], 256) and not takes([(up, None), (down, None)], 257)


class Layer:
    """Up and down matmuls for some experts and a shared expert."""

    def __init__(self, kind: str, num_experts: int, columns: int, inner: int, wide: int) -> None:
        self.inner, self.wide, self.columns = inner, wide, columns
        self.up = weight(kind, (num_experts, 2 * inner, columns), CUDA, paired=True)
        self.down = weight(kind, (num_experts, columns, inner), CUDA)
        self.shared_up = weight(kind, (1, 2 * wide, columns), CUDA, paired=True)
        self.shared_down = weight(kind, (1, columns, wide), CUDA)

    def run(
        self,
        out: torch.Tensor,
        x: torch.Tensor,
        step: Step,
        gate: torch.Tensor | None,
        *,
        choice: TopKParams | None = None,
        depths: tuple[int | None, int | None] = (None, None),
    ) -> torch.Tensor:
        """Add to ``out``. Return the value between the matmuls."""
        num_tokens, top_k = step.weights.shape
        y = torch.empty(num_tokens, self.wide, device=CUDA, dtype=torch.bfloat16)
        inner = torch.empty(num_tokens, top_k * self.inner, device=CUDA, dtype=torch.bfloat16)
        if not torch.cuda.is_current_stream_capturing():  # no kernel between the kernels of a graph
            y.fill_(NAN), inner.fill_(NAN)
        first = None if gate is None else Shared(x, self.shared_up, y)
        last = None if gate is None else Shared(y, self.shared_down)
        given = {"top_k": top_k, "swiglu": True, "shared": first, "choice": choice}
        native_experts.expert_linear(inner, x, self.up, step.tiles, **given, small_depth=depths[0])  # type: ignore[arg-type]
        given = {"residual": True, "gate": gate, "shared": last, "choice": choice}
        native_experts.expert_sum(
            out,
            inner,
            self.down,
            step.tiles,
            step.weights,
            small_depth=depths[1],
            **given,  # type: ignore[arg-type]
        )
        return inner


SIZES = [(9, 3, 256, 128, 256), (6, 6, 128, 40 * 128, 128), (256, 8, 2048, 512, 512)]
"""Experts, those of a token, columns, those inside, those inside the shared expert."""


@pytest.mark.gpu
@pytest.mark.parametrize("has_shared", [True, False])
@pytest.mark.parametrize(("num_tokens", "is_padded"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_few_tokens_have_the_same_bits(
    kind: str,
    size: tuple[int, int, int, int, int],
    num_tokens: int,
    is_padded: bool,
    has_shared: bool,
) -> None:
    """Two tokens are two rows. An expert has both rows, or a row and padding."""
    num_experts, _, columns, inner, wide = size
    inner = min(inner, 1024) if num_tokens > 1 else inner  # x for more pairs does not fit
    layer, step = Layer(kind, num_experts, columns, inner, wide), Step(num_tokens, *size[:2])
    x = torch.randn(num_tokens, columns, device=CUDA).bfloat16()
    gate = torch.randn(num_tokens, 1, device=CUDA) if has_shared else None
    before = torch.randn(num_tokens, columns, device=CUDA)
    if not is_padded:
        step.positions[:] = 1
    step.route()
    torch.cuda.synchronize()
    outs, inners = [], []
    for depths in [(0, 0), (None, None), moe_small.DEPTHS[kind]]:
        outs.append(before.clone())
        inners.append(layer.run(outs[-1], x, step, gate, depths=depths))
    torch.cuda.synchronize()
    there = step.positions >= 0
    assert int(there.sum()) == (1 if is_padded else num_tokens)
    for out, between in zip(outs[1:], inners[1:], strict=True):
        assert torch.equal(between[there], inners[0][there])
        assert torch.equal(out[there], outs[0][there])
    assert bool((outs[0] != before)[there].any()) and bool(outs[0][there].isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("size", [*SIZES, (100, 5, 256, 128, 256)])
def test_one_token_s_experts_are_found_within(
    size: tuple[int, int, int, int, int], renormalise: bool
) -> None:
    num_experts, top_k, columns, inner, wide = size
    layer, step = Layer("bfp8", num_experts, columns, inner, wide), Step(1, num_experts, top_k)
    x = torch.randn(1, columns, device=CUDA).bfloat16()
    gate, before = torch.randn(1, 1, device=CUDA), torch.randn(1, columns, device=CUDA)
    for logits in (step.logits.clone(), torch.zeros_like(step.logits)):  # first of equal values
        step.logits = logits
        step.route(renormalise=renormalise)
        torch.cuda.synchronize()
        expected, found = before.clone(), before.clone()
        between = layer.run(expected, x, step, gate, depths=(0, 0))
        nobody = Step(1, num_experts, top_k)  # its tiles and weights are not read
        choice = TopKParams(logits, step.positions, renormalise)
        assert torch.equal(layer.run(found, x, nobody, gate, choice=choice), between)
        assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize(("first", "count"), [(0, 4), (4, 5), (0, 9), (8, 1)])
@pytest.mark.parametrize("is_there", [True, False])
def test_other_ranks_experts_and_padding_have_no_products(
    first: int, count: int, is_there: bool
) -> None:
    layer, step = Layer("bf16", count, 256, 128, 256), Step(1, 9, 3)
    step.positions[:] = 5 if is_there else -1
    step.tiles = Tiles.empty(1, 3, count, CUDA)
    step.route(first=first, count=count)
    x = torch.randn(1, 256, device=CUDA).bfloat16()
    before, gate = torch.randn(1, 256, device=CUDA), torch.randn(1, 1, device=CUDA)
    torch.cuda.synchronize()
    expected, found = before.clone(), before.clone()
    layer.run(expected, x, step, gate, depths=(0, 0))
    choice = TopKParams(step.logits, step.positions, True, first, count)
    layer.run(found, x, step, gate, choice=choice)
    assert torch.equal(found, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bfp8"])
def test_layers_in_a_graph_read_what_the_layer_before_has_written(kind: str) -> None:
    """A sum reads logits, residual and gate before the previous kernel ends."""
    num_experts, top_k, columns, num_layers = 64, 8, 512, 6
    layers = [Layer(kind, num_experts, columns, 128, 256) for _ in range(2)]
    routers = [hold(torch.randn(num_experts + 1, columns, device=CUDA), "bf16", paired=False)]
    routers.append(hold(torch.randn(num_experts + 1, columns, device=CUDA), "bf16", paired=False))
    norm = torch.ones(columns, device=CUDA)
    begin, hidden = torch.randn(1, columns, device=CUDA), torch.empty(1, columns, device=CUDA)
    logits = torch.empty(1, num_experts + 1, device=CUDA)
    x = torch.empty(1, columns, device=CUDA, dtype=torch.bfloat16)
    step, positions = Step(1, num_experts, top_k), torch.zeros(1, dtype=torch.long, device=CUDA)

    def run(index: int, *, is_inside: bool) -> None:
        gemv.rms_norm(x, hidden, norm, eps=1e-6, num_tokens=1)
        product = {"epilogue": gemv.STORE, "num_tokens": 1}
        gemv.linear(logits, x, routers[index % 2], **product)
        step.logits, choice = logits[:, :num_experts], None
        if is_inside:
            choice = TopKParams(step.logits, positions, True)
        else:
            step.route()
        layer, gate = layers[index % 2], logits[:, num_experts:]
        layer.run(
            hidden, x, step, gate, choice=choice, depths=(None, None) if is_inside else (0, 0)
        )

    hidden.copy_(begin)
    for index in range(num_layers):
        run(index, is_inside=False)
        torch.cuda.synchronize()
    expected = hidden.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden.copy_(begin)
        for index in range(num_layers):
            run(index, is_inside=True)
    for _ in range(20):
        hidden.fill_(NAN)
        logits.fill_(NAN)
        graph.replay()
        assert torch.equal(hidden, expected)
