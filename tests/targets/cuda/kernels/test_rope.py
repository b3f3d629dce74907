"""Rotation and cache writes of a prompt: against the reference's arithmetic and exact rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.grids import grid
from tilewright.compiler.formats.block_float import BFP8
from tilewright.compiler.ops.dense import rotate
from tilewright.compiler.targets.cuda.kernels.attention import rope
from tilewright.compiler.targets.cuda.kernels.attention.rope import rotate_and_store

NAN = float("nan")


def run(
    cache: Any,
    qkv: torch.Tensor,
    positions: list[int],
    slots: list[int],
    *,
    heads: tuple[int, int],
    half: int,
    interleaved: bool = False,
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v as the kernel gives them, from poisoned outputs, and the frequencies."""
    num_tokens, head_dim, device = len(positions), cache.pages.head_dim, qkv.device
    inv_freq = 1.0 / 10000.0 ** (torch.arange(half, device=device) / half)
    outs = [
        torch.full((num_tokens, count, head_dim), NAN, dtype=dtype, device=device)
        for count in (heads[0], heads[1], heads[1])
    ]
    rotate_and_store(
        cache.pages,
        torch.nn.functional.pad(qkv, (0, 8), value=NAN)[:, :-8],  # columns of a wider product
        q_out=outs[0],
        k_out=outs[1],
        v_out=outs[2],
        positions=torch.tensor(positions, device=device),
        slots=torch.tensor(slots, device=device),
        block_tables=cache.tables,
        inv_freq=inv_freq,
        num_heads=heads[0],
        interleaved=interleaved,
    )
    q, k, v = (out.cpu() for out in outs)
    return q, k, v, inv_freq.cpu()


@pytest.mark.parametrize(
    ("heads", "head_dim", "half", "interleaved", "kind"),
    grid(
        [
            ((4, 1), 64, 32, False),
            ((3, 1), 80, 40, True),
            ((9, 9), 96, 16, False),
            ((2, 1), 192, 24, True),
            ((8, 1), 256, 128, False),
            ((1, 1), 72, 36, False),
        ],
        ["fp32", "bf16", "bfp8"],
    ),
)
def test_rotates_and_stores(
    kind: str,
    heads: tuple[int, int],
    head_dim: int,
    half: int,
    interleaved: bool,
    paged: Callable[..., Any],
    device: torch.device,
) -> None:
    cache = paged(kind, [0, 0], num_pages=2, size=(heads[1], head_dim))
    positions, slots = [0, 63, 64, 127, 5, -1], [1, 1, 1, 1, 0, 0]
    qkv = torch.randn(len(positions), (heads[0] + 2 * heads[1]) * head_dim, device=device)
    q, k, v, inv_freq = run(
        cache, qkv, positions, slots, heads=heads, half=half, interleaved=interleaved
    )
    parts = qkv.cpu().view(len(positions), -1, head_dim)
    want_q, want_k, want_v = parts.split((heads[0], heads[1], heads[1]), 1)
    at = torch.tensor(positions)
    want_q = rotate(want_q, at, inv_freq, interleaved)
    want_k = rotate(want_k, at, inv_freq, interleaved)
    torch.testing.assert_close(q[:-1], want_q[:-1], rtol=1e-6, atol=2e-6)
    tolerance = {"fp32": 2e-6, "bf16": 2**-6, "bfp8": 2**-5}[kind]
    torch.testing.assert_close(k[:-1], want_k[:-1], rtol=0, atol=tolerance)
    for out in (q, k, v):
        assert not out[-1].any()
    for token, (position, slot) in enumerate(zip(positions[:-1], slots, strict=False)):
        assert torch.equal(cache.at(slot, position, 0), k[token])
        assert torch.equal(cache.at(slot, position, 1), v[token])
    exact = {"fp32": lambda x: x, "bf16": lambda x: x.bfloat16().float(), "bfp8": BFP8.round_trip}
    assert torch.equal(v[:-1], exact[kind](want_v[:-1]))


