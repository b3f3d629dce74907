"""Mixers in plain torch, sequence by sequence and expert by expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.hybrid_settings import (
    LENGTH_EPS,
    HybridSettings,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.mixer_steps import (
    BoundMixer,
    MixedExecutor,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import Values
from tilewright.compiler.targets.cuda.engine_generator.parts.torch_steps import (
    ROOM,
    TorchBatch,
    TorchExecutor,
    TorchSequence,
)


@dataclass(kw_only=True)
class HybridTorchSequence(TorchSequence):
    """``windows [linear layers, channels, taps - 1]``: the last columns that the convolution saw;
    ``memories [linear layers, heads, K, V]``.
    """

    windows: Tensor
    memories: Tensor


class HybridTorchExecutor(MixedExecutor, TorchExecutor):
    """Layers of attention and of linear attention."""

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
        """q, k ``[T, H, K]`` and v ``[T, H, V]`` of one sequence, whose window moves on."""
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
    """Vectors over their root mean square."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def split_mixed(x: Tensor, s: HybridSettings) -> tuple[Tensor, Tensor, Tensor]:
    """q and k of length 1, ``[T, H, K]``, each for the heads that share it, and v ``[T, H, V]``."""
    width = s.key_heads * s.key_dim
    q, k, v = x.split((width, width, s.value_heads * s.value_dim), dim=1)
    q, k = (each.unflatten(1, (s.key_heads, s.key_dim)) for each in (q, k))
    q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + LENGTH_EPS) for each in (q, k))
    q, k = (each.repeat_interleave(s.value_heads // s.key_heads, 1) for each in (q, k))
    return q * s.key_dim**-0.5, k, v.unflatten(1, (s.value_heads, s.value_dim))


def remembered_tokens(
    q: Tensor, k: Tensor, v: Tensor, kept: Tensor, steps: Tensor, memory: Tensor
) -> Tensor:
    """What tokens, one after another, read from ``memory [H, K, V]``, which is changed: ``[T, H,
    V]``.
    """
    out = torch.empty_like(v)
    for t in range(len(v)):
        memory *= kept[t, :, None, None]
        wrong = steps[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", memory, k[t]))
        memory += k[t, :, :, None] * wrong[:, None, :]
        out[t] = torch.einsum("hkv,hk->hv", memory, q[t])
    return out
