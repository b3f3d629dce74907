"""transformers' models for our configurations."""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import Tensor

from tests.tiny import random_tokens
from tilewright.models.checkpoints.huggingface.config import hf_values
from tilewright.models.config import LongRopeScaling, ModelConfig
from tilewright.models.sources import TensorSource


@dataclasses.dataclass(frozen=True, slots=True)
class Twin:
    """transformers' classes for an architecture, and additional configuration.

    ``loaded``: converts checkpoint tensors to the class, for stacked tensors.
    """

    config: Any
    model: Any
    changes: Callable[[Any], dict[str, Any]] = lambda config: {}
    loaded: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors


def _llama(config: ModelConfig) -> dict[str, Any]:
    assert config.attention_bias == config.output_bias
    return {"attention_bias": config.attention_bias, "mlp_bias": config.mlp_bias}


def _windows(config: ModelConfig) -> dict[str, Any]:
    """For Mistral and Phi-3."""
    assert len(set(config.windows)) <= 1
    return {"sliding_window": config.windows[0] if config.windows else None}


def _upper_windows(config: ModelConfig) -> dict[str, Any]:
    """For Qwen2 and Qwen3 with windows in upper layers."""
    if not config.windows:
        return {"use_sliding_window": False}
    return {
        "use_sliding_window": True,
        "sliding_window": max(config.windows),
        "max_window_layers": config.windows.count(0),
    }


def _qwen3(config: ModelConfig) -> dict[str, Any]:
    assert config.qk_norm
    return {**_upper_windows(config), "attention_bias": config.attention_bias}


def _phi3(config: ModelConfig) -> dict[str, Any]:
    """The original length is next to the rotation's section."""
    scaling, tokens = config.rope.scaling, {"pad_token_id": 0, "eos_token_id": 1}
    beside = {}
    if isinstance(scaling, LongRopeScaling):
        beside["original_max_position_embeddings"] = scaling.original_max_positions
    return {**_windows(config), **tokens, **beside}


TWINS = {
    "llama": Twin(transformers.LlamaConfig, transformers.LlamaForCausalLM, _llama),
    "mistral": Twin(transformers.MistralConfig, transformers.MistralForCausalLM, _windows),
    "qwen2": Twin(transformers.Qwen2Config, transformers.Qwen2ForCausalLM, _upper_windows),
    "qwen3": Twin(transformers.Qwen3Config, transformers.Qwen3ForCausalLM, _qwen3),
    "phi3": Twin(transformers.Phi3Config, transformers.Phi3ForCausalLM, _phi3),
}


def find_twin(model_type: str) -> Twin:
    """Return the entry above, or ``TWIN`` from the architecture's test file."""
    if model_type in TWINS:
        return TWINS[model_type]
    found: Twin = importlib.import_module(f"tests.models.test_{model_type}").TWIN
    return found


def twin_of(config: ModelConfig, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Return a transformers model, optionally with only these ``tensors``."""
    twin = find_twin(config.model_type)
    values = hf_values(config)
    del values["model_type"]  # the class belongs to this model type
    theirs = twin.model(twin.config(**{**values, **twin.changes(config)}))
    if tensors is not None:
        left = theirs.load_state_dict(twin.loaded(dict(tensors)), strict=False)
        assert left.unexpected_keys == []
        assert left.missing_keys == (["lm_head.weight"] if config.tie_embeddings else [])
        theirs.tie_weights()
    return theirs.eval()


def parameters_of(model: SimpleNamespace) -> dict[str, Tensor]:
    """Return a tiny module's arguments: parameters from the checkpoint, and constants."""
    sources, values = model.module.sources(), {}
    for name, weight in model.module.named_parameters():
        parts = []
        for source in sources.get(name, (TensorSource(name),)):
            stored = model.checkpoint.tensors[source.tensor]
            stored = stored.flatten(0, -2) if stored.dim() > 2 else stored
            parts.append(stored[slice(*source.rows) if source.rows else slice(None)])
            parts[-1] = parts[-1] + source.offset
        values[name] = torch.cat(parts).view(weight.shape)
    return values | model.module.constants()


def assert_eager_equals_twin(model: SimpleNamespace) -> None:
    """Compare names, shapes and fp32 logits of a tiny model (`tests.tiny.tiny_model`) with
    transformers.
    """
    theirs = twin_of(model.config, model.checkpoint.tensors)
    stored = theirs.state_dict().keys()
    tensors = (*theirs.named_parameters(), *theirs.named_buffers())
    names = {name: tuple(tensor.shape) for name, tensor in tensors if name in stored}
    loaded = find_twin(model.config.model_type).loaded(dict(model.checkpoint.tensors))
    assert names == {n: tuple(w.shape) for n, w in loaded.items()}
    tokens = torch.tensor(random_tokens(23))
    with torch.no_grad():
        expected = theirs(tokens[None]).logits[0]
        got = torch.func.functional_call(
            model.module, parameters_of(model), (tokens, torch.arange(23))
        )
    assert expected.std() > 0.1
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
