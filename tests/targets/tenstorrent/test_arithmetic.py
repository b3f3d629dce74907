"""Small operators: formats of what they write, the order of sums, and attention by chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.targets.tenstorrent.boards import board_precision, programs
from tests.tiny import tiny_model
from tilewright.compiler.formats import get_format
from tilewright.compiler.formats.block_float import BlockFloat
from tilewright.compiler.targets.tenstorrent.emulate import arithmetic
from tilewright.compiler.targets.tenstorrent.emulate.arithmetic import (
    attend,
    pack,
    ring_sum,
    rotate,
)
from tilewright.compiler.targets.tenstorrent.program.instructions import ComputeConfig, TtAttention


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", ["bf16", "bfp8", "bfp4"])
def test_packing_is_the_device_s(name: str) -> None:
    x = normal(5, 48)
    packed = pack(x, name)
    assert packed.dtype == torch.bfloat16
    form = get_format(name)
    expected = form.device_round_trip(x) if isinstance(form, BlockFloat) else x.bfloat16().float()
    assert torch.equal(packed.float(), expected)
    assert torch.equal(pack(packed.float(), name), packed), "what is packed is packed again as is"


def test_a_board_does_not_write_other_formats() -> None:
    with pytest.raises(AssertionError, match="boards do not write fp16"):
        pack(normal(1, 32), "fp16")


def test_the_norm_is_close_to_float32() -> None:
    x, weight = normal(3, 64).bfloat16(), 1 + 0.1 * normal(64, seed=1).bfloat16()
    mean_square = arithmetic.sum_of_squares(x) / 64
    got = arithmetic.rms_norm(x, weight, mean_square, 1e-5, "bf16")
    expected = torch.nn.functional.rms_norm(x.float(), (64,), weight.float(), 1e-5)
    assert torch.equal(got, expected.bfloat16()) or (got - expected).abs().max() < 2**-7


def test_silu_is_rounded_before_the_product() -> None:
    gate, up = normal(4, 32).bfloat16(), 3 * normal(4, 32, seed=1).bfloat16()
    inner = pack(torch.nn.functional.silu(gate.float()), "bf16").float()
    for form in ("bf16", "bfp8"):
        assert torch.equal(arithmetic.swiglu(gate, up, form), pack(inner * up.float(), form))


def test_halves_are_packed_away_from_zero() -> None:
    halves = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, 1 + 2**-9, torch.inf])
    expected = [1 + 2**-7, -1 - 2**-7, 1 + 2**-6, 1.0, torch.inf]
    assert pack(halves, "bf16").tolist() == expected


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_turns_pairs_and_leaves_the_rest(interleaved: bool) -> None:
    """48 of 64 elements turn; float64 says by how much."""
    x, positions = normal(7, 3, 64).bfloat16(), torch.arange(20, 27)
    frequencies = 1.0 / 100.0 ** (torch.arange(24) / 24)
    got = rotate(x, positions, frequencies, interleaved=interleaved, format_="bf16").double()
    assert torch.equal(got[..., 48:], x[..., 48:].double())
    turned = x[..., :48].double()
    pairs = turned.unflatten(-1, (24, 2) if interleaved else (2, 24))
    first, second = pairs.unbind(-1 if interleaved else -2)
    angles = (positions.double().unsqueeze(-1) * frequencies.double()).unsqueeze(1)
    both = torch.complex(first, second) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.stack((both.real, both.imag), -1 if interleaved else -2).flatten(-2)
    torch.testing.assert_close(got[..., :48], expected, atol=0.04, rtol=0)


def test_position_zero_is_not_turned() -> None:
    x = normal(1, 2, 32).bfloat16()
    got = rotate(x, torch.zeros(1), torch.ones(16), interleaved=False, format_="bf16")
    assert torch.equal(got, x)


@given(st.sampled_from([2, 3, 4, 8]), st.integers(1, 9), st.sampled_from(["bf16", "bfp8"]))
def test_a_ring_adds_in_the_order_the_shares_pass(count: int, tiles: int, form: str) -> None:
    """Share j begins at chip j + 1 and is packed at every hop, told out loud here."""
    columns = 32 * tiles
    parts = [normal(2, columns, seed=rank).bfloat16() for rank in range(count)]
    got = ring_sum(parts, form)
    share = -(-tiles // count) * 32
    for first in range(0, columns, share):
        columns_here = slice(first, first + share)
        start = first // share + 1
        total = parts[start % count][:, columns_here]
        for hop in range(1, count):
            passed = parts[(start + hop) % count][:, columns_here]
            total = pack(total.float() + passed.float(), form)
        assert torch.equal(got[:, columns_here], total)


def test_the_order_matters() -> None:
    """256 + 0.75 + 0.75 in bfloat16 is 256 from the left and 258 from the right."""
    parts = [torch.full((1, 96), value).bfloat16() for value in (256.0, 0.75, 0.75)]
    got = ring_sum(parts, "bf16")
    assert got[0, ::32].tolist() == [258.0, 256.0, 256.0]


def an_attention(fidelity: str = "hifi4", **changes: object) -> TtAttention:
    _, decode = programs(tiny_model(num_layers=1), precision=board_precision(kv_cache="bf16"))
    found = next(each for each in decode.instructions if isinstance(each, TtAttention))
    out = replace(found.out, format="bf16")
    usual = {"out": out, "compute": ComputeConfig(fidelity), "k_chunk": 32, "scale": 0.2}
    return replace(found, **(usual | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("first", [0, 90])
def test_attention_is_close_to_float64(first: int, window: int) -> None:
    """Three chunks of keys; grouped heads; rows that see one position, or hundreds."""
    num_rows, length = 9, first + 9
    q, k, v = normal(num_rows, 4, 32), normal(length, 2, 32, seed=1), normal(length, 2, 32, seed=2)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    got = attend(q, k, v, first, an_attention(window=window))
    assert (got.shape, got.dtype) == ((num_rows, 4, 32), torch.bfloat16)
    q64, k64, v64 = (x.double().permute(1, 0, 2) for x in (q, k, v))
    scores = q64 @ k64.repeat_interleave(2, 0).transpose(1, 2) * 0.2
    at = torch.arange(first, length).unsqueeze(1)
    hidden = torch.arange(length) > at
    if window:
        hidden |= torch.arange(length) <= at - window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    expected = (weights @ v64.repeat_interleave(2, 0)).permute(1, 0, 2)
    torch.testing.assert_close(got.double(), expected, atol=0.03, rtol=0)


@pytest.mark.parametrize("accurate", [False, True])
def test_what_comes_later_changes_no_bit(accurate: bool) -> None:
    """A row of a prompt is as that row alone with its own past, and hidden keys are never seen."""
    q, k, v = (normal(*shape).bfloat16() for shape in ((40, 4, 32), (40, 2, 32), (40, 2, 32)))
    attention = an_attention("hifi2")
    whole = attend(q, k, v, 0, attention, accurate=accurate)
    for row in (0, 5, 31, 32, 39):
        past = slice(row + 1)
        assert torch.equal(
            attend(q[row : row + 1], k[past], v[past], row, attention, accurate=accurate)[0],
            whole[row],
        )


@pytest.mark.parametrize(("window", "first"), [(0, 0), (0, 70), (50, 0), (33, 70)])
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("accurate", [False, True])
def test_blocks_of_rows_skip_hidden_chunks_without_a_change(
    window: int, first: int, has_sinks: bool, accurate: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three blocks equal one block bit for bit."""
    length = first + 90
    q, k, v = (normal(*size).bfloat16() for size in ((90, 4, 32), (length, 2, 32), (length, 2, 32)))
    sinks = normal(4).bfloat16() if has_sinks else None
    attention = an_attention(window=window)
    whole = attend(q, k, v, first, attention, accurate=accurate, sinks=sinks)
    monkeypatch.setattr(arithmetic, "_QUERY_ROWS", 40)
    shapes = []
    attend_rows = arithmetic._attend_rows

    def recorded(q: Tensor, k: Tensor, *rest: Any, **named: Any) -> Tensor:
        shapes.append((len(q), len(k)))
        return attend_rows(q, k, *rest, **named)

    monkeypatch.setattr(arithmetic, "_attend_rows", recorded)
    again = attend(q, k, v, first, attention, accurate=accurate, sinks=sinks)
    assert torch.equal(again, whole)
    assert [rows for rows, _ in shapes] == [40, 40, 10]
    assert sum(rows * positions for rows, positions in shapes) < 90 * length


def test_heads_of_zeros_attend_evenly_and_to_zeros() -> None:
    """Padded heads are finite, so that zeros behind them are zeros."""
    q, zeros = torch.zeros(3, 4, 32).bfloat16(), torch.zeros(3, 2, 32).bfloat16()
    assert not attend(q, zeros, zeros, 0, an_attention()).any()


def test_the_fidelity_of_attention_is_read() -> None:
    q, k, v = (normal(*shape).bfloat16() for shape in ((3, 4, 32), (3, 2, 32), (3, 2, 32)))
    outs = [attend(q, k, v, 0, an_attention(name)) for name in ("lofi", "hifi2", "hifi4")]
    assert not torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[1], outs[2])
