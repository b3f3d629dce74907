"""Between the configurations of models and those that generated engines are created with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from tilewright.compiler.errors import CompileError
from tilewright.models.checkpoints.hf_config import hf_values
from tilewright.models.config import ModelConfig, RopeConfig

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
    values = hf_values(config)
    del values["tie_word_embeddings"]  # weights without a head are tied
    scaling = values.pop("rope_parameters")
    theta = scaling.pop("rope_theta")
    if scaling["rope_type"] not in _KINDS:
        raise CompileError(f"{config.name}: {scaling['rope_type']} rotation; {_ROTATIONS}")
    scaled = scaling if scaling["rope_type"] != "default" else None
    return {**values, "rope_theta": theta, "rope_scaling": scaled, "rope_style": "half"}


_KINDS = ("default", "linear", "llama3")
_ROTATIONS = "allowed: plain, linear or llama3 rotation of all channels"


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
