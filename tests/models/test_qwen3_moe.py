"""Qwen3's mixtures of experts, on every target, and from a folder."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from torch import Tensor

from tests import architecture_checks as checks
from tests.tiny import tiny_model
from tests.twins import TWINS, Twin
from tilewright.models.config import MoeConfig

SHAPES: dict[str, dict[str, Any]] = {
    "sparse": {},
    "untied_and_partly_dense": {
        **{"tie_embeddings": False, "renormalise": False, "experts_per_token": 3},
        **{"num_layers": 3, "dense_layers": (1,), "num_experts": 7},
    },
}

ON_CUDA: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2, "expert_size": 24}


def _changes(config: MoeConfig) -> dict[str, Any]:
    return {
        **TWINS["qwen3"].changes(config),
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_size,
        "norm_topk_prob": config.renormalise,
        "mlp_only_layers": list(config.dense_layers),
        "decoder_sparse_step": 1,
    }


def stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A tensor for each product of each expert, as transformers' modules hold them."""
    found, experts = {}, [name for name in tensors if ".mlp.experts." in name]
    for name, tensor in tensors.items():
        if name not in experts:
            found[name] = tensor
    for path in dict.fromkeys(name.split(".experts.")[0] + ".experts" for name in experts):
        count = 1 + max(int(n.split(".experts.")[1].split(".")[0]) for n in experts if path in n)
        gate, up, down = (
            torch.stack([tensors[f"{path}.{expert}.{part}_proj.weight"] for expert in range(count)])
            for part in ("gate", "up", "down")
        )
        found[f"{path}.gate_up_proj"] = torch.cat((gate, up), dim=1)
        found[f"{path}.down_proj"] = down
    return found


TWIN = Twin(transformers.Qwen3MoeConfig, transformers.Qwen3MoeForCausalLM, _changes, stacked)


def make(shape: str = "sparse") -> Any:
    sizes = {"num_experts": 6, "experts_per_token": 2, "expert_size": 24}
    return tiny_model(std=0.2, model_type="qwen3_moe", **{**sizes, **SHAPES[shape]})


NOT_READ: checks.NotRead = [
    ({key: value, "sliding_window": 4}, rf"config\.json: {key} = .* is not read; allowed: ")
    for key, value in {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 2}.items()
]
"""transformers slides in every layer of these, whatever max_window_layers says."""
