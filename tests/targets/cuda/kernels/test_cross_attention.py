"""Attention to image tiles and gated sums, against the operators."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler import ops
from tilewright.compiler.targets.cuda.kernels.attention import cross_attention
from tilewright.compiler.targets.cuda.kernels.attention.cross_attention import (
    ImageTiles,
    cross_attend,
    scratch_bytes,
)
from tilewright.compiler.targets.cuda.kernels.elementwise.add_gated import add_gated

EPS, SCALE = 1e-5, 0.3
VISIBLE = [(0, 3), (1, 2), (0, 0), (2, 3), (0, 1)]
"""Visible tiles of five tokens."""


@pytest.mark.parametrize("decodes", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "dim", "keys", "dtype"),
    [
        (6, 2, 12, 5, torch.float32),
        (4, 1, 80, 70, torch.bfloat16),
        pytest.param(32, 8, 128, 1601, torch.bfloat16, marks=pytest.mark.gpu),
        pytest.param(64, 8, 128, 1601, torch.bfloat16, marks=pytest.mark.gpu),
    ],
)
def test_cross_attention_equals_the_operator(
    heads: int,
    groups: int,
    dim: int,
    keys: int,
    dtype: torch.dtype,
    decodes: bool,
    device: torch.device,
) -> None:
    torch.manual_seed(0)
    width = 2 * 2 * groups * dim
    values = torch.randn(3 * keys, width, device=device).to(dtype)
    whole = torch.randn(len(VISIBLE), heads * dim + 4, device=device)
    norm = torch.rand(dim, device=device) + 0.5
    visible = torch.tensor(VISIBLE, device=device)
    anchor = torch.empty(16, dtype=dtype, device=device)
    first = (values.data_ptr() - anchor.data_ptr()) // anchor.element_size()
    offsets = first + torch.arange(3, device=device) * keys * width
    offsets = offsets.repeat(len(VISIBLE) if decodes else 1, 1)
    out = torch.full((len(VISIBLE), heads * dim + 8), float("nan"), dtype=dtype, device=device)
    cross_attend(
        out[:, : heads * dim],
        whole[:, : heads * dim],
        ImageTiles(anchor, offsets, visible, keys, width),
        norm,
        eps=EPS,
        num_kv_heads=groups,
        first=width // 2,
        scale=SCALE,
        decodes=decodes,
    )
    expected = ops.cross_attention.reference(
        whole[:, : heads * dim], values.float(), visible * keys, norm, EPS, groups, 1, SCALE
    )
    limit = 1e-5 if dtype == torch.float32 else 0.03
    torch.testing.assert_close(out[:, : heads * dim].float(), expected, atol=limit, rtol=0)
    assert not out[2, : heads * dim].any() and out[:, heads * dim :].isnan().all()


@pytest.mark.parametrize(("num_rows", "num_tiles"), [(16, 16), (18, 32), (1, 256)])
def test_scratch_bytes_are_allocated(
    num_rows: int, num_tiles: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """8 layers of 11B share them: 256 decode tokens use 273 MB."""
    empty, sizes = torch.empty, list[int]()

    def counted(*shape: int, **options: object) -> torch.Tensor:
        made = empty(*shape, **options)  # type: ignore[call-overload]
        sizes.append(made.nbytes)
        return made

    values = torch.ones(5, 2 * 12, device=device)
    offsets = torch.zeros(num_rows, num_tiles, dtype=torch.int64, device=device)
    visible = torch.tensor([[0, 1]] * num_rows, device=device)
    q, norm = torch.ones(num_rows, 4 * 12, device=device), torch.ones(12, device=device)
    monkeypatch.setattr(torch, "empty", counted)
    cross_attend(
        torch.zeros_like(q),
        q,
        ImageTiles(values, offsets, visible, 5, 24),
        norm,
        eps=EPS,
        num_kv_heads=1,
        first=0,
        scale=SCALE,
        decodes=True,
    )
    assert sum(sizes) == scratch_bytes(num_rows, 4, 12)
    assert scratch_bytes(256, 32, 128) == 272_629_760


@pytest.mark.parametrize("unit", [16, 4])
def test_rows_of_a_batch_have_their_own_bits(
    unit: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    """Neither the batch, its groups, the chunk nor the number of tiles changes bits."""
    monkeypatch.setattr(cross_attention, "TILE_UNIT", unit)
    monkeypatch.setattr(cross_attention, "_MIN_ROWS", 1)
    torch.manual_seed(0)
    heads, dim, keys, width = 4, 16, 21, 2 * 2 * 16
    values = torch.randn(3 * keys, width, device=device)
    q, norm = torch.randn(4, heads * dim, device=device), torch.ones(dim, device=device)
    offsets = torch.arange(3, device=device) * keys * width
    visible = torch.tensor([(0, 3), (1, 3), (0, 2), (2, 3)], device=device)

    def attend(select: slice, own_offsets: torch.Tensor, decodes: bool) -> torch.Tensor:
        given = q[select]
        out = torch.empty_like(given)
        own_offsets = own_offsets.repeat(len(given) if decodes else 1, 1)
        tiles = ImageTiles(values, own_offsets, visible[select].contiguous(), keys, width)
        how = {"eps": EPS, "num_kv_heads": 2, "first": 0, "scale": SCALE}
        cross_attend(out, given, tiles, norm, decodes=decodes, **how)  # type: ignore[arg-type]
        return out

    wide = torch.cat((offsets, offsets[:1], offsets[:1]))
    for decodes in (False, True):
        whole = attend(slice(0, 4), wide, decodes)
        for token in range(4):
            alone = attend(slice(token, token + 1), offsets, decodes)
            assert torch.equal(alone, whole[token : token + 1])


def test_add_gated_leaves_rows_without_images(device: torch.device) -> None:
    torch.manual_seed(0)
    out, x = torch.randn(3, 40, device=device), torch.randn(3, 48, device=device)[:, :40]
    gate, before = torch.tensor([0.7], device=device), out.clone()
    visible = torch.tensor([(0, 1), (0, 0), (2, 4)], device=device)
    add_gated(out, x, gate, visible)
    expected = ops.add_gated.reference(before, x, gate)
    torch.testing.assert_close(out[::2], expected[::2], atol=1e-6, rtol=0)
    assert torch.equal(out[1], before[1])
