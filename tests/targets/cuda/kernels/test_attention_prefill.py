"""Compare prefill attention with float64: sizes, windows, starts and padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.grids import grid
from tilewright.compiler.targets.cuda.kernels.attention import prefill_triton as attention_prefill
from tilewright.compiler.targets.cuda.kernels.attention.prefill_triton import (
    PrefillScratch,
    attend_prefill,
)

NAN = float("nan")
SCALE = 0.11


def attended(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    start: int,
    window: int,
    ends: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return float64 ``[tokens, heads, head_dim]`` for tokens after ``start`` positions."""
    group = queries.shape[1] // keys.shape[1]
    k, v = (each.cpu().double().repeat_interleave(group, 1) for each in (keys, values))
    scores = torch.einsum("thd,shd->hts", queries.double(), k) * SCALE
    ahead = torch.arange(len(k)) - (start + torch.arange(len(queries)))[:, None]
    beyond = ahead > 0 if ends is None else torch.arange(len(k)) >= ends[:, None]
    hidden = beyond | ((ahead <= -window) if window else False)
    return torch.einsum("hts,shd->thd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def check(
    paged: Callable[..., Any],
    device: torch.device,
    *,
    kind: str,
    heads: tuple[int, int],
    head_dim: int,
    start: int,
    num_tokens: int,
    num_padding: int = 0,
    window: int = 0,
    dtype: torch.dtype = torch.float32,
    is_short: bool = False,
    scratch: PrefillScratch | None = None,
    image: tuple[int, int] | None = None,
) -> None:
    """Check tokens ``start ..`` at the end of slot 1. The other slot has a longer context."""
    length = start + num_tokens
    cache = paged(kind, [length + 5, length], num_pages=length // 64 + 2, size=(heads[1], head_dim))
    work = torch.float32 if kind == "fp32" else torch.bfloat16
    q = torch.randn(num_tokens + num_padding, heads[0], head_dim, device=device).to(work)
    q[num_tokens:] = NAN
    out = torch.full((len(q), heads[0] * head_dim), NAN, dtype=dtype, device=device)
    positions = torch.full((len(q),), -1, device=device)
    positions[:num_tokens] = torch.arange(start, length)
    ends = None if image is None else positions + 1
    if ends is not None and image is not None:
        ends[image[0] - start : image[1] - start] = image[1]
    attend_prefill(
        cache.pages,
        q,
        out=out,
        positions=positions,
        slots=torch.ones(len(q), dtype=torch.int64, device=device),
        block_tables=cache.tables,
        scale=SCALE,
        window=window,
        is_short=is_short,
        scratch=scratch,
        ends=ends,
    )
    first = max(0, start - window) if window else 0  # of the positions that any token sees
    keys, values = cache.keys[1, first:length], cache.values[1, first:length]
    own_ends = None if ends is None else ends[:num_tokens].cpu() - first
    at: dict[str, Any] = {"start": start - first, "window": window, "ends": own_ends}
    want = attended(q[:num_tokens].cpu(), keys, values, **at)
    tolerance = 4e-6 if kind == "fp32" and dtype == torch.float32 else 8e-3
    got = out[:num_tokens].cpu().double()
    torch.testing.assert_close(got, want.flatten(1), rtol=tolerance, atol=tolerance)
    assert not out[num_tokens:].any()


@pytest.mark.parametrize(
    ("heads", "head_dim", "start", "num_tokens", "settings", "kind"),
    grid(
        [
            ((4, 1), 64, 0, 5, {}),
            ((3, 1), 80, 0, 130, {"num_padding": 70}),
            ((2, 2), 96, 100, 33, {"window": 40, "num_padding": 1}),
            ((7, 1), 128, 63, 2, {"dtype": torch.bfloat16}),
            ((1, 1), 16, 62, 3, {}),
            ((1, 1), 192, 64, 64, {"window": 64}),
            ((8, 1), 256, 127, 1, {}),
            ((1, 1), 72, 190, 70, {"window": 1}),
            ((1, 1), 32, 300, 66, {"window": 200}),
        ],
        ["fp32", "bf16", "bfp8"],
    ),
)
def test_against_float64(
    kind: str,
    heads: tuple[int, int],
    head_dim: int,
    start: int,
    num_tokens: int,
    settings: dict[str, Any],
    paged: Callable[..., Any],
    device: torch.device,
) -> None:
    check(
        paged,
        device,
        kind=kind,
        heads=heads,
        head_dim=head_dim,
        start=start,
        num_tokens=num_tokens,
        **settings,
    )


@pytest.mark.parametrize("window", [0, 20, 90])
@pytest.mark.parametrize("image", [(58, 74), (100, 110)])
def test_tokens_of_an_image_attend_in_both_directions(
    image: tuple[int, int], window: int, paged: Callable[..., Any], device: torch.device
) -> None:
    """Over the border of a page or not, with windows below and above a page."""
    sizes: dict[str, Any] = {"kind": "fp32", "heads": (2, 1), "head_dim": 16}
    sizes |= {"start": 40, "num_tokens": 90, "num_padding": 3}
    check(paged, device, **sizes, window=window, image=image)


@pytest.mark.parametrize("window", [0, 500])
def test_blocks_of_a_long_prompt(
    window: int, paged: Callable[..., Any], device: torch.device
) -> None:
    """The larger tile, with whole pages on both sides of a window's edge."""
    check(
        paged,
        device,
        kind="bf16",
        heads=(1, 1),
        head_dim=16,
        start=150,
        num_tokens=520,
        num_padding=130,
        window=window,
    )


@pytest.mark.parametrize(
    ("start", "num_tokens", "num_padding"),
    [(0, 40, 30), (64, 64, 64), (130, 70, 58), (400, 128, 0), (200, 2, 190)],
)
@pytest.mark.parametrize("kind", ["bf16", "bfp8"])
def test_programs_share_a_long_context(
    kind: str,
    start: int,
    num_tokens: int,
    num_padding: int,
    paged: Callable[..., Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some programs have no pages. The counters are zero for a second launch."""
    monkeypatch.setattr(attention_prefill, "SPLIT_PAGES", 1)
    scratch = PrefillScratch.empty(2, 16, device)
    for _ in range(2):
        check(
            paged,
            device,
            kind=kind,
            heads=(2, 1),
            head_dim=16,
            start=start,
            num_tokens=num_tokens,
            num_padding=num_padding,
            is_short=True,
            scratch=scratch,
        )
    assert not scratch.arrived.any()


SHORT = [(0, 70), (130, 1), (64, 33), (0, 64), (3, 40)]
"""First position and tokens by chunk."""


@pytest.mark.parametrize(
    ("sizes", "is_short", "has_scratch"),
    [(SHORT, True, False), (SHORT, True, True), ([*SHORT, (0, 600)], False, False)],
)
def test_chunks_begin_at_any_row(
    sizes: list[tuple[int, int]],
    is_short: bool,
    has_scratch: bool,
    paged: Callable[..., Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rows have equal bits in a launch per chunk. The last chunk has padding; a chunk is empty."""
    monkeypatch.setattr(attention_prefill, "SPLIT_PAGES", 1)
    scratch = PrefillScratch.empty(2, 16, device) if has_scratch else None
    num_pages = sum((first + count) // 64 + 1 for first, count in sizes)
    lengths = [first + count for first, count in sizes]
    cache = paged("bf16", lengths, num_pages=num_pages, size=(1, 16))
    num_rows = sum(count for _, count in sizes)
    q = torch.randn(num_rows + 9, 2, 16, device=device).to(torch.bfloat16)
    positions, slots = torch.full((2, len(q)), -1, device=device)
    slots.fill_(len(sizes) - 1)
    out, want = torch.full((2, len(q), 32), NAN, dtype=torch.bfloat16, device=device)
    how: dict[str, Any] = {"block_tables": cache.tables, "scale": SCALE, "scratch": scratch}
    starts = [0]
    for slot, (first, count) in enumerate(sizes):
        rows = slice(starts[-1], starts[-1] + count)
        positions[rows] = torch.arange(first, first + count)
        slots[rows] = slot
        at = {"positions": positions[rows], "slots": slots[rows], "out": want[rows]}
        attend_prefill(cache.pages, q[rows].contiguous(), **at, is_short=is_short, **how)
        starts.append(rows.stop)
    begins = torch.tensor([*starts[:-1], len(q), len(q)], device=device)
    at = {"positions": positions, "slots": slots, "out": out, "starts": begins}
    for _ in range(2):
        attend_prefill(cache.pages, q, **at, is_short=is_short, **how)
    assert out[:num_rows].isfinite().all() and torch.equal(out[:num_rows], want[:num_rows])
    assert not out[num_rows:].any()
    assert scratch is None or not scratch.arrived.any()


def test_chunks_divide_the_programs_of_long_contexts(
    paged: Callable[..., Any], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six blocks share 13 programs, so long contexts have two splits each."""
    monkeypatch.setattr(attention_prefill, "SPLIT_PAGES", 1)
    scratch, sizes = PrefillScratch.empty(2, 16, device), [(500, 33), (400, 20), *[(0, 2)] * 4]
    lengths = [first + count for first, count in sizes]
    cache = paged("bf16", lengths, num_pages=24, size=(1, 16))
    q = torch.randn(sum(count for _, count in sizes), 2, 16, device=device).to(torch.bfloat16)
    positions = torch.cat([torch.arange(first, first + count) for first, count in sizes])
    slots = torch.cat([torch.full((count,), n) for n, (_, count) in enumerate(sizes)])
    starts = torch.tensor([0, 33, 53, 55, 57, 59, 61])
    out = torch.full((2, len(q), 32), NAN, device=device)
    where = [each.to(device) for each in (positions, slots, starts)]
    names = ("positions", "slots", "starts")
    how: dict[str, Any] = {"block_tables": cache.tables, "scale": SCALE, "is_short": True}
    how |= dict(zip(names, where, strict=True))
    attend_prefill(cache.pages, q, out=out[0], **how)
    for _ in range(2):
        attend_prefill(cache.pages, q, out=out[1], scratch=scratch, **how)
        assert not scratch.arrived.any()
    torch.testing.assert_close(out[1], out[0], rtol=1e-2, atol=1e-2)
    assert not torch.equal(out[1], out[0]), "the sums are divided"


@pytest.mark.gpu
@pytest.mark.parametrize("start", [1000, 20_000])
def test_programs_share_a_long_context_on_the_device(
    start: int, paged: Callable[..., Any], device: torch.device
) -> None:
    scratch = PrefillScratch.empty(8, 128, device)
    size: dict[str, Any] = {"heads": (8, 2), "head_dim": 128, "start": start}
    size |= {"num_tokens": 200, "num_padding": 56}
    for _ in range(3):
        check(paged, device, kind="bf16", **size, is_short=True, scratch=scratch)
    assert not scratch.arrived.any()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bfp8", "fp32"])
@pytest.mark.parametrize(("head_dim", "window"), [(128, 0), (64, 1000), (256, 0)])
def test_large(
    kind: str, head_dim: int, window: int, paged: Callable[..., Any], device: torch.device
) -> None:
    check(
        paged,
        device,
        kind=kind,
        heads=(8, 2),
        head_dim=head_dim,
        start=777,
        num_tokens=1500,
        num_padding=36,
        window=window,
    )
