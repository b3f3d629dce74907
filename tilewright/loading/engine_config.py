"""Converts between the configurations of models and of generated engines."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tilewright.errors import CompileError
from tilewright.models.checkpoints.huggingface.config import hf_values
from tilewright.models.config import HybridConfig, ModelConfig, RopeConfig

if TYPE_CHECKING:
    from tilewright.compiler.targets.cuda.engine_generator.parts.settings import Settings


def engine_config(config: ModelConfig) -> dict[str, Any]:
    """Return the ``model_config`` for a checkpoint's model, with q and k rows in half order.

    Raises:
        CompileError: The rotation or the architecture is not supported in generated engines.
    """
    if config.model_type == "mllama":
        raise CompileError(
            f"{config.name}: architecture 'mllama' is not generated; allowed: `tilewright compile`"
        )
    rope, hybrid = config.rope, _hybrid_values(config)
    is_partial = rope.num_rotated not in (None, config.head_dim) and not hybrid
    if rope.freq_factors is not None or is_partial:
        raise CompileError(f"{config.name}: rotates by factors, or some channels; {_ROTATIONS}")
    values = hf_values(config)
    del values["tie_word_embeddings"]  # weights without a head are tied
    scaling = values.pop("rope_parameters")
    scaling.pop("partial_rotary_factor", None)
    theta = scaling.pop("rope_theta")
    if scaling["rope_type"] not in _KINDS:
        raise CompileError(f"{config.name}: {scaling['rope_type']} rotation; {_ROTATIONS}")
    scaled = scaling if scaling["rope_type"] != "default" else None
    rotation = {"rope_theta": theta, "rope_scaling": scaled, "rope_style": "half"}
    return {**values, **hybrid, **rotation}


def _hybrid_values(config: ModelConfig) -> dict[str, Any]:
    """Return the keys for experts with linear attention layers, none for other models."""
    if not isinstance(config, HybridConfig) or not config.num_experts:
        return {}
    delta, num_rotated = config.delta, config.rope.num_rotated or config.head_dim
    kinds = ("full_attention", "linear_attention")
    return {
        "partial_rotary_factor": num_rotated / config.head_dim,
        "layer_types": [kinds[is_linear] for is_linear in config.linear_layers],
        "linear_num_key_heads": delta.num_key_heads,
        "linear_num_value_heads": delta.num_value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.conv_width,
        "num_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.expert_size,
        "shared_expert_intermediate_size": config.shared_size,
    }


_KINDS = ("default", "linear", "llama3")
_ROTATIONS = "allowed: plain, linear or llama3 rotation of all channels"


def model_of(settings: Settings) -> SimpleNamespace:
    """Return the compiler's view of a model with an engine's settings, without weights."""
    import torch

    from tilewright.models.architectures.table import architecture_of

    config = ModelConfig(
        name="tiny_llama",
        model_type="llama",
        vocab_size=settings.vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_layers=settings.num_layers,
        num_heads=settings.num_heads,
        num_kv_heads=settings.num_kv_heads,
        head_dim=settings.head_dim,
        max_positions=settings.max_positions,
        norm_eps=settings.eps,
        rope=RopeConfig(theta=settings.theta),
        tie_embeddings=False,
    )
    with torch.device("meta"):
        module = architecture_of(config.model_type).model(config)
    checkpoint = SimpleNamespace(stored_type=lambda name: "F16")
    return SimpleNamespace(name=config.name, config=config, module=module, checkpoint=checkpoint)
