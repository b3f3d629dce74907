"""transformers' own model of one of our configurations: what ours is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor

from models.config import ModelConfig
from tests.tiny import random_tokens

CLASSES: dict[str, tuple[Any, Any]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
}


def twin_of(config: ModelConfig, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """A model of transformers, ready to be called; with ``tensors``, holding just those."""
    config_class, model_class = CLASSES[config.model_type]
    biases: dict[str, Any] = {}
    if config.model_type == "llama":
        assert config.attention_bias == config.output_bias
        biases = {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}
    theirs = model_class(
        config_class(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_layers,
            num_attention_heads=config.num_heads,
            num_key_value_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_positions,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tie_embeddings,
            rope_parameters=_rope(config),
            **biases,
        )
    )
    if tensors is not None:
        left = theirs.load_state_dict(dict(tensors), strict=False)
        assert left.unexpected_keys == []
        assert left.missing_keys == (["lm_head.weight"] if config.tie_embeddings else [])
        theirs.tie_weights()
    return theirs.eval()


def _rope(config: ModelConfig) -> dict[str, Any]:
    scaling = config.rope.scaling
    if scaling is None:
        return {"rope_type": "default", "rope_theta": config.rope.theta}
    return {
        "rope_type": "llama3",
        "rope_theta": config.rope.theta,
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_max_positions,
    }


def assert_eager_equals_twin(model: SimpleNamespace) -> None:
    """Names, shapes and fp32 logits of a tiny model (`tests.tiny.tiny_model`) are transformers'."""
    theirs = twin_of(model.config, model.checkpoint.tensors)
    names = {name: tuple(weight.shape) for name, weight in theirs.named_parameters()}
    assert names == {n: tuple(w.shape) for n, w in model.module.named_parameters()}
    tokens = torch.tensor(random_tokens(23))
    weights = model.checkpoint.tensors | model.module.constants()
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        got = torch.func.functional_call(model.module, weights, (tokens, torch.arange(23)))
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
