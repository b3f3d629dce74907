"""Tensor groups, op groups, allowed values and spellings of a configuration.

The meaning of ``activation: mixed`` per op is also here. Files and models are not.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from tilewright.compiler.formats import FIDELITIES, FORMATS
from tilewright.errors import ConfigError, allowed

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, Phase] = ("prefill", "decode")

# The six published groups in heading order, then the groups added by Tilewright.
SEED_TENSOR_GROUPS = ("ff1_3", "ff2", "wqkv", "wo", "kv_cache", "activation")
# A vision tower's groups. An image passes once, so their fidelity is fixed.
VISION_GROUPS = ("vision_wqkv", "vision_wo", "vision_ff", "vision_patch", "projector")
# Groups of cross-attention to images. Keys and values are computed once per image.
CROSS_GROUPS = ("cross_wq", "cross_wkv", "cross_wo", "cross_kv_cache")
# A draft layer's groups. It has no layer index. Rows of ``--explain`` have this scope.
DRAFT_SCOPE = "draft layer"
DRAFT_GROUPS = (
    *("draft_fc", "draft_wqkv", "draft_wo", "draft_kv_cache"),
    *("draft_ff1_3", "draft_ff2", "draft_lm_head"),
)
# Values in the cache. `kv_cache` then has the keys.
VALUE_CACHE = "v_cache"
OUR_TENSOR_GROUPS = (
    "lm_head",
    "embedding",
    "experts_ff1_3",
    "experts_ff2",
    "shared_ff1_3",
    "shared_ff2",
    "delta_in",
    "delta_out",
    "delta_gates",
    "router",
    "block_output",
    VALUE_CACHE,
    *VISION_GROUPS,
    *CROSS_GROUPS,
    *DRAFT_GROUPS,
)
TENSOR_GROUPS = SEED_TENSOR_GROUPS + OUR_TENSOR_GROUPS

# If unset, these groups follow the equivalent group of other models. Experts and shared experts
# follow a dense block. Linear attention follows attention. A vision tower follows the text model:
# its feed-forward has no gate, so it follows ff2.
FOLLOWS = MappingProxyType(
    {
        "experts_ff1_3": "ff1_3",
        "experts_ff2": "ff2",
        "shared_ff1_3": "ff1_3",
        "shared_ff2": "ff2",
        "delta_in": "wqkv",
        "delta_out": "wo",
        "delta_gates": "router",
        VALUE_CACHE: "kv_cache",
        "vision_wqkv": "wqkv",
        "vision_wo": "wo",
        "vision_ff": "ff2",
        "vision_patch": "router",
        "projector": "router",
        "cross_wq": "wqkv",
        "cross_wkv": "wqkv",
        "cross_wo": "wo",
        "cross_kv_cache": "kv_cache",
        "draft_fc": "wqkv",
        "draft_wqkv": "wqkv",
        "draft_wo": "wo",
        "draft_kv_cache": "kv_cache",
        "draft_ff1_3": "ff1_3",
        "draft_ff2": "ff2",
        "draft_lm_head": "lm_head",
    }
)

# An unset group's value without a base value. The target then selects the format of a block's
# output.
UNSET = MappingProxyType({"block_output": "mixed"})

# Groups of linears with a block output as result.
BLOCK_OUTPUTS = frozenset(
    {"wo", "ff2", "delta_out", "experts_ff2", "shared_ff2", "draft_wo", "draft_ff2"}
)

# Groups with expert weights: a token reads only its selected experts.
EXPERT_GROUPS = frozenset({"experts_ff1_3", "experts_ff2"})

SEED_OP_GROUPS = (
    "li_ff1_3",
    "li_ff2",
    "li_qkv_decode",
    "li_o_decode",
    "sdpa_decode",
    "li_qkv_prefill",
    "li_o_prefill",
    "sdpa_prefill",
)
# li_ff1_3 and li_ff2 set both phases. The refined groups set a single phase.
REFINED_OP_GROUPS = MappingProxyType(
    {
        "li_ff1_3": ("li_ff1_3_prefill", "li_ff1_3_decode"),
        "li_ff2": ("li_ff2_prefill", "li_ff2_decode"),
    }
)
OUR_OP_GROUPS = (
    "li_lm_head",
    "li_ff1_3_prefill",
    "li_ff1_3_decode",
    "li_ff2_prefill",
    "li_ff2_decode",
)
OP_GROUPS = SEED_OP_GROUPS + OUR_OP_GROUPS

# Op groups before the phase is known. A lookup adds the phase.
OP_FAMILIES = ("li_ff1_3", "li_ff2", "li_qkv", "li_o", "sdpa", "li_lm_head")

# Op family of matmuls with a tensor group's weights, and of attention over the cache.
OP_GROUP_OF = MappingProxyType(
    {
        "ff1_3": "li_ff1_3",
        "ff2": "li_ff2",
        "wqkv": "li_qkv",
        "wo": "li_o",
        "lm_head": "li_lm_head",
        "kv_cache": "sdpa",
        "experts_ff1_3": "li_ff1_3",
        "experts_ff2": "li_ff2",
        "shared_ff1_3": "li_ff1_3",
        "shared_ff2": "li_ff2",
        "delta_in": "li_qkv",
        "delta_out": "li_o",
        "cross_wq": "li_qkv",
        "cross_wkv": "li_qkv",
        "cross_wo": "li_o",
        "cross_kv_cache": "sdpa",
        "draft_fc": "li_qkv",
        "draft_wqkv": "li_qkv",
        "draft_wo": "li_o",
        "draft_kv_cache": "sdpa",
        "draft_ff1_3": "li_ff1_3",
        "draft_ff2": "li_ff2",
        "draft_lm_head": "li_lm_head",
    }
)

# Groups with fixed fidelity: their cost is small and their effect is large.
ALWAYS_HIGH = MappingProxyType(
    {
        "router": ("li_router", "hifi4"),
        "delta_gates": ("li_delta_gates", "hifi4"),
        **dict.fromkeys(VISION_GROUPS, ("li_vision", "hifi4")),
    }
)

# Stored op groups: each has a phase, except the head with a common setting.
STORED_OP_GROUPS = tuple(key for key in OP_GROUPS if key not in REFINED_OP_GROUPS)

# Groups that exist once per model. All other groups exist once per layer.
GLOBAL_GROUPS = ("lm_head", "embedding", "li_lm_head")

MIXED = "mixed"
STORED = "stored"
"""Keep the checkpoint's format of each tensor."""

