"""The contract in the fewest words: every call computes whole sequences anew, one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.settings import Settings, turn_table

SMALL_CONFIG: dict[str, Any] = {"model_type": "tiny_llama", "torch_dtype": "float16"}
SMALL_CONFIG |= {"vocab_size": 509, "hidden_size": 192, "intermediate_size": 320}
SMALL_CONFIG |= {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 48}
SMALL_CONFIG |= {"num_hidden_layers": 3, "max_position_embeddings": 256}
SMALL_CONFIG |= {"rms_norm_eps": 1e-5, "rope_theta": 10000.0}


class Reference:
    """What an engine's logits are compared with: eager torch that caches nothing.

    It has the engine's methods, and asks for ids that are alive and different.
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
        """Whether rounding alone cannot have changed its last logits by much."""
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
