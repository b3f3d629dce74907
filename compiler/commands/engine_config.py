"""Between the configurations of models and those that generated engines are created with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tilewright.compiler.errors import CompileError
from tilewright.models.config import LinearScaling, Llama3Scaling, ModelConfig, RopeConfig

if TYPE_CHECKING:
    from tilewright.compiler.targets.cuda.engine.parts.settings import Settings


def engine_config(config: ModelConfig) -> dict[str, Any]:
    """The ``model_config`` of a model that was read from a checkpoint; q and k rows in half order.

    Raises:
        CompileError: for a rotation that generated engines have not.
    """
    rope = config.rope
    if rope.freq_factors is not None or rope.num_rotated not in (None, config.head_dim):
        raise CompileError(f"{config.name}: rotates by factors, or some channels; {_ROTATIONS}")
    return {
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": _scaling(config),
        "rope_style": "half",
    }


_ROTATIONS = "allowed: plain, linear or llama3 rotation of all channels"


def _scaling(config: ModelConfig) -> dict[str, Any] | None:
    scaling = config.rope.scaling
    if scaling is None:
        return None
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", "factor": scaling.factor}
    if isinstance(scaling, Llama3Scaling):
        return {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    raise CompileError(f"{config.name}: {type(scaling).__name__}; {_ROTATIONS}")


def model_of(settings: Settings) -> SimpleNamespace:
    """What the compiler looks at of a model with these settings of an engine, without weights."""
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