BLOCK_AXES = ("in", "out")

_WEIGHT_FORMATS = (*(name for name in FORMATS if FORMATS[name].is_offered), STORED)
ALLOWED_FORMATS = MappingProxyType(
    {
        "ff1_3": _WEIGHT_FORMATS,
        "ff2": _WEIGHT_FORMATS,
        "wqkv": _WEIGHT_FORMATS,
        "wo": _WEIGHT_FORMATS,
        # bfp2 and q40 are for weights only. q80 is also for matmul inputs.
        "kv_cache": ("fp32", "bf16", "fp16", "bfp8", "bfp4"),
        "activation": ("fp32", "bf16", "fp16", "bfp8", "bfp4", "q80", MIXED),
        "lm_head": _WEIGHT_FORMATS,
        "embedding": ("fp32", "bf16", "fp16", "bfp8", "bfp4", "q40", "q80", STORED),
        "experts_ff1_3": _WEIGHT_FORMATS,
        "experts_ff2": _WEIGHT_FORMATS,
        "shared_ff1_3": _WEIGHT_FORMATS,
        "shared_ff2": _WEIGHT_FORMATS,
        "delta_in": _WEIGHT_FORMATS,
        "delta_out": _WEIGHT_FORMATS,
        # The router selects the weights and the gates control the memory. Both stay high, like
        # norms.
        "router": ("fp32", "bf16", "fp16", STORED),
        "delta_gates": ("fp32", "bf16", "fp16", STORED),
        "vision_wqkv": _WEIGHT_FORMATS,
        "vision_wo": _WEIGHT_FORMATS,
        "vision_ff": _WEIGHT_FORMATS,
        "vision_patch": ("fp32", "bf16", "fp16", STORED),
        "projector": ("fp32", "bf16", "fp16", STORED),
        "cross_wq": _WEIGHT_FORMATS,
        "cross_wkv": _WEIGHT_FORMATS,
        "cross_wo": _WEIGHT_FORMATS,
        "cross_kv_cache": ("fp32", "bf16", "fp16", "bfp8", "bfp4"),
        "draft_fc": _WEIGHT_FORMATS,
        "draft_wqkv": _WEIGHT_FORMATS,
        "draft_wo": _WEIGHT_FORMATS,
        "draft_kv_cache": ("fp32", "bf16", "fp16", "bfp8", "bfp4"),
        "draft_ff1_3": _WEIGHT_FORMATS,
        "draft_ff2": _WEIGHT_FORMATS,
        "draft_lm_head": _WEIGHT_FORMATS,
        "block_output": ("q80", MIXED),
        VALUE_CACHE: ("fp32", "bf16", "fp16", "bfp8", "bfp4"),
    }
)


