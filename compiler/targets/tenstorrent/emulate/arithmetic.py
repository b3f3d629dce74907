"""Small operators in a board kernel's precision, and the packer.

Matmuls are exact (``matrix_unit.py``). This module is approximate if the vendor's functions are not
published: sums and special functions are fp32 inside a kernel, and inputs and outputs have their
formats. Shape letters: T rows, H query heads, G key/value heads, D head size, L positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from tilewright.compiler.formats import BlockFloat, get_format
from tilewright.compiler.formats.block_float import TILE
from tilewright.compiler.targets.tenstorrent.emulate.accurate_softmax import softmax_sums
from tilewright.compiler.targets.tenstorrent.emulate.matrix_unit import (
    MatmulSettings,
    matmul,
    packed,
)
from tilewright.compiler.targets.tenstorrent.program.instructions import TtAttention

_QUERY_ROWS = 256
"""Rows of attention computed together."""


def pack(x: Tensor, format_: str) -> Tensor:
    """Return ``x`` (float32) as a kernel writes it: bfloat16 with the values of ``format_``.

    Blocks are along the last axis. Halves round away from zero.
    """
    assert format_ in ("bf16", "bfp8", "bfp4"), f"boards do not write {format_}"
    return packed(x.float().contiguous(), format_).bfloat16()


def cast(x: Tensor, format_: str) -> Tensor:
    """Return bfloat16 ``x`` after a cast on the board. Its rounding to blocks has a single step."""
    form = get_format(format_)
    return form.cast_round_trip(x.float()).bfloat16() if isinstance(form, BlockFloat) else x


def rms_norm(x: Tensor, weight: Tensor, mean_square: Tensor, eps: float, format_: str) -> Tensor:
    """Return ``x [T, C]`` divided by the square root of ``mean_square [T, 1]``, times ``weight
    [C]``.
    """
    scale = torch.rsqrt(mean_square + eps)
    return pack(x.float() * scale * weight.float(), format_)


def sum_of_squares(x: Tensor) -> Tensor:
    """Return the sum of squares for each row in ``x [T, C]``, float32 ``[T, 1]``."""
    return x.float().square().sum(-1, keepdim=True)


def swiglu(
    gate: Tensor, up: Tensor, format_: str, *, limit: float = 0.0, alpha: float = 1.0
) -> Tensor:
    """Return ``silu(gate) * up``, with the activated gate rounded to bfloat16.

    ``limit`` above 0 selects the clamped form of gpt-oss. Its operators round to bfloat16.
    """
    if limit:
        gate = gate.float().clamp(max=limit)
        up = _round(up.float().clamp(-limit, limit) + 1.0)
        alpha = float(torch.tensor(alpha).bfloat16())
        activated = _round(gate * _round(_round(gate * alpha).sigmoid()))
        return pack(activated * up, format_)
    activated = torch.nn.functional.silu(gate.float())
    return pack(_round(activated) * up.float(), format_)


def gated(gate: Tensor, x: Tensor, activation: str, format_: str) -> Tensor:
    """Return ``activation(gate) * x``, with the activated gate rounded to bfloat16."""
    if activation == "sigmoid":
        activated = gate.float().sigmoid()
    else:
        activated = torch.nn.functional.gelu(gate.float(), approximate="tanh")
    return pack(_round(activated) * x.float(), format_)


def scale(x: Tensor, factor: float, format_: str) -> Tensor:
    """Return ``x`` times ``factor``, which the device rounds to bfloat16."""
    return pack(x.float() * float(torch.tensor(factor).bfloat16()), format_)


def rotate(
    x_THD: Tensor,
    positions: Tensor,
    inv_freq: Tensor,
    *,
    interleaved: bool,
    format_: str,
    factor: float = 1.0,
) -> Tensor:
    """Apply the rotary embedding with bfloat16 cosines and sines. Each product is rounded.

    Args:
        x_THD: Shape ``[T, H, D]``.
        positions: Shape ``[T]``.
        interleaved: Pairs are neighboring channels. False: pairs are the two halves of a head.
        factor: Factor of cosines and sines.
    """
    angles = positions.float().unsqueeze(-1) * inv_freq.float()
    cos = (angles.cos() * factor).bfloat16().float().unsqueeze(1)
    sin = (angles.sin() * factor).bfloat16().float().unsqueeze(1)
    width = 2 * inv_freq.shape[-1]
    turned, rest = x_THD.float().split((width, x_THD.shape[-1] - width), dim=-1)
    if interleaved:
        first, second = turned[..., 0::2], turned[..., 1::2]
    else:
        first, second = turned.chunk(2, dim=-1)
    parts = (
        _round(first * cos) + _round(-second * sin),
        _round(second * cos) + _round(first * sin),
    )
    out = torch.stack(parts, -1).flatten(-2) if interleaved else torch.cat(parts, -1)
    return pack(torch.cat((out, rest), dim=-1), format_)


def attend(
    q_THD: Tensor,
    keys_LGD: Tensor,
    values_LGD: Tensor,
    first: int,
    attention: TtAttention,
    *,
    sign_error: bool = True,
    accurate: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return causal attention ``[T, H, D]`` of T rows to cached positions, in the output's format.

    Scores and value sums use the matrix unit. An online softmax runs over chunks of the cache (Dao
    et al., 2022). Its maxima, exponentials and partial results are bfloat16. A block of rows skips
    the chunks that are hidden from all of its rows, because hidden positions change no result.

    Args:
        first: First row's position.
        accurate: Use float32 scores and sums, with the functions of Blackhole's kernel.
        sinks: Logits ``[H]`` that enter the maximum and the sum.
    """
    blocks = []
    for start in range(0, len(q_THD), _QUERY_ROWS):
        rows = q_THD[start : start + _QUERY_ROWS]
        seen = _visible(first + start, len(rows), attention)
        block = rows, keys_LGD[seen], values_LGD[seen], first + start - seen.start
        how = {"sign_error": sign_error, "accurate": accurate, "sinks": sinks}
        blocks.append(_attend_rows(*block, attention, **how))  # type: ignore[arg-type]
    return torch.cat(blocks)


