"""One model configuration, whatever container it came from: config.json or GGUF metadata.

It checks every value against what the rest of the code can hold; it reads no files and no weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.compiler.errors import CheckpointError, allowed
from tilewright.models.architectures.base import architecture_of, check_model_type, find_gguf_type
from tilewright.models.architectures.rope import (
    MAX_POSITIONS,
    Llama3Scaling,
    LongRopeScaling,
    RopeConfig,
    gguf_rope,
    hf_rope,
    inverse_frequencies,
)
from tilewright.models.checkpoints.keys import Keys
from tilewright.models.checkpoints.windows import FULL
from tilewright.models.hub import repository_name

__all__ = ["Llama3Scaling", "ModelConfig", "RopeConfig", "inverse_frequencies"]

MAX_VOCAB = 1 << 24
MAX_WIDTH = 1 << 20
MAX_LAYERS = 4096
MAX_HEADS = 1 << 16
MAX_HEAD_DIM = 4096

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
"""Keys of config.json that change the arithmetic, with the values that leave it as it is: others
are refused where the architecture does not read the key. Null leaves it as it is too."""

_GGUF_NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "expert_count": (0,),
    "expert_shared_count": (0, 1),
    "expert_gating_func": (0, 1),
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "leading_dense_block_count": (0,),
    "moe_every_n_layers": (0, 1),
    "interleave_moe_layer_step": (0, 1),
    "router_logit_softcapping": (0.0,),
    "attention.sliding_window": (0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "attention.scale": (0.0,),
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "logit_scale": (0.0, 1.0),
}
"""The same of GGUF's keys."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The sizes and switches of a dense decoder; sizes are counts of elements.

    ``attention_bias`` is that of the q, k and v products, ``output_bias`` that of o. ``qk_norm``:
    heads of q and k are normed before they turn. ``windows``: positions that each layer sees, 0
    for all; empty where every layer sees all.
    """

    name: str
    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    norm_eps: float
    rope: RopeConfig
    tie_embeddings: bool
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    windows: tuple[int, ...] = ()

    def window(self, layer: int) -> int:
        """The positions that a layer sees, itself included; 0 for all."""
        return self.windows[layer] if self.windows else 0

    def program_context(self, max_context: int) -> int:
        """The longest context that a program built for ``max_context`` serves as it is.

        LongRoPE turns differently beyond its original length.
        """
        if isinstance(self.rope.scaling, LongRopeScaling):
            original = self.rope.scaling.original_max_positions
            if max_context <= original < self.max_positions:
                return original
        return self.max_positions

    @classmethod
    def from_hf(cls, values: Mapping[str, object], *, where: Path | str) -> ModelConfig:
        """From the contents of a Hugging Face ``config.json`` at ``where``.

        Raises:
            CheckpointError: a key that is missing, out of range, or of a kind that is not read.
        """
        model_type = check_model_type(values.get("model_type"), f"{where}: model_type")
        architecture = architecture_of(model_type)
        if architecture.text_config:
            values = _text_values(values, model_type, where)
        keys = Keys({**architecture.hf_defaults, **values}, where)
        _refuse_quantised(keys)
        hidden = keys.integer("hidden_size", 1, MAX_WIDTH)
        num_heads = keys.integer("num_attention_heads", 1, MAX_HEADS)
        head_dim = _head_dim(keys, "head_dim", hidden, num_heads)
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
            "num_kv_heads": _kv_heads(keys, "num_key_value_heads", num_heads),
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
        config = (architecture.config or ModelConfig)(**{**read, **architecture.fixed})
        if architecture.read_hf is not None:
            config = architecture.read_hf(keys, config)
        _refuse_hf_extras(keys)
        assert isinstance(config, ModelConfig)
        return config

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, object], *, where: Path | str) -> ModelConfig:
        """From the key-value part of the GGUF file at ``where``.

        Tied embeddings, biases and frequency factors are tensors in a GGUF file, so the reader
        fills them in; here the embeddings are taken as tied, and only fixed biases are there.

        Raises:
            CheckpointError: a key that is missing, out of range, or of a kind that is not read.
        """
        name = metadata.get("general.architecture")
        model_type = find_gguf_type(name, f"{where}: general.architecture")
        architecture = architecture_of(model_type)
        keys = Keys(metadata, where, prefix=f"{name}.")
        hidden = keys.integer("embedding_length", 1, MAX_WIDTH)
        num_heads = keys.integer("attention.head_count", 1, MAX_HEADS)
        head_dim = _head_dim(keys, "attention.key_length", hidden, num_heads)
        key = "attention.value_length"
        if keys.integer(key, 1, MAX_HEAD_DIM, default=head_dim) != head_dim:
            raise keys.error(key, keys.get(key), f"allowed: the head size, {head_dim}")
        tokens = metadata.get("tokenizer.ggml.tokens")
        num_tokens = len(tokens) if isinstance(tokens, list) and tokens else None
        read: dict[str, Any] = {
            "name": Path(where).stem,
            "model_type": model_type,
            "vocab_size": keys.integer("vocab_size", 1, MAX_VOCAB, default=num_tokens),
            "hidden_size": hidden,
            "intermediate_size": keys.integer(architecture.gguf_intermediate_key, 1, MAX_WIDTH),
            "num_layers": _gguf_layers(keys),
            "num_heads": num_heads,
            "num_kv_heads": _kv_heads(keys, "attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "max_positions": keys.integer("context_length", 1, MAX_POSITIONS),
            "norm_eps": keys.real("attention.layer_norm_rms_epsilon", 0.0, 1.0),
            "rope": gguf_rope(
                keys,
                head_dim,
                partial=architecture.has_partial_rotary,
                mrope=architecture.has_mrope,
            ),
            "tie_embeddings": True,
        }
        config = (architecture.config or ModelConfig)(**{**read, **architecture.fixed})
        if architecture.read_gguf is not None:
            config = architecture.read_gguf(keys, config)
        keys.refuse_unread(_GGUF_NEUTRAL)
        assert isinstance(config, ModelConfig)
        return config


def _text_values(
    values: Mapping[str, object], model_type: str, where: Path | str
) -> Mapping[str, object]:
    """The keys of the text model, wherever they are; what is said of the whole holds for it.

    Raises:
        CheckpointError: a text model of another kind, or what the two say differently.
    """
    inner = values.get("text_config")
    if inner is None:
        return values
    keys = Keys(values, where)
    if not isinstance(inner, Mapping):
        raise keys.error("text_config", inner, "allowed: an object")
    text = keys.section("text_config", inner)
    for each in (keys, text):
        _refuse_quantised(each)
    kinds = (model_type, f"{model_type}_text")
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


def _refuse_quantised(keys: Keys) -> None:
    method = keys.get("quantization_config")
    if method is not None:
        if isinstance(method, Mapping):
            method = method.get("quant_method", method)
        raise keys.error("quantization_config", method, "allowed: none, unquantised weights")


def _refuse_hf_extras(keys: Keys) -> None:
    """What nobody has read and would change the arithmetic."""
    keys.refuse_unread(_NEUTRAL)
    kinds = keys.unread("layer_types")
    if isinstance(kinds, list) and any(kind != FULL for kind in kinds):
        raise keys.error("layer_types", kinds, f"allowed: {FULL} for every layer")


def _gguf_layers(keys: Keys) -> int:
    """Without those at the end that draft tokens, which change nothing of the others."""
    count = keys.integer("block_count", 1, MAX_LAYERS)
    return count - keys.integer("nextn_predict_layers", 0, count - 1, default=0)


def _hf_name(values: Mapping[str, object], where: Path | str) -> str:
    folder = Path(where).parent
    name = values.get("_name_or_path")
    written = name if isinstance(name, str) and name else "model"
    return repository_name(folder) or folder.name or written


def _kv_heads(keys: Keys, key: str, num_heads: int) -> int:
    num_kv_heads = keys.integer(key, 1, num_heads, default=num_heads)
    if num_heads % num_kv_heads:
        raise keys.error(key, num_kv_heads, f"allowed: a divisor of the {num_heads} heads")
    return num_kv_heads


def _head_dim(keys: Keys, key: str, hidden: int, num_heads: int) -> int:
    if keys.get(key) is None and hidden % num_heads:
        raise CheckpointError(
            f"{keys.where}: {keys.prefix}{key} is missing and the hidden size {hidden} "
            f"is not a multiple of the {num_heads} heads; allowed: a multiple"
        )
    head_dim = keys.integer(key, 1, MAX_HEAD_DIM, default=hidden // num_heads)
    if head_dim % 2 or not 2 <= head_dim <= MAX_HEAD_DIM:
        raise keys.error(key, head_dim, f"allowed: an even number from 2 to {MAX_HEAD_DIM}")
    return head_dim
