"""Sparse mixture of experts in place of a dense block, in plain torch.

Legend: T tokens, C channels, E experts, K experts per token, I inner size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from tilewright.compiler import ops
from tilewright.models.architectures.layers import MLP, Linear
from tilewright.models.config import MoeConfig
from tilewright.models.sources import Sources, TensorSource, cut_rows

TENSOR_GROUPS: Mapping[str, str] = {
    "model.layers.*.mlp.gate": "router",
    "model.layers.*.mlp.experts.gate_proj": "experts_ff1_3",
    "model.layers.*.mlp.experts.up_proj": "experts_ff1_3",
    "model.layers.*.mlp.experts.down_proj": "experts_ff2",
    "model.layers.*.mlp.shared_expert_gate": "router",
    "model.layers.*.mlp.shared_expert.gate_proj": "shared_ff1_3",
    "model.layers.*.mlp.shared_expert.up_proj": "shared_ff1_3",
    "model.layers.*.mlp.shared_expert.down_proj": "shared_ff2",
}
"""Tensor groups in `SparseMLP`, by module path globs."""

GGUF_NAMES: Mapping[str, str] = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps.weight": "mlp.experts.gate_proj",
    "ffn_up_exps.weight": "mlp.experts.up_proj",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
"""Hugging Face names by GGUF name. See `Architecture.gguf_names`."""

PARTS = ("gate_proj", "up_proj", "down_proj")


class ExpertLinear(nn.Module):
    """Weights ``[E, out, in]`` for a matmul in every expert."""

    def __init__(self, num_experts: int, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, num_outputs, num_inputs))

    def forward(self, x: Tensor, experts_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
        return ops.expert_linear(x, self.weight, experts_TK, weights_TK)


class Experts(nn.Module):
    """Gated feed-forward blocks. Each token uses a few."""

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        count, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
        self.gate_proj = ExpertLinear(count, hidden, inner)
        self.up_proj = ExpertLinear(count, hidden, inner)
        self.down_proj = ExpertLinear(count, inner, hidden)

    def forward(self, x: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        gate_TKI = nn.functional.silu(self.gate_proj(x, experts_TK))
        return self.down_proj(gate_TKI * self.up_proj(x, experts_TK), experts_TK, weights_TK)


class SparseMLP(nn.Module):
    """A router (``gate``) with its experts (Shazeer et al., 2017), and an optional gated shared
    expert.
    """

    def __init__(self, config: MoeConfig) -> None:
        super().__init__()
        self.top_k, self.renormalise = config.experts_per_token, config.renormalise
        self.gate = Linear(config.hidden_size, config.num_experts, bias=False)
        self.experts = Experts(config)
        self.shared_expert = self.shared_expert_gate = None
        if config.shared_size:
            shared = dataclasses.replace(
                config, intermediate_size=config.shared_size, mlp_bias=False
            )
            self.shared_expert = MLP(shared)
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        routed = chosen_by_softmax(self.gate(x), self.top_k, renormalise=self.renormalise)
        weights_TK, experts_TK = routed
        out: Tensor = self.experts(x, experts_TK, weights_TK)
        if self.shared_expert is None or self.shared_expert_gate is None:
            return out
        return out + self.shared_expert(x) * torch.sigmoid(self.shared_expert_gate(x))


def chosen_by_softmax(logits_TE: Tensor, top_k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """Return weights and indices of the ``top_k`` likeliest experts, each ``[T, K]``."""
    probabilities = torch.softmax(logits_TE.float(), dim=-1)
    weights_TK, experts_TK = torch.topk(probabilities, top_k, dim=-1)
    if renormalise:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return weights_TK.to(logits_TE.dtype), experts_TK


def mlp_of(config: MoeConfig, layer: int) -> nn.Module:
    """Return a layer's feed-forward block, dense or sparse by configuration."""
    return MLP(config) if layer in config.dense_layers else SparseMLP(config)


def sources_by_expert(config: MoeConfig) -> Sources:
    """Return the sources for checkpoints with a tensor per matmul and expert."""
    found: dict[str, tuple[TensorSource, ...]] = {}
    for path in _expert_paths(config):
        for part in PARTS:
            names = (f"{path}.{expert}.{part}.weight" for expert in range(config.num_experts))
            found[f"{path}.{part}.weight"] = tuple(TensorSource(name) for name in names)
    return found


def sources_of_stacks(config: MoeConfig) -> Sources:
    """Return the sources for checkpoints with stacked experts, gate rows above up rows."""
    count, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
    found: dict[str, tuple[TensorSource, ...]] = {}
    for path in _expert_paths(config):
        shape = (count, 2 * inner, hidden)
        for index, part in enumerate(PARTS[:2]):
            firsts = range(index * inner, count * 2 * inner, 2 * inner)
            rows = [(first, first + inner) for first in firsts]
            found[f"{path}.{part}.weight"] = cut_rows(f"{path}.gate_up_proj", rows, shape)
        found[f"{path}.down_proj.weight"] = (TensorSource(f"{path}.down_proj"),)
    return found


def _expert_paths(config: MoeConfig) -> list[str]:
    layers = (each for each in range(config.num_layers) if each not in config.dense_layers)
    return [f"model.layers.{layer}.mlp.experts" for layer in layers]
