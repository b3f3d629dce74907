"""GLM-4.5: a sigmoid router with a selection bias, and a shared expert, on every target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import architecture_checks as checks
from tests.models.test_qwen3_moe import stacked
from tests.tiny import compiled, prefill, random_tokens, tiny_model
from tests.twins import Twin
from tilewright.errors import CheckpointError, CompileError
from tilewright.models.checkpoints.base import check_tensors
from tilewright.models.checkpoints.containers import open_checkpoint
from tilewright.models.config import RopeConfig
from tilewright.models.sources import stored_shapes

SIZES: dict[str, Any] = {
    **{"rope": RopeConfig(10000.0, num_rotated=16), "head_dim": 32, "dense_layers": (0,)},
    **{"num_experts": 6, "experts_per_token": 2, "expert_size": 24, "shared_size": 24},
    **{"routed_scale": 1.5, "tie_embeddings": False},
}
ON_CUDA: dict[str, Any] = {**SIZES, "num_layers": 2, "num_experts": 4, "qk_norm": True}
SHAPES: dict[str, dict[str, Any]] = {
    "air": {"attention_bias": True},
    "normed": {
        **{"qk_norm": True, "num_layers": 3, "experts_per_token": 3, "num_experts": 7},
        **{"shared_size": 48, "renormalise": False, "routed_scale": 1.0},
    },
}


def _changes(config: Any) -> dict[str, Any]:
    return {
        "attention_bias": config.attention_bias,
        "use_qk_norm": config.qk_norm,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_size,
        "n_shared_experts": config.shared_size // config.expert_size,
        "first_k_dense_replace": len(config.dense_layers),
        "norm_topk_prob": config.renormalise,
        "routed_scaling_factor": config.routed_scale,
    }


TWIN = Twin(transformers.Glm4MoeConfig, transformers.Glm4MoeForCausalLM, _changes, stacked)


def make(shape: str = "air", **changes: Any) -> Any:
    values = {**SIZES, **SHAPES[shape], **changes}
    return tiny_model(std=0.2, model_type="glm4_moe", **values)


NOT_READ: checks.NotRead = [
    ({"n_routed_experts": 1}, "n_routed_experts = 1"),
    ({"num_experts_per_tok": 7}, "num_experts_per_tok = 7"),
    ({"first_k_dense_replace": 3}, "first_k_dense_replace = 3"),
    ({"n_group": 2}, "n_group = 2"),
    ({"scoring_func": "softmax"}, "scoring_func = 'softmax'"),
]


def test_the_bias_changes_the_selection_only() -> None:
    model, tokens = make(), random_tokens(19)
    expected = prefill(compiled(model), tokens)
    biases = [name for name in model.checkpoint.tensors if name.endswith("correction_bias")]
    for name in biases:
        model.checkpoint.tensors[name] += 100.0
    torch.testing.assert_close(prefill(compiled(model), tokens), expected, atol=1e-3, rtol=0)
    for name in biases:
        model.checkpoint.tensors[name][0] += 100.0
    assert (prefill(compiled(model), tokens) - expected).abs().max() > 1e-2


def test_onnx_runtime_refuses_a_sigmoid_router_in_one_line() -> None:
    with pytest.raises(CompileError, match=r"sigmoid router; allowed: --backend native") as caught:
        compiled(make(), "cpu")
    assert "\n" not in str(caught.value)


def _gguf_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Stack the experts, and name the selection bias as the converter does."""
    values = {}
    for name, tensor in stacked(tensors).items():
        name = name.replace("correction_bias", "correction.bias")
        if name.endswith(".gate_up_proj"):
            for part, half in zip(("gate", "up"), tensor.chunk(2, dim=1), strict=True):
                values[name.replace("gate_up", part) + ".weight"] = half
        else:
            values[name + ".weight" * name.endswith("experts.down_proj")] = tensor
    return values


def test_a_gguf_with_llama_cpps_names(tmp_path: Path) -> None:
    model = make("normed")

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_expert_count(7)
        writer.add_expert_used_count(3)
        writer.add_expert_shared_count(2)
        writer.add_expert_feed_forward_length(24)
        writer.add_expert_weights_norm(False)
        writer.add_expert_weights_scale(1.0)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(1)
        writer.add_rope_dimension_count(16)

    checks.check_gguf(
        model,
        tmp_path / "tiny.gguf",
        architecture=gguf.MODEL_ARCH.GLM4_MOE,
        extra=extra,
        prepare=_gguf_tensors,
    )


def test_draft_layers_after_the_last_layer_are_ignored(tmp_path: Path) -> None:
    model = make()
    checks.check_folder(model, tmp_path)
    tensors: dict[str, Tensor] = load_file(tmp_path / "model.safetensors")
    drafts = {"model.layers.2.eh_proj.weight": torch.ones(32, 64)}
    drafts["model.layers.2.self_attn.q_proj.weight"] = torch.ones(128, 32)
    save_file(tensors | drafts, tmp_path / "model.safetensors")
    check_tensors(open_checkpoint(tmp_path), stored_shapes(model.module))
    drafts = {"model.layers.3.eh_proj.weight": torch.ones(32, 64)}
    save_file(tensors | drafts, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"layers\.3\.eh_proj.*not part of the model"):
        check_tensors(open_checkpoint(tmp_path), stored_shapes(model.module))
