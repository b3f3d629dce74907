"""The reference of a model with experts and linear attention."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.hybrid_settings import HybridSettings
from tilewright.compiler.targets.cuda.engine_generator.parts.mixer_torch import (
    remembered_tokens,
    split_mixed,
    unit_scaled,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.reference import Reference

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
    """Every token anew, and every expert for all of them.

    Where a token's last expert is equal to the next but for a rounding, either may be taken, and
    all that follows is another: such requests are not decided.
    """

    settings: HybridSettings

    def __init__(
        self, tensors: dict[str, Tensor], settings: HybridSettings, device: torch.device
    ) -> None:
        super().__init__(tensors, settings, device)
        self._undecided: set[int] = set()
        self._is_close = torch.zeros((), dtype=torch.bool, device=device)
        for name, tensor in tensors.items():  # what is kept and computed in float32
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
