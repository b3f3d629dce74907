"""Model configurations in Hugging Face's config.json spelling. Files are read elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.errors import allowed
from tilewright.models.architectures.table import (
    WRAPPERS,
    architecture_of,
    check_model_type,
)
from tilewright.models.checkpoints.quantized.config import quantization_of
from tilewright.models.checkpoints.spelling.keys import Keys, read_head_dim, read_kv_heads
from tilewright.models.checkpoints.spelling.rope import hf_rope, hf_rope_values, longer_context
from tilewright.models.checkpoints.spelling.windows import FULL
from tilewright.models.config import (
    MAX_HEADS,
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_VOCAB,
    MAX_WIDTH,
    ModelConfig,
)
from tilewright.models.hub import repository_name

_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "hidden_act": ("silu",),
    "use_sliding_window": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "query_pre_attn_scalar": (),
    "use_bidirectional_attention": (False,),
    "is_causal": (True,),
    "embedding_multiplier": (1.0,),
    "residual_multiplier": (1.0,),
    "attention_multiplier": (),
    "logits_scaling": (1.0,),
    "logit_scale": (1.0,),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "alibi": (False,),
    "num_experts": (0, 1),
    "num_local_experts": (0, 1),
    "n_routed_experts": (0,),
    "n_shared_experts": (0,),
    "first_k_dense_replace": (0,),
    "moe_layer_freq": (1,),
    "scoring_func": ("softmax",),
    "routed_scaling_factor": (1.0,),
    "n_group": (0, 1),
    "topk_group": (0, 1),
    "attn_output_gate": (False,),
    "output_gate_type": (),
}
"""Keys with an effect on arithmetic, and their neutral values. Null is also neutral. Other values
are rejected unless the architecture reads the key.
"""


def config_of_hf(values: Mapping[str, object], *, where: Path | str) -> ModelConfig:
    """Return the configuration in ``values``, the contents of ``config.json`` at ``where``.

    Raises:
        CheckpointError: A key is missing, out of range or unsupported.
    """
    model_type = _text_type(values, where)
    architecture = architecture_of(model_type)
    if architecture.text_config:
        values = _text_values(values, model_type, where)
    keys = Keys({**architecture.hf_defaults, **values}, where)
    quantization_of(values, str(where))
    hidden = keys.integer("hidden_size", 1, MAX_WIDTH)
    num_heads = keys.integer("num_attention_heads", 1, MAX_HEADS)
    head_dim = read_head_dim(keys, "head_dim", hidden, num_heads)
    max_positions = keys.integer("max_position_embeddings", 1, MAX_POSITIONS, default=2048)
    bias = keys.boolean("attention_bias", default=False)
    read: dict[str, Any] = {
        "name": _hf_name(values, where),
        "model_type": model_type,
        "vocab_size": keys.integer("vocab_size", 1, MAX_VOCAB),
        "hidden_size": hidden,
        "intermediate_size": keys.integer(architecture.intermediate_key, 1, MAX_WIDTH),
        "num_layers": keys.integer("num_hidden_layers", 1, MAX_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": read_kv_heads(keys, "num_key_value_heads", num_heads),
        "head_dim": head_dim,
        "max_positions": max_positions,
        "norm_eps": keys.real("rms_norm_eps", 0.0, 1.0, default=1e-6),
        "rope": hf_rope(
            keys,
            head_dim,
            max_positions,
            partial=architecture.has_partial_rotary,
            mrope=architecture.has_mrope,
            layers=FULL if architecture.has_rope_by_layer else None,
        ),
        "tie_embeddings": keys.boolean("tie_word_embeddings", default=False),
        "attention_bias": bias,
        "output_bias": bias,
        "mlp_bias": keys.boolean("mlp_bias", default=False),
    }
    read["max_positions"] = longer_context(read["rope"], read["max_positions"])
    config = (architecture.config or ModelConfig)(**{**read, **architecture.fixed})
    if architecture.read_hf is not None:
        config = architecture.read_hf(keys, config)
    _refuse_hf_extras(keys)
    assert isinstance(config, ModelConfig)
    return config


def hf_values(config: ModelConfig) -> dict[str, Any]:
    """Return ``config.json`` keys common to all architectures."""
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
        "rope_parameters": hf_rope_values(config.rope, config.head_dim),
        "tie_word_embeddings": config.tie_embeddings,
    }


def _text_type(values: Mapping[str, object], where: Path | str) -> str:
    """Return the text model's type, which may be inside a multimodal config.json.

    Raises:
        CheckpointError: The type is unknown, or there is no text model of an allowed type.
    """
    outer = check_model_type(values.get("model_type"), f"{where}: model_type")
    if outer not in WRAPPERS:
        return outer
    kinds = WRAPPERS[outer]
    keys, inner = Keys(values, where), values.get("text_config")
    if not isinstance(inner, Mapping):
        raise keys.error("text_config", inner, "allowed: an object")
    return keys.section("text_config", inner).choice("model_type", kinds, default=kinds[0])


def _text_values(
    values: Mapping[str, object], model_type: str, where: Path | str
) -> Mapping[str, object]:
    """Return the text model's keys, from ``text_config`` or the top level. Some top-level keys also
    apply.

    Raises:
        CheckpointError: The text model has another type, or both levels contradict.
    """
    inner = values.get("text_config")
    if inner is None:
        return values
    keys = Keys(values, where)
    if not isinstance(inner, Mapping):
        raise keys.error("text_config", inner, "allowed: an object")
    text = keys.section("text_config", inner)
    quantization_of(values, str(where))
    kinds = (model_type, architecture_of(model_type).text_type or f"{model_type}_text")
    if text.get("model_type") not in (None, *kinds):
        raise text.error("model_type", text.get("model_type"), allowed(kinds))
    key = "tie_word_embeddings"
    if keys.get(key) is not None:
        tied = keys.boolean(key, default=False)
        if text.boolean(key, default=tied) is not tied:
            tail = f"allowed: {str(tied).lower()}, as outside text_config"
            raise text.error(key, text.get(key), tail)
    outer = ("_name_or_path", key)
    said = {name: value for name, value in inner.items() if name not in outer or value is not None}
    return {**{name: values[name] for name in outer if name in values}, **said}


def _refuse_hf_extras(keys: Keys) -> None:
    """Reject unread keys with an effect on arithmetic."""
    keys.refuse_unread(_NEUTRAL)
    kinds = keys.unread("layer_types")
    if isinstance(kinds, list) and any(kind != FULL for kind in kinds):
        raise keys.error("layer_types", kinds, f"allowed: {FULL} for every layer")


def _hf_name(values: Mapping[str, object], where: Path | str) -> str:
    folder = Path(where).parent
    name = values.get("_name_or_path")
    written = name if isinstance(name, str) and name else "model"
    return repository_name(folder) or folder.name or written