# Names with an underscore: q4_k.
_SPELLED = MappingProxyType({name.replace("_", ""): name for name in FORMATS})


@dataclass(frozen=True, slots=True)
class OutputFormats:
    """Output format of an op under ``mixed``, by phase.

    Attributes:
        prefill: Format in prefill.
        decode: Format in decode.
        follows: A plain ``activation`` setting replaces both. If False, only a wider format does.
    """

    prefill: str
    decode: str
    follows: bool = True


# By op, or by op family if it has one. Prefill writes whole sequences, so short-lived values are
# bfp8. In decode an output is a single row and bf16 costs little, except for the large SwiGLU
# output. The residual stream stays bf16: its errors accumulate over the layers.
MIXED_ACTIVATION = MappingProxyType(
    {
        "embedding": OutputFormats("bf16", "bf16", follows=False),
        "rms_norm": OutputFormats("bf16", "bf16", follows=False),
        "li_qkv": OutputFormats("bf16", "bf16"),
        "rope": OutputFormats("bfp8", "bf16"),
        "sdpa": OutputFormats("bfp8", "bf16"),
        "li_o": OutputFormats("bfp8", "bf16"),
        "li_ff1_3": OutputFormats("bfp8", "bf16"),
        "swiglu": OutputFormats("bfp8", "bfp8"),
        "li_ff2": OutputFormats("bf16", "bf16"),
        "experts": OutputFormats("bf16", "bf16"),
        "router": OutputFormats("bf16", "bf16", follows=False),
        "residual_add": OutputFormats("bf16", "bf16"),
        "causal_conv1d": OutputFormats("bf16", "bf16"),
        "gated_delta_rule": OutputFormats("bf16", "bf16"),
        "collective": OutputFormats("bfp8", "bf16"),
        "li_lm_head": OutputFormats("bf16", "bf16", follows=False),
    }
)


def output_format(op: str, setting: str, phase: Phase) -> str:
    """Return the output format of ``op``, a key in ``MIXED_ACTIVATION``.

    ``setting`` is the configured ``activation`` value.
    """
    outputs = MIXED_ACTIVATION[op]
    own = outputs.prefill if phase == "prefill" else outputs.decode
    if setting == MIXED:
        return own
    is_wider = FORMATS[setting].bits > FORMATS[own].bits
    return setting if outputs.follows or is_wider else own


def normalise_key(key: str) -> str:
    """Return a group name from either spelling: ``ff1_3``, ``FF1_FF3``, ``LI_FF1_FF3``."""
    return key.strip().lower().replace("ff1_ff3", "ff1_3")


def normalise_value(value: str) -> str:
    """Return a format or fidelity from either spelling: ``hifi2na``, ``HIFI2_NA``, ``BFP8``,
    ``Q4_0``.
    """
    plain = value.strip().lower().replace("_", "")
    return _SPELLED.get(plain, plain)


def check_setting(key: str, value: str, *, where: str) -> None:
    """Raise ConfigError if the known group ``key`` does not allow ``value``."""
    choices = ALLOWED_FORMATS[key] if key in ALLOWED_FORMATS else tuple(FIDELITIES)
    if value not in choices:
        is_of_files = value in FORMATS and not FORMATS[value].is_offered
        why = ", which only a file holds weights in" if is_of_files else ""
        said = f"{where}: {key} = {value[:80]!r}{why}"
        raise ConfigError(f"{said}; {allowed(choices, None if is_of_files else value)}")


def normalise_model_name(name: str) -> str:
    """Return a canonical model name: ``meta-llama/Llama-3.2-1B-Instruct`` becomes ``llama3.2-1b``.

    Remove the organization, the maker's prefix, tuning suffixes and GGUF format suffixes, and join
    the family with its version. Sizes, families and distillations stay distinct. Matching is then
    exact.
    """
    name = name.rstrip("/").rsplit("/", 1)[-1].lower().replace("_", "-")
    name = name.removeprefix("meta-")
    name = re.sub(r"[-.](q\d(-\d|-k(-[sml])?)?|bf16|fp?16|fp?32)$", "", name)
    name = re.sub(r"-v\d+(\.\d+)*$", "", name)
    while (short := re.sub(r"-(instruct|chat|it|hf|vision)$", "", name)) != name:
        name = short
    return re.sub(r"^([a-z]+)-(?=\d)", r"\1", name)