@pytest.mark.parametrize("kind", ["bf16", "bfp8"])
@pytest.mark.parametrize(
    ("heads", "half", "interleaved"), [((9, 2), 32, False), ((4, 9), 16, False), ((3, 1), 32, True)]
)
def test_programs_of_a_whole_token_have_the_bits_of_others(
    heads: tuple[int, int],
    half: int,
    interleaved: bool,
    kind: str,
    paged: Callable[..., Any],
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    positions, slots = [0, 127, 64, 5, -1], [1, 1, 1, 0, 0]
    qkv = torch.randn(len(positions), (heads[0] + 2 * heads[1]) * 64, device=device)
    found = []
    for max_tokens in (512, 1):
        monkeypatch.setattr(rope, "MAX_TILED_TOKENS", max_tokens)
        cache = paged(kind, [0, 0], num_pages=2, size=(heads[1], 64))
        how: dict[str, Any] = {"heads": heads, "half": half, "interleaved": interleaved}
        outs = run(cache, qkv, positions, slots, dtype=torch.bfloat16, **how)
        places = zip(positions[:-1], slots, strict=False)
        found.append([*outs, *(cache.at(slot, at, of) for at, slot in places for of in (0, 1))])
    for tiles, whole in zip(*found, strict=True):
        assert torch.equal(tiles, whole)


def test_leaves_other_positions_alone(paged: Callable[..., Any], device: torch.device) -> None:
    cache = paged("bfp8", [100, 30], num_pages=2, size=(2, 40))
    values, exponents = cache.pages.values.clone(), cache.pages.exponents.clone()
    run(cache, torch.randn(3, 8 * 40, device=device), [70, -1, -7], [0, 0, 1], heads=(4, 2), half=8)
    page = int(cache.tables[0, 1])
    for old, now in ((values, cache.pages.values), (exponents, cache.pages.exponents)):
        assert not torch.equal(old, now)
        old[page, :, :, 6] = now[page, :, :, 6]
        assert torch.equal(old, now)


@pytest.mark.parametrize("head_dim", [32, 40])
def test_bfp8_rounds_as_the_format_does(
    head_dim: int, paged: Callable[..., Any], device: torch.device
) -> None:
    """Bit for bit: ties, saturation, blocks of zeros and of denormals, great and tiny exponents."""
    num_tokens = 64
    x = torch.randn(num_tokens, 4, head_dim)
    x[1], x[2] = 0.0, 1e-40
    x[3] = torch.randint(-255, 256, x[3].shape) / 2.0
    x[4:8] = torch.ldexp(x[4:8], torch.randint(-30, 30, x[4:8].shape))
    x[8:12] = torch.ldexp(x[8:12], torch.randint(-126, -100, x[8:12].shape))
    x[12] *= 1e37
    x[13] = -1.9999999
    x[14:20] = torch.randint(-(2**31), 2**31, x[14:20].shape).int().view(torch.float32)
    x = x.where(x.isfinite(), 0.0)
    cache = paged("bfp8", [0], num_pages=1, size=(2, head_dim))
    qkv = torch.cat((x[:, :1], x[:, :1], x), 1).flatten(1).to(device)
    _, k, v, _ = run(cache, qkv, list(range(num_tokens)), [0] * num_tokens, heads=(2, 2), half=0)
    want = BFP8.quantise(x)
    page = int(cache.tables[0, 0])
    for of in (0, 1):
        heads = slice(2 * of, 2 * of + 2)
        got = cache.pages.values[page, of].transpose(0, 1).cpu()
        assert torch.equal(got, want.mantissas[:, heads])
        got = cache.pages.exponents[page, of].transpose(0, 1).cpu()
        assert torch.equal(got, want.exponents[:, heads])
    held = BFP8.dequantise(want)
    assert torch.equal(torch.cat((k, v), 1), held)


def test_far_positions_and_bf16(paged: Callable[..., Any], device: torch.device) -> None:
    """The angle is rounded to fp32 as the reference rounds it, and its sine is right there."""
    cache = paged("bf16", [0], num_pages=2048, size=(1, 16))
    positions = [131071, 100003]
    qkv = torch.randn(2, 3 * 16, device=device).bfloat16()
    q, _, _, inv_freq = run(cache, qkv, positions, [0, 0], heads=(1, 1), half=8)
    want = rotate(qkv.cpu().float().view(2, 3, 16), torch.tensor(positions), inv_freq, False)
    torch.testing.assert_close(q, want[:, :1], rtol=1e-6, atol=2e-6)
    q, k, _, _ = run(cache, qkv, positions, [0, 0], heads=(1, 1), half=8, dtype=torch.bfloat16)
    torch.testing.assert_close(q.float(), want[:, :1], rtol=2**-7, atol=2**-10)
    torch.testing.assert_close(k.float(), want[:, 1:2], rtol=2**-7, atol=2**-10)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["bf16", "bfp8"])
def test_large(kind: str, paged: Callable[..., Any], device: torch.device) -> None:
    num_tokens, heads, head_dim = 4096, (32, 8), 128
    cache = paged(kind, [0, 0], num_pages=64, size=(heads[1], head_dim))
    qkv = torch.randn(num_tokens, 48 * head_dim, device=device)
    q, k, v, inv_freq = run(
        cache, qkv, list(range(num_tokens)), [1] * num_tokens, heads=heads, half=64
    )
    parts = qkv.cpu().view(num_tokens, 48, head_dim)
    want = rotate(parts[:, :40], torch.arange(num_tokens), inv_freq, False)
    torch.testing.assert_close(q, want[:, :32], rtol=1e-6, atol=4e-6)
    torch.testing.assert_close(k, want[:, 32:], rtol=0, atol=2**-5)
    rounded = parts[:, 40:].bfloat16().float() if kind == "bf16" else BFP8.round_trip(parts[:, 40:])
    assert torch.equal(v, rounded)
