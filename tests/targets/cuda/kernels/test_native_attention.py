"""attention.cu against float64 on the page contents, and its bits."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.targets.cuda.decode_step import SCALE, DecodeStep, rounded
from tests.targets.cuda.kernels.test_gemv import weight
from tilewright.compiler.targets.cuda.kernels.attention import attention as native_attention
from tilewright.compiler.targets.cuda.kernels.attention.split import (
    SplitKV,
    choose_share,
    reaches_of,
)
from tilewright.compiler.targets.cuda.kernels.matmul import gemm_block, gemv
from tilewright.compiler.targets.cuda.state.pages import PAGE

NAN = float("nan")
CONTEXTS = [0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 200, 330, 511, 512, 700, 999]


class Step(DecodeStep):
    """Steps through attention.cu. Over bfp8 pages, queries are more precise than bfloat16."""

    def __init__(
        self,
        paged: Callable[..., Any],
        device: torch.device,
        *,
        num_pages: int = 16,
        **settings: Any,
    ) -> None:
        super().__init__(paged, device, num_pages=num_pages, **settings)
        self.rounds_queries = self.kind == "bf16"

    def run(
        self, rows: list[int] | None = None, *, early: bool = False, share: SplitKV | None = None
    ) -> torch.Tensor:
        """Return bf16 ``[rows, H, D]`` on the CPU. The output buffer starts as NaN with margins."""
        chosen = list(range(len(self.positions))) if rows is None else rows
        width = self.heads[0] * self.head_dim
        shape = (len(chosen), width + 64)
        out = torch.full(shape, NAN, dtype=torch.bfloat16, device=self.qkv.device)
        qkv = self.qkv[chosen].contiguous()
        arguments = self.arguments(chosen)
        if out.is_cuda:
            torch.cuda.synchronize()  # for `early`
        native_attention.attend_decode(
            self.cache.pages, qkv, out=out[:, :width], early=early, share=share, **arguments
        )
        assert not self.scratch.arrived.any()
        assert out[:, width:].isnan().all()
        return out[:, :width].cpu().view(len(chosen), self.heads[0], self.head_dim)

    def check(self, got: torch.Tensor) -> None:
        near = 1e-2 if self.kind == "bf16" else 5e-3
        torch.testing.assert_close(got.double(), self.all_expected(), rtol=near, atol=near)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bfp8"])
@pytest.mark.parametrize(
    ("heads", "head_dim", "settings"),
    [
        ((4, 1), 64, {}),
        ((3, 1), 128, {"interleaved": True}),
        ((4, 2), 96, {"half": 16}),
        ((7, 1), 128, {"window": 40}),
        ((8, 1), 96, {"window": 64, "half": 24, "interleaved": True}),
        ((2, 2), 64, {"window": 1}),
        ((32, 8), 128, {}),
        ((5, 1), 128, {"window": 300, "half": 32}),
        ((16, 1), 128, {}),
        ((12, 1), 64, {"half": 8}),
        ((10, 1), 96, {"window": 129}),
        ((16, 2), 256, {"half": 32}),
        ((8, 1), 256, {}),
        ((3, 1), 256, {"window": 40, "interleaved": True}),
        ((1, 1), 256, {"window": 300, "half": 32, "interleaved": True}),
        ((2, 2), 256, {"window": 1, "half": 96}),
        ((16, 1), 256, {"half": 32}),
        ((11, 1), 256, {"window": 129}),
    ],
)
def test_against_float64(
    kind: str,
    heads: tuple[int, int],
    head_dim: int,
    settings: dict[str, Any],
    paged: Callable[..., Any],
    device: torch.device,
) -> None:
    positions = [*CONTEXTS, -1]
    step = Step(
        paged, device, kind=kind, heads=heads, head_dim=head_dim, positions=positions, **settings
    )
    got = step.run()
    step.check(got)
    assert torch.equal(got, step.run(early=True))


@pytest.mark.gpu
@pytest.mark.parametrize("num_pages", [16, 48])
@pytest.mark.parametrize("weight_kind", ["bfp8", "q40"])
@pytest.mark.parametrize(
    ("kind", "heads", "head_dim"),
    [("bf16", (4, 2), 64), ("bf16", (8, 1), 96), ("bfp8", (32, 8), 128), ("bf16", (16, 2), 256)],
)
def test_the_next_matmul_reads_the_output(
    kind: str,
    heads: tuple[int, int],
    head_dim: int,
    weight_kind: str,
    num_pages: int,
    paged: Callable[..., Any],
    device: torch.device,
) -> None:
    """The matmul gets the bits of the rows, after one group of splits or several."""
    positions = [*CONTEXTS, 64 * num_pages - 1, -1]
    how: dict[str, Any] = {"kind": kind, "heads": heads, "head_dim": head_dim}
    step = Step(paged, device, positions=positions, num_pages=num_pages, **how)
    count, width = len(positions), heads[0] * head_dim
    packed = weight(weight_kind, (256, width), device, paired=False)
    arranged = gemm_block.scratch(width, device).fill_(0xFF)
    num_places = gemm_block.num_places(gemm_block.choose_way(packed, count), count)
    x = torch.full((count, width), NAN, dtype=torch.bfloat16, device=device)
    is_coded = packed.format in gemv.CODED
    for out in (x, native_attention.ArrangedOutput(arranged, num_places, is_coded)):
        arguments = step.arguments(list(range(count)))
        native_attention.attend_decode(step.cache.pages, step.qkv, out=out, **arguments)
    want, found = torch.full((2, count, 256), NAN, device=device)
    how = {"epilogue": gemv.STORE, "arranged": arranged}
    gemm_block.linear(found, x, packed, is_there=True, **how)
    gemm_block.linear(want, x, packed, **how)
    assert torch.equal(found, want) and bool(want.isfinite().all())


@pytest.mark.gpu
@pytest.mark.parametrize("num_pages", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("kind", ["bf16", "bfp8"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_short_tables(
    head_dim: int, num_pages: int, kind: str, paged: Callable[..., Any], device: torch.device
) -> None:
    last = 64 * num_pages - 1
    for position in sorted({0, last // 2, last - 64, last - 1, last} - {-1}):
        step = Step(
            paged,
            device,
            kind=kind,
            heads=(8, 2),
            head_dim=head_dim,
            positions=[position],
            num_pages=num_pages,
        )
        got = step.run()
        step.check(got)
        assert torch.equal(got, step.run(early=True))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bfp8"])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_stores_the_new_token_and_nothing_else(
    kind: str, head_dim: int, paged: Callable[..., Any], device: torch.device
) -> None:
    step = Step(
        paged, device, kind=kind, heads=(8, 2), head_dim=head_dim, positions=[70, -1, 64, 699]
    )
    step.qkv[0, :: head_dim // 4] *= 2.0**-20  # blocks that lose bits, and a row of zeros
    step.qkv[2, -head_dim:] = 0.0
    step.qkv[3, -head_dim:] = torch.arange(head_dim, device=device) % 16 + 0.5  # ties
    step.qkv[3, -head_dim::16] = 100.0
    pages = step.cache.pages
    before = [t.clone() for t in (pages.values, pages.exponents) if t is not None]
    step.run()
    for row in (0, 2, 3):
        position, slot = int(step.positions[row]), int(step.slots[row])
        _, k, v = step.new(row)
        # A rotation that differs by an ulp may round a key differently.
        ulp = {"bf16": 2**-6, "bfp8": 2**-5}[kind]
        assert (step.cache.at(slot, position, 0) - rounded(k, kind)).abs().max() <= ulp
        assert torch.equal(step.cache.at(slot, position, 1), rounded(v, kind))
        page, line = int(step.cache.tables[slot, position // 64]), position % 64
        for old, now in zip(before, (pages.values, pages.exponents), strict=False):
            assert now is not None
            old[page, :, :, line] = now[page, :, :, line]
    for old, now in zip(before, (pages.values, pages.exponents), strict=False):
        assert now is not None
        assert torch.equal(old.view(torch.uint8), now.view(torch.uint8))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bfp8"])
@pytest.mark.parametrize(("heads", "head_dim"), [((4, 1), 64), ((16, 2), 256)])
def test_a_row_does_not_depend_on_its_batch(
    heads: tuple[int, int],
    head_dim: int,
    kind: str,
    paged: Callable[..., Any],
    device: torch.device,
) -> None:
    """Also for any number of blocks, and after another run."""
    positions = [140, -1, 30, 900]
    step = Step(paged, device, kind=kind, heads=heads, head_dim=head_dim, positions=positions)
    together = step.run()
    step.check(together)
    assert torch.equal(together, torch.cat([step.run([row]) for row in range(4)]))
    for num_joined in (1, 2, 4, 8):
        assert torch.equal(together, step.run(share=SplitKV(1, num_joined, 8 // num_joined)))
        step.check(step.run(share=SplitKV(1, num_joined, 1)))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_what_a_page_before_holds_changes_no_bits(
    head_dim: int, paged: Callable[..., Any], device: torch.device
) -> None:
    """The last page has much smaller exponents than earlier pages."""
    step = Step(
        paged, device, kind="bfp8", heads=(4, 1), head_dim=head_dim, positions=[5 * 64 + 20]
    )
    exponents = step.cache.pages.exponents
    assert exponents is not None
    exponents[int(step.cache.tables[0, 5])] -= 25
    step.qkv[:, 4 * head_dim :] *= 2.0**-25
    alone = step.run(share=SplitKV(1, 8, 1))
    assert torch.equal(alone, step.run(share=SplitKV(1, 1, 8)))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bfp8"])
@pytest.mark.parametrize(
    ("heads", "head_dim"),
    [((32, 8), 128), ((14, 2), 64), ((28, 4), 128), ((16, 1), 96), ((16, 2), 256), ((16, 1), 256)],
)
def test_large(
    kind: str,
    heads: tuple[int, int],
    head_dim: int,
    paged: Callable[..., Any],
    device: torch.device,
) -> None:
    """Several groups, and several pages per split. Short rows have the bits of smaller launches."""
    positions = [8191, -1, 330, 64, 0, 5000, 4095, 2047, 2048]
    step = Step(
        paged, device, kind=kind, heads=heads, head_dim=head_dim, positions=positions, num_pages=130
    )
    got = step.run()
    step.check(got)
    assert torch.equal(got, torch.cat([step.run([row]) for row in range(len(got))]))
    for _ in range(20):
        assert torch.equal(got, step.run(early=True))
    for reach in reaches_of(130)[:-1]:
        rows = [row for row, at in enumerate(positions) if at < reach * PAGE]
        share = choose_share(len(rows), heads[1], reach, head_dim)
        assert share.num_groups == 1 and torch.equal(got[rows], step.run(rows, share=share))
    groups = choose_share(1, heads[1], 130).num_groups
    for num_joined in (1, 2, 4, 8):
        share = SplitKV(groups, num_joined, 8 // num_joined, groups)
        assert torch.equal(got, step.run(share=share))
    for num_begun, num_joined in itertools.product({1, 2, groups - 1}, (1, 2, 4, 8)):
        share = SplitKV(groups, num_joined, 8 // num_joined, num_begun)
        assert torch.equal(got, step.run(share=share))
        assert torch.equal(got, step.run(share=share, early=True))
        free = step.run(share=SplitKV(groups, num_joined, 1, num_begun))
        step.check(free)
        assert torch.equal(free, step.run(share=SplitKV(groups, num_joined, 1, groups), early=True))


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [128, 256])
def test_a_window_over_several_groups(
    head_dim: int, paged: Callable[..., Any], device: torch.device
) -> None:
    step = Step(
        paged,
        device,
        kind="bfp8",
        heads=(8, 1),
        head_dim=head_dim,
        positions=[8191, 330, 5000],
        num_pages=130,
        window=3000,
    )
    got = step.run()
    step.check(got)
    assert torch.equal(got, step.run(early=True, share=SplitKV(16, 2, 4, 3)))


@pytest.mark.gpu
@pytest.mark.parametrize(("query", "key", "value"), [(47, -47, -60), (-55, 55, 60), (0, 0, 90)])
@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_bfp8_of_any_size(
    head_dim: int,
    query: int,
    key: int,
    value: int,
    paged: Callable[..., Any],
    device: torch.device,
) -> None:
    """Exponents outside float16's range, and positions with very small values."""
    step = Step(paged, device, kind="bfp8", heads=(4, 1), head_dim=head_dim, positions=[999, 64, 0])
    cache, exponents = step.cache, step.cache.pages.exponents
    assert exponents is not None
    is_small = torch.arange(cache.keys.shape[1]) % 64 < 8
    held = exponents.int()
    held[:, :, :, :8] -= 30
    for of, (copy, power) in enumerate(((cache.keys, key), (cache.values, value))):
        copy[:, is_small] *= 2.0**-30
        copy *= 2.0**power
        held[:, of] += power
    exponents.copy_(held.clamp(0, 255))
    parts = step.qkv.split((4 * head_dim, head_dim, head_dim), 1)
    for part, power in zip(parts, (query, key, value), strict=True):
        part *= 2.0**power
    got, wanted = step.run().double(), step.all_expected()
    for row, expected in zip(got, wanted, strict=True):
        assert (row - expected).abs().max() < 1e-2 * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [((32, 8), 128), ((16, 2), 256)])
