"""Decode attention against float64 over what the pages hold: sizes, windows, splits, batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.grids import grid
from tests.targets.cuda.decode_step import DecodeStep, rounded
from tilewright.compiler.targets.cuda.kernels.attention import decode_triton as attention_decode
from tilewright.compiler.targets.cuda.kernels.attention.decode_triton import attend_decode

NAN = float("nan")


class Step(DecodeStep):
    """Through Triton."""

    def __init__(
        self,
        paged: Callable[..., Any],
        device: torch.device,
        *,
        num_pages: int = 3,
        **settings: Any,
    ) -> None:
        super().__init__(paged, device, num_pages=num_pages, **settings)

    def run(
        self,
        rows: list[int] | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        is_fast: bool = False,
    ) -> Any:
        """``[rows, H, D]`` on the CPU, from an output full of NaN."""
        chosen = list(range(len(self.positions))) if rows is None else rows
        size = (len(chosen), self.heads[0] * self.head_dim)
        out = torch.full(size, NAN, dtype=dtype, device=self.qkv.device)
        # Columns of a wider product, as where a gate is computed with them.
        qkv = torch.nn.functional.pad(self.qkv[chosen], (0, 8), value=NAN)[:, :-8]
        given = self.arguments(chosen)
        attend_decode(self.cache.pages, qkv, out=out, is_fast=is_fast, **given)
        assert not self.scratch.arrived.any()
        return out.cpu().view(len(chosen), self.heads[0], self.head_dim)

    def check(self, got: torch.Tensor) -> None:
        tolerance = 2e-6 if self.kind == "fp32" else 8e-3
        torch.testing.assert_close(
            got.double(), self.all_expected(), rtol=tolerance, atol=tolerance
        )


@pytest.mark.parametrize(
    ("heads", "head_dim", "settings", "kind"),
    grid(
        [
            ((4, 1), 64, {}),
            ((3, 1), 80, {"interleaved": True}),
            ((2, 2), 96, {"half": 16}),
            ((7, 1), 128, {"window": 40}),
            ((2, 1), 192, {"window": 64, "half": 24, "interleaved": True}),
            ((8, 1), 256, {}),
            ((1, 1), 72, {"window": 1}),
        ],
        ["fp32", "bf16", "bfp8"],
    ),
)
def test_against_float64(
    kind: str,
    heads: tuple[int, int],
    head_dim: int,
    settings: dict[str, Any],
    paged: Callable[..., Any],
    device: torch.device,
) -> None:
    step = Step(
        paged, device, kind=kind, heads=heads, head_dim=head_dim, positions=[130, -1, 0], **settings
    )
    step.check(step.run())


@pytest.mark.parametrize("programs", [4, 8])
def test_fast_rows_have_a_split_a_program(
    programs: int,
    paged: Callable[..., Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(attention_decode, "PROGRAMS", programs)
    positions = [130, -1, 64, 0]
    step = Step(paged, device, kind="bf16", heads=(4, 1), head_dim=64, positions=positions)
    step.check(step.run(is_fast=True))


@pytest.mark.parametrize("position", [1, 63, 64, 65, 127, 128])
@pytest.mark.parametrize("window", [0, 63, 64])
def test_around_a_page_s_end(
    position: int, window: int, paged: Callable[..., Any], device: torch.device
) -> None:
    step = Step(
        paged,
        device,
        kind="fp32",
        heads=(2, 1),
        head_dim=16,
        positions=[position],
        window=window,
    )
    step.check(step.run())


@pytest.mark.parametrize("kind", ["fp32", "bf16", "bfp8"])
def test_stores_the_new_token_and_nothing_else(
    kind: str, paged: Callable[..., Any], device: torch.device
) -> None:
    step = Step(paged, device, kind=kind, heads=(4, 2), head_dim=40, positions=[70, -1, 64])
    pages = step.cache.pages
    before = [t.clone() for t in (pages.values, pages.exponents) if t is not None]
    step.run()
    for row, position in ((0, 70), (2, 64)):
        slot = int(step.slots[row])
        _, k, v = step.new(row)
        # A key may be rounded the other way where its rotation is an ulp apart.
        ulp = {"fp32": 1e-6, "bf16": 2**-6, "bfp8": 2**-5}[kind]
        assert (step.cache.at(slot, position, 0) - rounded(k, kind)).abs().max() <= ulp
        assert torch.equal(step.cache.at(slot, position, 1), rounded(v, kind))
        page, line = int(step.cache.tables[slot, position // 64]), position % 64
        for old, now in zip(before, (pages.values, pages.exponents), strict=False):
            assert now is not None
            old[page, :, :, line] = now[page, :, :, line]
    for old, now in zip(before, (pages.values, pages.exponents), strict=False):
        assert now is not None
        assert torch.equal(old.view(torch.uint8), now.view(torch.uint8))


@pytest.mark.parametrize("together", [1, 8])
@pytest.mark.parametrize("kind", ["fp32", "bfp8"])
def test_splits_of_several_pages(
    kind: str,
    together: int,
    paged: Callable[..., Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In one launch, and with a second launch that combines them."""
    monkeypatch.setattr(attention_decode, "MAX_SPLITS", 3)
    monkeypatch.setattr(attention_decode, "MAX_TOGETHER", together)
    step = Step(
        paged,
        device,
        kind=kind,
        heads=(2, 1),
        head_dim=32,
        positions=[290, 200, 100, -1, 20],
        num_pages=5,
    )
    step.check(step.run())


def test_a_row_does_not_depend_on_its_batch(
    paged: Callable[..., Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor on how many programs its splits are spread over, nor on a run before it."""
    positions = [140, -1, 30, 191]
    step = Step(paged, device, kind="bf16", heads=(4, 2), head_dim=64, positions=positions)
    together = step.run()
    alone = torch.cat([step.run([row]) for row in range(len(positions))])
    assert torch.equal(together, alone)
    monkeypatch.setattr(attention_decode, "PROGRAMS", 1)
    assert torch.equal(together, step.run())
    monkeypatch.setattr(attention_decode, "PROGRAMS", 16)
    assert torch.equal(together, step.run())
    assert torch.equal(together.bfloat16(), step.run(dtype=torch.bfloat16))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bfp8", "fp32"])
@pytest.mark.parametrize(
    ("heads", "head_dim"), [((32, 8), 128), ((32, 8), 64), ((28, 4), 128), ((8, 2), 256)]
)
def test_large(
    kind: str,
    heads: tuple[int, int],
    head_dim: int,
    paged: Callable[..., Any],
    device: torch.device,
) -> None:
    """Many pages, most of them several to a split; again from a graph, over a poisoned output."""
    positions = [8191, -1, 330, 64, 0, 5000, 4095, 77]
    step = Step(
        paged,
        device,
        kind=kind,
        heads=heads,
        head_dim=head_dim,
        positions=positions,
        num_pages=130,
    )
    got = step.run()
    step.check(got)
    assert torch.equal(got, torch.cat([step.run([row]) for row in range(len(positions))]))
    for _ in range(20):
        assert torch.equal(got, step.run())
