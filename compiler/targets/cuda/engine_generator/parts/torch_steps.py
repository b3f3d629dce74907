"""The plan in plain torch: the CPU engine, and the eager baseline on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.settings import (
    LENGTH_EPS,
    HybridSettings,
    Settings,
    turn_table,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import (
    Bound,
    BoundMixer,
    Executor,
    MixedExecutor,
    Values,
)

ROOM = 64
"""Increment of a sequence's memory, in positions."""


@dataclass
class TorchSequence:
    """Keys and values for ``length`` tokens: ``[layers, 2, kv heads, positions, head_dim]``."""

    cache: Tensor
    length: int = 0


@dataclass(frozen=True)
class TorchBatch:
    """``tokens [T]`` and ``positions [T]``. ``spans``: rows per sequence."""

    tokens: Tensor
    positions: Tensor
    spans: list[tuple[TorchSequence, slice]]


class TorchExecutor(Executor):
    """Matmuls over all rows, and attention sequence by sequence."""

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
        """Free the caches with the sequences."""

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
        """Attend with ``q [H, T, D]``, a prompt or a token, to ``keys, values [G, L, D]``."""
        s = self.settings
        return F.scaled_dot_product_attention(
            q.unsqueeze(0),
            keys.unsqueeze(0),
            values.unsqueeze(0),
            is_causal=q.shape[1] > 1,
            scale=s.scale,
            enable_gqa=s.num_heads != s.num_kv_heads,
        ).squeeze(0)


@dataclass(kw_only=True)
class HybridTorchSequence(TorchSequence):
    """``windows [linear layers, channels, taps - 1]``: last inputs to the convolution.

    ``memories [linear layers, heads, K, V]``: linear attention state.
    """

    windows: Tensor
    memories: Tensor


class HybridTorchExecutor(MixedExecutor, TorchExecutor):
    """Layers with attention or linear attention."""

    settings: HybridSettings

    def _begin(self, length: int) -> HybridTorchSequence:
        s = self.settings
        windows = torch.zeros(s.num_linear, s.mixed_width, s.taps - 1, device=self.device)
        shape = s.num_linear, s.value_heads, s.key_dim, s.value_dim
        memories = torch.zeros(shape, device=self.device)
        cache = self._cache(length + ROOM)
        return HybridTorchSequence(cache, windows=windows, memories=memories)

    def gated_attend(self, each: BoundMixer, values: Values, batch: TorchBatch) -> Tensor:
        x = values[each.does.x]
        s = self.settings
        q_width, width = s.num_heads * s.head_dim, s.num_kv_heads * s.head_dim
        q, k, v, gate = x.split((q_width, width, width, q_width), dim=1)
        q = self._normed_heads(q, each.tensors["q_norm"])
        k = self._normed_heads(k, each.tensors["k_norm"])
        heads = self.attended(each, torch.cat((q, k, v), dim=1), batch)
        return (heads * torch.sigmoid(gate.float())).to(x.dtype)

    def _normed_heads(self, x: Tensor, weight: Tensor) -> Tensor:
        heads = x.unflatten(1, (-1, self.settings.head_dim)).float()
        return (unit_scaled(heads, self.settings.eps) * weight).to(x.dtype).flatten(1)

    def delta_rule(self, each: BoundMixer, values: Values, batch: TorchBatch) -> Tensor:
        x = values[each.does.x]
        s = self.settings
        widths = s.mixed_width, s.value_heads * s.value_dim, s.value_heads, s.value_heads
        mixed, z, a, b = x.float().split(widths, dim=1)
        decays = -each.tensors["a_log"].exp() * F.softplus(a + each.tensors["dt_bias"])
        steps, place, out = b.sigmoid(), s.place_of(each.layer), []
        for sequence, rows in batch.spans:
            assert isinstance(sequence, HybridTorchSequence)
            window, memory = sequence.windows[place], sequence.memories[place]
            q, k, v = self._convolved(mixed[rows], each.tensors["convolution"], window)
            out.append(remembered_tokens(q, k, v, decays[rows].exp(), steps[rows], memory))
        heads = unit_scaled(torch.cat(out), s.eps) * each.tensors["norm"]
        return (heads.flatten(1) * F.silu(z)).to(x.dtype)

    def _convolved(self, x: Tensor, weight: Tensor, window: Tensor) -> tuple[Tensor, ...]:
        """Return q, k ``[T, H, K]`` and v ``[T, H, V]`` for a sequence. Updates its window."""
        s = self.settings
        seen = torch.cat((window, x.T), dim=1)
        window.copy_(seen[:, seen.shape[1] - window.shape[1] :])
        x = F.silu(F.conv1d(seen.unsqueeze(0), weight, groups=len(weight))[0].T)
        return split_mixed(x, s)

    def experts(self, each: BoundMixer, values: Values, batch: TorchBatch) -> Tensor:
        does = each.does
        out, x = values[does.out], values[does.x]
        logits, shared = values[does.logits], values[does.shared]
        s = self.settings
        logits, gate = logits.float().split((s.num_experts, 1), dim=1)
        shares, chosen = logits.softmax(-1).topk(s.num_chosen)
        shares = shares / shares.sum(-1, keepdim=True)
        total = shared.float() * gate.sigmoid()
        for expert in chosen.unique().tolist():
            row, choice = torch.where(chosen == expert)
            gates, ups = F.linear(x[row], each.tensors["gates_ups"][expert]).chunk(2, dim=1)
            y = F.linear(F.silu(gates) * ups, each.tensors["downs"][expert])
            total.index_add_(0, row, y.float() * shares[row, choice, None])
        return (out + total).to(out.dtype)


def unit_scaled(x: Tensor, eps: float) -> Tensor:
    """Divide vectors by their root mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def split_mixed(x: Tensor, s: HybridSettings) -> tuple[Tensor, Tensor, Tensor]:
    """Return q and k of length 1, ``[T, H, K]``, per head, and v ``[T, H, V]``."""
    width = s.key_heads * s.key_dim
    q, k, v = x.split((width, width, s.value_heads * s.value_dim), dim=1)
    q, k = (each.unflatten(1, (s.key_heads, s.key_dim)) for each in (q, k))
    q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + LENGTH_EPS) for each in (q, k))
    q, k = (each.repeat_interleave(s.value_heads // s.key_heads, 1) for each in (q, k))
    return q * s.key_dim**-0.5, k, v.unflatten(1, (s.value_heads, s.value_dim))


def remembered_tokens(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, steps: Tensor, memory: Tensor
) -> Tensor:
    """Read ``memory [H, K, V]`` token by token, and update it: ``[T, H, V]``."""
    out = torch.empty_like(v)
    for t in range(len(v)):
        memory *= kept[t, :, None, None]
        wrong = steps[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", memory, k[t]))
        memory += k[t, :, :, None] * wrong[:, None, :]
        out[t] = torch.einsum("hkv,hk->hv", memory, q[t])
    return out
