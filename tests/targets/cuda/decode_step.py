"""A decode step of attention over poisoned pages, and what it has to give, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tilewright.compiler.formats.block_float import BFP8
from tilewright.compiler.ops.dense import rotate
from tilewright.compiler.targets.cuda.kernels.attention.decode_triton import decode_scratch

SCALE = 0.11


class DecodeStep:
    """One decode step over fresh pages: the token at position p of each slot, slots reversed."""

    rounds_queries = True
    """Whether a kernel's queries are bfloat16."""

    def __init__(
        self,
        paged: Callable[..., Any],
        device: torch.device,
        *,
        kind: str,
        heads: tuple[int, int],
        head_dim: int,
        positions: list[int],
        num_pages: int,
        half: int | None = None,
        window: int = 0,
        interleaved: bool = False,
    ) -> None:
        num_heads, num_kv_heads = heads
        lengths = [max(position, 0) for position in reversed(positions)]
        self.cache = paged(kind, lengths, num_pages=num_pages, size=(num_kv_heads, head_dim))
        self.kind, self.heads, self.head_dim, self.window = kind, heads, head_dim, window
        self.positions = torch.tensor(positions, device=device)
        self.slots = torch.arange(len(positions) - 1, -1, -1, device=device)
        width = (num_heads + 2 * num_kv_heads) * head_dim
        self.qkv = torch.randn(len(positions), width, device=device)
        half = head_dim // 2 if half is None else half
        self.inv_freq = 1.0 / 10000.0 ** (torch.arange(half, device=device) / half)
        self.interleaved = interleaved
        self.scratch = decode_scratch(len(positions), num_heads, head_dim, num_pages, device)

    def arguments(self, chosen: list[int]) -> dict[str, Any]:
        """Of a launcher, for some of the rows: all but ``qkv`` and ``out``."""
        return {
            "positions": self.positions[chosen].contiguous(),
            "slots": self.slots[chosen].contiguous(),
            "block_tables": self.cache.tables,
            "inv_freq": self.inv_freq,
            "num_heads": self.heads[0],
            "scale": SCALE,
            "window": self.window,
            "interleaved": self.interleaved,
            "scratch": self.scratch,
        }

    def new(self, row: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The row's rotated q and k and its v, fp32."""
        num_heads, num_kv_heads = self.heads
        parts = self.qkv[row : row + 1].cpu().view(1, -1, self.head_dim)
        q, k, v = parts.split((num_heads, num_kv_heads, num_kv_heads), 1)
        turn = (self.positions[row : row + 1].cpu(), self.inv_freq.cpu(), self.interleaved)
        return rotate(q, *turn)[0], rotate(k, *turn)[0], v[0]

    def expected(self, row: int) -> torch.Tensor:
        """float64 ``[H, D]``."""
        position, slot = int(self.positions[row]), int(self.slots[row])
        if position < 0:
            return torch.zeros(self.heads[0], self.head_dim, dtype=torch.float64)
        q, k, v = self.new(row)
        if self.rounds_queries and self.kind != "fp32":
            q = q.bfloat16()
        start = max(0, position - self.window + 1) if self.window else 0
        kept = slice(start, position)
        keys = torch.cat((self.cache.keys[slot, kept], rounded(k, self.kind)[None])).double()
        values = torch.cat((self.cache.values[slot, kept], rounded(v, self.kind)[None])).double()
        q_GRD = q.double().unflatten(0, (self.heads[1], -1))
        weights = (torch.einsum("grd,lgd->grl", q_GRD, keys) * SCALE).softmax(-1)
        return torch.einsum("grl,lgd->grd", weights, values).flatten(0, 1)

    def all_expected(self) -> torch.Tensor:
        """float64 ``[rows, H, D]``."""
        return torch.stack([self.expected(row) for row in range(len(self.positions))])


def rounded(x: torch.Tensor, kind: str) -> torch.Tensor:
    if kind == "bfp8":
        return BFP8.round_trip(x)
    return x.bfloat16().float() if kind == "bf16" else x
