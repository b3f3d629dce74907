"""torch.compile of the reference with a cache of fixed size: what a careful user of torch writes.

Calls must be of prompts of one length, and of requests that were prefilled together or in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.compiler.targets.cuda.engine.parts.reference import Reference


class CompiledReference:
    """The reference's arithmetic in batches over a static cache; each shape is compiled once, by
    ``mode`` of torch.compile; without ``prompts``, those of decode steps alone.
    """

    def __init__(
        self,
        reference: Reference,
        *,
        num_seats: int = 16,
        length: int = 256,
        mode: str,
        prompts: bool = True,
    ) -> None:
        self._reference, s = reference, reference.settings
        shape = s.num_layers, 2, num_seats, s.num_kv_heads, length, s.head_dim
        self._cache = torch.zeros(shape, dtype=s.dtype, device=reference.device)
        torch._dynamo.mark_static_address(self._cache)
        self._columns = torch.arange(length, device=reference.device)
        self._lengths: dict[int, int] = {}
        self._seats: dict[int, int] = {}
        self._step: Any = torch.compile(self._eager, mode=mode, fullgraph=True, dynamic=False)
        self._step_of_prompts = self._step if prompts else self._eager

    @torch.no_grad()
    def prefill(self, request_ids: Sequence[int], input_ids: Sequence[Tensor]) -> Tensor:
        for request in request_ids:
            used = set(self._seats.values())
            free = next(seat for seat in range(self._cache.shape[2]) if seat not in used)
            self._seats.setdefault(request, free)
            self._lengths[request] = 0
        return self._run(request_ids, torch.stack(list(input_ids)))

    @torch.no_grad()
    def decode(self, request_ids: Sequence[int], token_ids: Tensor) -> Tensor:
        return self._run(request_ids, token_ids[:, None])

    def remove(self, request_ids: Sequence[int]) -> None:
        for request in request_ids:
            self._seats.pop(request, None)

    def _run(self, request_ids: Sequence[int], tokens: Tensor) -> Tensor:
        device = self._reference.device
        starts = torch.tensor([self._lengths[request] for request in request_ids]).to(device)
        seats = torch.tensor([self._seats[request] for request in request_ids]).to(device)
        positions = starts[:, None] + torch.arange(tokens.shape[1], device=device)
        step = self._step if tokens.shape[1] == 1 else self._step_of_prompts
        logits: Tensor = step(tokens.to(device), positions, seats)
        for request in request_ids:
            self._lengths[request] += tokens.shape[1]
        return logits.clone()

    def _eager(self, tokens: Tensor, positions: Tensor, seats: Tensor) -> Tensor:
        """Tokens and positions ``[B, T]`` of the sequences in ``seats [B]``: logits ``[B, V]``."""
        reference, s = self._reference, self._reference.settings
        turns = reference.turns[positions].unsqueeze(1)
        seen = self._columns[None, None, None, :] <= positions[:, None, :, None]
        x = F.embedding(tokens, reference.tensors["embed_tokens.weight"])
        for layer in range(s.num_layers):
            at = f"layers.{layer}."
            normed = reference._norm(x, at + "input_layernorm")
            q, k, v = (
                reference._linear(normed, f"{at}self_attn.{name}_proj")
                .unflatten(-1, (-1, s.head_dim))
                .transpose(1, 2)
                for name in "qkv"
            )
            q, k = _rotate(q, turns, s.interleaved), _rotate(k, turns, s.interleaved)
            keys, values = self._cache[layer]
            keys[seats[:, None], :, positions] = k.transpose(1, 2)
            values[seats[:, None], :, positions] = v.transpose(1, 2)
            heads = F.scaled_dot_product_attention(
                q, keys[seats], values[seats], attn_mask=seen, enable_gqa=True
            )
            heads = heads.transpose(1, 2).flatten(2)
            x = x + reference._linear(heads, at + "self_attn.o_proj")
            normed = reference._norm(x, at + "post_attention_layernorm")
            gate, up = (
                reference._linear(normed, f"{at}mlp.{name}_proj") for name in ("gate", "up")
            )
            x = x + reference._linear(F.silu(gate) * up, at + "mlp.down_proj")
        last = reference._norm(x[:, -1], "norm")
        return F.linear(last, reference.tensors["lm_head.weight"])


def _rotate(x: Tensor, turns: Tensor, interleaved: bool) -> Tensor:
    cos, sin = turns.chunk(2, dim=-1)
    if interleaved:
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, first * sin + second * cos), dim=-1)
