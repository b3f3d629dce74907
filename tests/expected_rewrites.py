"""How often each pass must fire on an architecture, by its configuration.

A fusion that stops firing fails a test, though the numbers that come out stay right. Passes that a
count is not given for depend on the precision, not on the architecture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Counts = dict[str, int]


def expected_rewrites(config: Any) -> Counts:
    """The counts, by pass, for the model of a `tilewright.models.config.ModelConfig`."""
    counts: Counts = _FAMILIES[config.model_type](config)
    return counts


def _llama(config: Any) -> Counts:
    num_layers = config.num_layers
    norms = 2 + 2 * config.qk_norm
    return {
        "match_rms_norm": norms * num_layers + 1,
        "match_rope": 2 * num_layers,
        "match_swiglu": num_layers,
        "match_calls": 7 * num_layers + 2,
        "fuse_add_rms_norm": 2 * num_layers,
        "insert_state": num_layers,
        "fuse_rope_attention": num_layers,
        "gather_logit_rows": 1,
        "fuse_linear_residual": 2 * num_layers,
        "fuse_norm_linear": 2 * num_layers + 1,
        "gather_before_norm": 1,
    }


def _gemma3(config: Any) -> Counts:
    return _llama(config) | {
        "match_rms_norm": 6 * config.num_layers + 1,
        "match_swiglu": 0,
        "match_calls": 8 * config.num_layers + 2,
        "fuse_linear_residual": 0,
    }


def _olmo3(config: Any) -> Counts:
    return _llama(config) | {
        "match_rms_norm": 4 * config.num_layers + 1,
        "fuse_linear_residual": 0,
        "fuse_add_rms_norm": 1,
        "fuse_norm_linear": 1,
    }


def _granite(config: Any) -> Counts:
    return _llama(config) | {"fuse_linear_residual": 0}


def _glm4(config: Any) -> Counts:
    return _llama(config) | {
        "match_rms_norm": 4 * config.num_layers + 1,
        "fuse_linear_residual": 0,
    }


def _sigmoid_experts(dense: Counts, config: Any) -> Counts:
    """Return the counts with experts after a sigmoid router. A shared expert has no gate."""
    num_sparse = config.num_layers - len(config.dense_layers)
    shared = int(config.shared_size > 0)
    changes = {
        "match_router": -num_sparse,
        "fuse_experts": -num_sparse,
        "match_sigmoid_gate": -shared * num_sparse,
        "match_calls": -shared * num_sparse,
        "fuse_expert_sum": -2 * shared * num_sparse,
        "fuse_linear_residual": shared * num_sparse,
    }
    counts = _with_experts(dense, config)
    return counts | {name: counts[name] + n for name, n in changes.items()}


def _glm4_moe(config: Any) -> Counts:
    return _sigmoid_experts(_llama(config), config)


def _minimax_m2(config: Any) -> Counts:
    dense = _llama(config)
    return _sigmoid_experts(
        dense | {"match_rms_norm": dense["match_rms_norm"] + 2 * config.num_layers}, config
    )


def _muse_glimmer(config: Any) -> Counts:
    counts = _llama(config)
    return counts | {
        "match_rms_norm": 6 * config.num_layers + 2,
        "match_sigmoid_gate": config.num_layers,
        "match_calls": counts["match_calls"] + config.num_layers,
        "fuse_linear_residual": 0,
    }


def _gpt_oss(config: Any) -> Counts:
    return _with_experts(_llama(config), config) | {"match_swiglu": 0, "fuse_experts": 0}


def _lfm2(config: Any) -> Counts:
    num_conv = len(config.conv_layers)
    changes = {
        "match_rms_norm": -2 * num_conv,
        "match_rope": -2 * num_conv,
        "fuse_rope_attention": -num_conv,
    }
    counts = _llama(config)
    return counts | {name: counts[name] + n for name, n in changes.items()}


def _hybrid(config: Any) -> Counts:
    num_layers, num_linear = config.num_layers, sum(config.linear_layers)
    num_full = num_layers - num_linear
    return {
        "match_rms_norm": 2 * num_layers + 2 * num_full + num_linear + 1,
        "match_rope": 2 * num_full,
        "match_swiglu": num_layers + num_linear,
        "match_sigmoid_gate": num_full,
        "match_calls": 3 * num_layers + 5 * num_full + 5 * num_linear + 2,
        "fuse_add_rms_norm": 2 * num_layers,
        "insert_state": num_full + 2 * num_linear,
        "fuse_rope_attention": num_full,
        "gather_logit_rows": 1,
        "fuse_linear_residual": 2 * num_layers,
        "fuse_delta_norm": num_linear,
        "fuse_norm_linear": 2 * num_layers + 1,
        "gather_before_norm": 1,
    }


def _with_experts(dense: Counts, config: Any) -> Counts:
    """A dense model's counts, with experts in the place of dense blocks."""
    num_sparse = config.num_layers - len(config.dense_layers)
    shared = int(config.shared_size > 0)
    changes = {
        "match_router": num_sparse,
        "fuse_experts": num_sparse,
        "match_swiglu": shared * num_sparse,  # the experts' own is in place of the dense block's
        "match_sigmoid_gate": shared * num_sparse,
        "match_calls": (4 * shared - 2) * num_sparse,
        "merge_expert_linears": num_sparse,
        "fuse_expert_sum": (1 + shared) * num_sparse,
        "fuse_linear_residual": -num_sparse,
        "fuse_norm_linear": -num_sparse,
    }
    return {**dense, **{name: dense.get(name, 0) + n for name, n in changes.items()}}


def _sparse_llama(config: Any) -> Counts:
    return _with_experts(_llama(config), config)


def _sparse_hybrid(config: Any) -> Counts:
    return _with_experts(_hybrid(config), config)


_FAMILIES: dict[str, Callable[[Any], Counts]] = {
    "gemma3_text": _gemma3,
    "glm4": _glm4,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "granite": _granite,
    "granitemoehybrid": _granite,
    "lfm2": _lfm2,
    "llama": _llama,
    "minimax_m2": _minimax_m2,
    "ministral3": _llama,
    "mistral": _llama,
    "mllama": _llama,
    "muse_glimmer": _muse_glimmer,
    "olmo3": _olmo3,
    "phi3": _llama,
    "qwen2": _llama,
    "qwen3": _llama,
    "qwen3_5": _hybrid,
    "qwen3_5_moe": _sparse_hybrid,
    "qwen3_moe": _sparse_llama,
    "qwen3_next": _sparse_hybrid,
    "smollm3": _llama,
}