def _visible(first: int, num_rows: int, attention: TtAttention) -> slice:
    """Return the positions in chunks that rows at position ``first`` and later attend to."""
    chunk = attention.k_chunk
    oldest = max(0, first + 1 - attention.window) if attention.window else 0
    return slice(oldest // chunk * chunk, -(-(first + num_rows) // chunk) * chunk)


def _attend_rows(
    q_THD: Tensor,
    keys_LGD: Tensor,
    values_LGD: Tensor,
    first: int,
    attention: TtAttention,
    *,
    sign_error: bool,
    accurate: bool,
    sinks: Tensor | None,
) -> Tensor:
    """Return the attention of a block of rows to all of the keys; see `attend`."""
    num_rows, num_heads, head_dim = q_THD.shape
    num_positions, num_kv_heads, _ = keys_LGD.shape
    group = num_heads // num_kv_heads

    def multiply(act: Tensor, weight: Tensor) -> Tensor:
        settings = _single_block(attention, act.shape[-1], accurate, sign_error=sign_error)
        return matmul(act, weight, settings)

    # [G, group * T, D]: the query rows for each key head.
    q = q_THD.view(num_rows, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    q = q.reshape(num_kv_heads, group * num_rows, head_dim)
    scores = multiply(q, keys_LGD.permute(1, 2, 0))
    scores = scores.view(num_kv_heads, group, num_rows, num_positions)
    scores = scores.masked_fill(_hidden(scores, first, attention.window), -torch.inf)
    scores = scores.view(num_kv_heads, group * num_rows, num_positions)
    extra = None if sinks is None else _sinks(sinks / attention.scale, num_kv_heads, num_rows)
    how = {"scale": attention.scale, "chunk": attention.k_chunk, "sinks_GR1": extra}
    sums = softmax_sums if accurate else _bfloat16_sums
    out = sums(scores, values_LGD, multiply, **how)  # type: ignore[arg-type]
    out = out.view(num_kv_heads, group, num_rows, head_dim).permute(2, 0, 1, 3)
    out = out.reshape(num_rows, num_heads, head_dim)
    # The accurate kernel writes bfloat16, and a cast follows.
    format_ = attention.out.format
    return cast(pack(out, "bf16"), format_) if accurate else pack(out, format_)


def _bfloat16_sums(
    scores_GRL: Tensor,
    values_LGD: Tensor,
    multiply: Callable[[Tensor, Tensor], Tensor],
    *,
    scale: float,
    chunk: int,
    sinks_GR1: Tensor | None,
) -> Tensor:
    """Return the values weighted by the softmax, with weights and sums in bfloat16.

    See `softmax_sums`.
    """
    best = torch.full_like(scores_GRL[..., :1], -torch.inf)
    total, out = torch.zeros_like(best), torch.zeros(())
    if sinks_GR1 is not None:
        best, total = sinks_GR1, torch.ones_like(best)
    for start in range(0, scores_GRL.shape[-1], chunk):
        part = scores_GRL[..., start : start + chunk]
        values = values_LGD[start : start + chunk].permute(1, 0, 2)
        top = torch.maximum(best, part.amax(-1, keepdim=True))
        shift = torch.where(top.isinf(), 0.0, top)
        weights = _round(((part - shift) * scale).exp())
        kept = _round(((best - shift) * scale).exp())
        product = multiply(weights.bfloat16(), values)
        total = _round(total * kept + weights.sum(-1, keepdim=True))
        out, best = _round(out * kept + product), top
    # A head with zeros only still attends uniformly, so every row has a weight.
    return out / total


def _single_block(
    attention: TtAttention, depth: int, accurate: bool, *, sign_error: bool
) -> MatmulSettings:
    """Return the settings for a matmul with one K block.

    Dst is packed to bfloat16, or to float32 if ``accurate``, which has four phases.
    """
    k_block = -(-depth // TILE) * TILE
    name = "hifi4" if accurate else attention.compute.name
    found = MatmulSettings.of(name, k_block=k_block, out_format="bf16")
    return replace(found, out_format="fp32" if accurate else "bf16", sign_error=sign_error)


def _sinks(best_H: Tensor, num_kv_heads: int, num_rows: int) -> Tensor:
    """Return the initial maximum for every row and key head, ``[G, group * T, 1]``."""
    by_group = best_H.float().view(num_kv_heads, -1, 1).expand(-1, -1, num_rows)
    return by_group.reshape(num_kv_heads, -1, 1)


def _hidden(scores: Tensor, first: int, window: int) -> Tensor:
    """Return bool ``[T, L]``: the positions masked for rows at position ``first`` and later."""
    num_rows, num_positions = scores.shape[-2:]
    positions = torch.arange(num_positions, device=scores.device)
    at = torch.arange(first, first + num_rows, device=scores.device).unsqueeze(1)
    hidden = positions > at
    if window:
        hidden |= positions <= at - window
    return hidden


def ring_sum(parts: Sequence[Tensor], format_: str) -> Tensor:
    """Return the ring's sum of partial values, in hop order.

    The sum for chip j's columns starts at chip j + 1 and is packed at every hop. ``fp32`` is not
    packed.
    """
    count = len(parts)
    shares = [part.tensor_split(_edges(part.shape[-1], count), dim=-1) for part in parts]
    summed = []
    for share in range(count):
        order = [(share + 1 + hop) % count for hop in range(count)]
        total = shares[order[0]][share]
        for rank in order[1:]:
            total = total.float() + shares[rank][share].float()
            total = total if format_ == "fp32" else pack(total, format_)
        summed.append(total)
    return torch.cat(summed, -1)


def _edges(columns: int, count: int) -> list[int]:
    """Return where each ring shard begins, except the first. Shards are whole tiles."""
    share = -(-columns // (count * TILE)) * TILE
    return [min(share * rank, columns) for rank in range(1, count)]


def _round(x: Tensor) -> Tensor:
    """Round to bfloat16, as a packer does."""
    return packed(x.contiguous(), "bf16")
