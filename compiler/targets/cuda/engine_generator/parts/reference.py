"""Minimal implementation of the engine contract: a call recomputes whole sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.settings import (
    HybridSettings,
    Settings,
    turn_table,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.torch_steps import (
    remembered_tokens,
    split_mixed,
    unit_scaled,
)

SMALL_CONFIG: dict[str, Any] = {"model_type": "tiny_llama", "torch_dtype": "float16"}
SMALL_CONFIG |= {"vocab_size": 509, "hidden_size": 192, "intermediate_size": 320}
SMALL_CONFIG |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 48}
SMALL_CONFIG |= {"num_hidden_layers": 3, "max_position_embeddings": 256}
SMALL_CONFIG |= {"rms_norm_eps": 1e-5, "rope_theta": 10000.0}


class Reference:
    """Reference for an engine's logits: eager torch without a cache.

    It has the methods of an engine. Ids must exist and differ.
    """

    def __init__(
        self, tensors: dict[str, Tensor], settings: Settings, device: torch.device
    ) -> None:
        self.settings, self.device = settings, device
        self.tensors = {name: t.to(device, settings.dtype) for name, t in tensors.items()}
        self.turns = turn_table(settings, device)
        self.tokens: dict[int, Tensor] = {}

    def prefill(self, request_ids: Sequence[int], input_ids: Sequence[Tensor]) -> Tensor:
        for request, tokens in zip(request_ids, input_ids, strict=True):
            self.tokens[request] = tokens.to(self.device)
        return self._logits(request_ids)

    def decode(self, request_ids: Sequence[int], token_ids: Tensor) -> Tensor:
        for request, token in zip(request_ids, token_ids.to(self.device).split(1), strict=True):
            self.tokens[request] = torch.cat((self.tokens[request], token))
        return self._logits(request_ids)

    def remove(self, request_ids: Sequence[int]) -> None:
        for request in request_ids:
            self.tokens.pop(request, None)

    def is_decided(self, request: int) -> bool:
        """Return whether rounding cannot have changed the last logits considerably."""
        return True

    @torch.no_grad()
    def _logits(self, request_ids: Sequence[int]) -> Tensor:
        return torch.stack([self._last_logits(self.tokens[request]) for request in request_ids])

    def _last_logits(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.tensors["embed_tokens.weight"])
        for layer in range(self.settings.num_layers):
            x = self._layer(x, f"layers.{layer}.")
        return F.linear(self._norm(x[-1], "norm"), self.tensors["lm_head.weight"])

    def _layer(self, x: Tensor, at: str) -> Tensor:
        normed = self._norm(x, at + "input_layernorm")
        q, k, v = (self._linear(normed, f"{at}self_attn.{name}_proj") for name in "qkv")
        x = x + self._linear(self._attend(q, k, v), at + "self_attn.o_proj")
        normed = self._norm(x, at + "post_attention_layernorm")
        gate, up = (self._linear(normed, f"{at}mlp.{name}_proj") for name in ("gate", "up"))
        return x + self._linear(F.silu(gate) * up, at + "mlp.down_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.tensors[name + ".weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.settings.eps)
        return wide.to(x.dtype) * self.tensors[name + ".weight"]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        s, num_tokens = self.settings, len(q)
        q, k, v = (each.view(num_tokens, -1, s.head_dim).transpose(0, 1) for each in (q, k, v))
        q, k = self._rotate(q), self._rotate(k)
        groups = s.num_heads // s.num_kv_heads
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = (q @ k.transpose(1, 2)).float() / s.head_dim**0.5
        future = torch.ones(num_tokens, num_tokens, dtype=torch.bool, device=self.device).triu(1)
        weights = scores.masked_fill(future, float("-inf")).softmax(-1).to(q.dtype)
        return (weights @ v).transpose(0, 1).flatten(1)

    def _rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.turns[: x.shape[1]].chunk(2, dim=-1)
        if self.settings.interleaved:
            even, odd = x[..., 0::2], x[..., 1::2]
            turned = even * cos - odd * sin, even * sin + odd * cos
            return torch.stack(turned, dim=-1).flatten(-2)
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)


HYBRID_CONFIG = {
    "model_type": "qwen3_5_moe",
    "torch_dtype": "float16",
    "rope_style": "half",
    "vocab_size": 509,
    "hidden_size": 128,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.25,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}


class HybridReference(Reference):
    """Recomputes all tokens with all experts.

    If rounding decides between a token's last expert and the next expert, later logits may differ
    completely. Such requests are not decided.
    """

    settings: HybridSettings

    def __init__(
        self, tensors: dict[str, Tensor], settings: HybridSettings, device: torch.device
    ) -> None:
        super().__init__(tensors, settings, device)
        self._undecided: set[int] = set()
        self._is_close = torch.zeros((), dtype=torch.bool, device=device)
        for name, tensor in tensors.items():  # float32 parameters
            if "norm" in name or name.endswith(("A_log", "dt_bias", "conv1d.weight")):
                self.tensors[name] = tensor.to(device, torch.float32)

    def is_decided(self, request: int) -> bool:
        return request not in self._undecided

    def _logits(self, request_ids: Sequence[int]) -> Tensor:
        rows = []
        for request in request_ids:
            self._is_close.fill_(False)
            rows.append(super()._logits([request]))
            self._undecided -= {request}
            self._undecided |= {request} if self._is_close else set()
        return torch.cat(rows)

    def _layer(self, x: Tensor, at: str) -> Tensor:
        normed = self._norm(x, at + "input_layernorm")
        is_linear = self.settings.linear_layers[int(at.split(".")[1])]
        mixed = self._linear_attention(normed, at) if is_linear else self._gated(normed, at)
        x = x + mixed
        return x + self._experts(self._norm(x, at + "post_attention_layernorm"), at + "mlp.")

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.tensors[name + ".weight"]
        return (unit_scaled(x.float(), self.settings.eps) * weight).to(x.dtype)

    def _gated(self, x: Tensor, at: str) -> Tensor:
        at += "self_attn."
        size = self.settings.head_dim
        q, k, v, gate = (self._linear(x, f"{at}{n}_proj") for n in ("q", "k", "v", "gate"))
        q = self._norm(q.unflatten(1, (-1, size)), at + "q_norm").flatten(1)
        k = self._norm(k.unflatten(1, (-1, size)), at + "k_norm").flatten(1)
        heads = self._attend(q, k, v) * torch.sigmoid(gate.float())
        return self._linear(heads.to(x.dtype), at + "o_proj")

    def _linear_attention(self, x: Tensor, at: str) -> Tensor:
        s, at = self.settings, at + "linear_attn."
        products = (self._linear(x, f"{at}in_proj_{name}") for name in ("qkv", "z", "a", "b"))
        mixed, z, a, b = (each.float() for each in products)
        weight = self.tensors[at + "conv1d.weight"]
        padded = F.pad(mixed.T.unsqueeze(0), (s.taps - 1, 0))
        convolved = F.silu(F.conv1d(padded, weight, groups=len(weight))[0].T)
        decay = self.tensors[at + "A_log"].exp() * F.softplus(a + self.tensors[at + "dt_bias"])
        memory = torch.zeros(s.value_heads, s.key_dim, s.value_dim, device=x.device)
        given = *split_mixed(convolved, s), (-decay).exp(), b.sigmoid()
        heads = self._norm(remembered_tokens(*given, memory), at + "norm").flatten(1)
        return self._linear((heads * F.silu(z)).to(x.dtype), at + "out_proj")

    def _experts(self, x: Tensor, at: str) -> Tensor:
        s = self.settings
        logits = self._linear(x, at + "gate").float()
        if s.num_chosen < s.num_experts:
            last, following = logits.topk(s.num_chosen + 1).values[:, -2:].unbind(1)
            eps = max(torch.finfo(x.dtype).eps, 2e-6)  # float32 sums differ by several roundings
            self._is_close |= (last - following <= eps * logits.abs().amax(1)).any()
        shares = logits.softmax(-1)
        least = shares.topk(s.num_chosen).values[:, -1:]
        shares = shares.where(shares >= least, 0.0)
        shares = shares / shares.sum(-1, keepdim=True)
        gate = self._linear(x, at + "shared_expert_gate").float().sigmoid()
        total = self._shared(x, at + "shared_expert.").float() * gate
        for expert in range(s.num_experts):
            both = F.linear(x, self.tensors[at + "experts.gate_up_proj"][expert])
            gates, ups = both.chunk(2, dim=-1)
            y = F.linear(F.silu(gates) * ups, self.tensors[at + "experts.down_proj"][expert])
            total += y.float() * shares[:, expert, None]
        return total.to(x.dtype)

    def _shared(self, x: Tensor, at: str) -> Tensor:
        gate, up = (self._linear(x, f"{at}{name}_proj") for name in ("gate", "up"))
        return self._linear(F.silu(gate) * up, at + "down_proj")