def test_chained_in_a_graph(
    heads: tuple[int, int],
    head_dim: int,
    early: bool,
    paged: Callable[..., Any],
    device: torch.device,
) -> None:
    """Steps over two layers' pages in turn give equal results in each replay."""
    layers = [
        Step(paged, device, kind=kind, heads=heads, head_dim=head_dim, positions=[330, 64, -1, 7])
        for kind in ("bf16", "bfp8")
    ]
    shape = (8, 4, heads[0] * head_dim)
    outs = torch.full(shape, NAN, dtype=torch.bfloat16, device=device)

    def steps() -> None:
        for i, out in enumerate(outs):
            step = layers[i % 2]
            native_attention.attend_decode(
                step.cache.pages,
                step.qkv,
                out=out,
                positions=step.positions,
                slots=step.slots,
                block_tables=step.cache.tables,
                inv_freq=step.inv_freq,
                num_heads=heads[0],
                scale=SCALE,
                scratch=step.scratch,
                early=early,
            )

    steps()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    wanted = [step.run().view(4, -1) for step in layers]
    for step, got in zip(layers, wanted, strict=True):
        step.check(got.view(4, heads[0], head_dim))
    for _ in range(10):
        outs.fill_(NAN)
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        for i, out in enumerate(outs):
            assert torch.equal(out.cpu(), wanted[i % 2])
