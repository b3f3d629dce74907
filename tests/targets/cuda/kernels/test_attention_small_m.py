"""attention_small_m.cuh: rows spread over clusters of sixteen blocks have the bits of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.targets.cuda.kernels.test_native_attention import Step
from tilewright.compiler.targets.cuda.kernels.attention import attention as native_attention
from tilewright.compiler.targets.cuda.kernels.attention.split import SplitKV, Spread, choose_share
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.launch import num_processors


def spread_of(step: Step, num_pages: int) -> Spread:
    """How such rows are spread; one at least is, but for eight heads' clusters over long tables,
    which some GPUs have no room for at once.
    """
    num_kv_heads = step.heads[1]
    groups = choose_share(1, num_kv_heads, num_pages).num_groups
    spread = Spread(groups, 1 if groups == 1 else -(-num_pages // 32))
    heads = step.heads[0] // num_kv_heads
    fits = native_attention._fits(spread, step.cache.pages, 1, heads)
    wanted, blocks = num_kv_heads * spread.num_clusters * 16, num_processors(step.qkv.device)
    if not fits and wanted > blocks:  # more than one block on some multiprocessors
        pytest.skip(f"no room for clusters of {wanted} blocks at once")
    assert fits
    return spread


def held(step: Step) -> list[torch.Tensor]:
    """What the pages hold."""
    pages = step.cache.pages
    return [each for each in (pages.values, pages.exponents) if each is not None]


@pytest.mark.gpu
@pytest.mark.parametrize("num_pages", [1, 8, 10, 18, 32, 34, 64, 96])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((8, 2), 128), ((32, 8), 128), ((7, 1), 128), ((16, 2), 256)]
)
def test_bits_are_those_of_rows_that_are_walked_over(
    heads: tuple[int, int],
    head_dim: int,
    num_pages: int,
    paged: Callable[..., Any],
    device: torch.device,
) -> None:
    """One to four rows, whatever blocks walk over them; and what is stored."""
    last = 64 * num_pages - 1
    positions = [last, -1, max(last - 90, 0), last // 3]
    step = Step(
        paged,
        device,
        kind="bf16",
        heads=heads,
        head_dim=head_dim,
        positions=positions,
        num_pages=num_pages,
    )
    spread = spread_of(step, num_pages)
    before = [each.clone() for each in held(step)]
    walked = step.run()
    step.check(walked)
    stored = [each.clone() for each in held(step)]
    for each, old in zip(held(step), before, strict=True):
        each.copy_(old)
    assert torch.equal(walked, step.run(share=spread))
    for each, wanted in zip(held(step), stored, strict=True):
        assert torch.equal(each.view(torch.uint8), wanted.view(torch.uint8))
    for rows in ([0], [2], [3], [1, 0], [3, 2], [2, 0, 1], [0, 1, 2, 3]):
        for early in (False, True):
            assert torch.equal(walked[rows], step.run(rows, share=spread, early=early))
    if num_pages > 8:
        for num_joined in (1, 2, 4, 8):
            share = SplitKV(spread.num_groups, num_joined, 8 // num_joined, spread.num_groups)
            assert torch.equal(walked, step.run(share=share))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "head_dim", "settings"),
    [
        ((3, 1), 128, {"interleaved": True}),
        ((7, 1), 128, {"window": 40}),
        ((5, 1), 128, {"window": 300, "half": 32}),
        ((16, 2), 256, {"half": 32, "window": 1100}),
        ((3, 1), 256, {"window": 40, "interleaved": True}),
        ((1, 1), 256, {"window": 2500, "half": 96}),
    ],
)
@pytest.mark.parametrize("num_pages", [20, 64])
def test_windows_and_rotations(
    num_pages: int,
    heads: tuple[int, int],
    head_dim: int,
    settings: dict[str, Any],
    paged: Callable[..., Any],
    device: torch.device,
) -> None:
    last = 64 * num_pages - 1
    for positions in ([0, 1, 15, 16], [63, 64, 65, 127], [511, 512, 700, 999], [last, last - 80]):
        step = Step(
            paged,
            device,
            kind="bf16",
            heads=heads,
            head_dim=head_dim,
            positions=positions,
            num_pages=num_pages,
            **settings,
        )
        walked = step.run()
        step.check(walked)
        spread = spread_of(step, num_pages)
        assert torch.equal(walked, step.run(share=spread))
        for _ in range(5):
            assert torch.equal(walked, step.run(share=spread, early=True))


@pytest.mark.gpu
@pytest.mark.parametrize("num_pages", [18, 34])
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("heads", "head_dim"), [((32, 8), 128), ((16, 2), 256)])
def test_chained_with_itself_in_a_graph(
    heads: tuple[int, int],
    head_dim: int,
    early: bool,
    num_pages: int,
    paged: Callable[..., Any],
    device: torch.device,
) -> None:
    """Launches that begin before the one before has ended."""
    step = Step(
        paged,
        device,
        kind="bf16",
        heads=heads,
        head_dim=head_dim,
        positions=[64 * num_pages - 9],
        num_pages=num_pages,
    )
    spread, wanted = spread_of(step, num_pages), step.run().flatten()
    outs = torch.full((16, wanted.numel()), float("nan"), dtype=torch.bfloat16, device=device)
    given = {**step.arguments([0]), "share": spread, "early": early}

    def steps() -> None:
        for out in outs:
            native_attention.attend_decode(step.cache.pages, step.qkv, out=out[None], **given)

    steps()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps()
    for _ in range(20):
        outs.fill_(float("nan"))
        torch.cuda.synchronize()
        graph.replay()
        torch.cuda.synchronize()
        for out in outs:
            assert torch.equal(out.cpu(), wanted)


@pytest.mark.gpu
def test_what_does_not_fit_is_walked_over(
    paged: Callable[..., Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More heads than the kernel has, and GPUs without room for such clusters."""
    settings: dict[str, Any] = {"kind": "bf16", "positions": [999, 64], "num_pages": 16}
    many = Step(paged, device, heads=(16, 1), head_dim=256, **settings)
    step = Step(paged, device, heads=(8, 1), head_dim=256, **settings)
    launch, launched = nvrtc.launch, []

    def named(source: nvrtc.KernelSource, name: str, **given: Any) -> None:
        launched.append(name)
        launch(source, name, **given)

    monkeypatch.setattr(nvrtc, "launch", named)
    assert torch.equal(many.run(), many.run(share=Spread(1, 1)))
    assert torch.equal(step.run(), step.run(share=Spread(1, 1)))
    monkeypatch.setattr(nvrtc, "clusters_at_once", lambda *given: 1)
    assert torch.equal(step.run(), step.run(share=Spread(1, 1)))
    assert ["small_m" in name for name in launched] == [False, False, False, True, False, False]
