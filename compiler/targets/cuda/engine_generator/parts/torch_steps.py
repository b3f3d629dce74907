"""The plan in plain torch: a CPU's way, and the eager yardstick on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.settings import Settings, turn_table
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import Bound, Executor, Values

ROOM = 64
"""Positions that a sequence's memory grows by."""


@dataclass
class TorchSequence:
    """``cache [layers, 2, kv heads, positions, head_dim]``: keys, values of ``length`` tokens."""

    cache: Tensor
    length: int = 0


@dataclass(frozen=True)
class TorchBatch:
    """``tokens [T]`` and their ``positions [T]``; ``spans``: which rows are whose."""

    tokens: Tensor
    positions: Tensor
    spans: list[tuple[TorchSequence, slice]]


class TorchExecutor(Executor):
    """All rows of a step go through products together, and attend sequence by sequence."""

    def __init__(
        self, tensors: dict[str, Tensor], settings: Settings, device: torch.device
    ) -> None:
        self.settings, self.device = settings, device
        self.program = self.bind(tensors)
        self.turns = turn_table(settings, device)

    def prefill(self, prompts: Sequence[Tensor]) -> tuple[list[TorchSequence], Tensor]:
        sequences = [self._begin(len(prompt)) for prompt in prompts]
        return sequences, self._step(sequences, prompts)

    def _begin(self, length: int) -> TorchSequence:
        return TorchSequence(self._cache(length + ROOM))

    def decode(self, sequences: Sequence[TorchSequence], tokens: Tensor) -> Tensor:
        for each in sequences:
            if each.length == each.cache.shape[3]:
                longer = self._cache(2 * each.length)
                longer[:, :, :, : each.length] = each.cache
                each.cache = longer
        return self._step(sequences, tokens.split(1))

    def release(self, *sequences: TorchSequence) -> None:
        """Their caches go with them."""

    def _cache(self, positions: int) -> Tensor:
        s = self.settings
        shape = s.num_cached, 2, s.num_kv_heads, min(positions, s.max_positions), s.head_dim
        return torch.empty(shape, dtype=s.dtype, device=self.device)

    def _step(self, sequences: Sequence[TorchSequence], tokens: Sequence[Tensor]) -> Tensor:
        spans, positions, row = [], [], 0
        for each, new in zip(sequences, tokens, strict=True):
            spans.append((each, slice(row, row + len(new))))
            positions.append(torch.arange(each.length, each.length + len(new)))
            row += len(new)
        new, at = torch.cat(list(tokens)), torch.cat(positions)
        batch = TorchBatch(new.to(self.device), at.to(self.device), spans)
        logits = self.run(self.program, {}, batch)["logits"]
        for each, rows in spans:
            each.length += rows.stop - rows.start
        return logits

    def embed(self, each: Bound, values: Values, batch: TorchBatch) -> Tensor:
        assert each.weight is not None
        return F.embedding(batch.tokens, each.weight)

    def normed(self, each: Bound, x: Tensor) -> Tensor:
        assert each.norm is not None
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.settings.eps)
        return ((wide * scale).to(x.dtype) * each.norm).to(x.dtype)

    def product(self, each: Bound, x: Tensor, residual: Tensor | None) -> Tensor:
        assert each.weight is not None
        y = F.linear(x if each.norm is None else self.normed(each, x), each.weight)
        if each.does.swiglu:
            gate, up = y.chunk(2, dim=-1)
            return F.silu(gate) * up
        return y if residual is None else residual + y

    def gather(self, each: Bound, values: Values, batch: TorchBatch) -> Tensor:
        return values[each.does.x][[rows.stop - 1 for _, rows in batch.spans]]

    def attended(self, each: Bound, qkv: Tensor, batch: TorchBatch) -> Tensor:
        s = self.settings
        heads = qkv.view(len(qkv), s.qkv_heads, s.head_dim)
        q, k, v = heads.split((s.num_heads, s.num_kv_heads, s.num_kv_heads), dim=1)
        turns = self.turns[batch.positions].unsqueeze(1)
        q, k = self._turned(q, turns), self._turned(k, turns)
        out = []
        for sequence, rows in batch.spans:
            first, last = sequence.length, sequence.length + rows.stop - rows.start
            cache = sequence.cache[s.place_of(each.layer)]
            cache[0, :, first:last] = k[rows].transpose(0, 1)
            cache[1, :, first:last] = v[rows].transpose(0, 1)
            keys, values = cache[:, :, :last]
            out.append(self._attention(q[rows].transpose(0, 1), keys, values).transpose(0, 1))
        return torch.cat(out).flatten(1)

    def _turned(self, x: Tensor, turns: Tensor) -> Tensor:
        """Rotate the heads of ``x [T, H, D]`` by ``turns [T, 1, D]``."""
        cos, sin = turns.chunk(2, dim=-1)
        if not self.settings.interleaved:
            first, second = x.chunk(2, dim=-1)
            return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)

    def _attention(self, q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """``q [H, T, D]``, a whole prompt or one token, on ``keys, values [G, L, D]``."""
        s = self.settings
        return F.scaled_dot_product_attention(
            q.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            is_causal=q.shape[1] > 1,
            scale=s.scale,
            enable_gqa=s.num_heads != s.num_kv_heads,
        ).squeeze(0)
