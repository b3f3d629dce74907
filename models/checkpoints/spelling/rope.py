"""Rotary position embedding in config.json and GGUF metadata spelling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tilewright.models.checkpoints.spelling.keys import Keys
from tilewright.models.config import (
    MAX_POSITIONS,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ProportionalScaling,
    RopeConfig,
    Scaling,
    YarnScaling,
)

MAX_THETA = 1e15
MAX_FACTOR = 1e6

_TYPES = {each: each for each in ("default", "linear", "llama3", "longrope", "yarn", "dynamic")}
_TYPES["proportional"] = "proportional"
_TYPES["su"] = "longrope"  # name in the first Phi-3


def hf_rope(
    keys: Keys,
    head_dim: int,
    max_positions: int,
    *,
    partial: bool = False,
    mrope: bool = False,
    layers: str | None = None,
) -> RopeConfig:
    """Return the rotation in config.json.

    It is in ``rope_parameters`` (transformers 5), or in ``rope_theta`` and ``rope_scaling``
    (older).

    Args:
        keys: Keys of config.json.
        head_dim: Channels per head.
        max_positions: Maximum context in tokens.
        partial: Accept ``partial_rotary_factor``.
        mrope: Accept sections for images.
        layers: Layer type, for ``rope_parameters`` with a section per type.

    Raises:
        CheckpointError: A type, key or value is unsupported.
    """
    theta = keys.real("rope_theta", 1.0, MAX_THETA, default=10000.0)
    section, value = _hf_section(keys, layers)
    fraction = keys.real("partial_rotary_factor", 0.0, 1.0, default=1.0)
    rope = keys.section(section, value)
    theta = rope.real("rope_theta", 1.0, MAX_THETA, default=theta)
    holder = rope if rope.get("partial_rotary_factor") is not None else keys
    fraction = rope.real("partial_rotary_factor", 0.0, 1.0, default=fraction)
    is_proportional = (rope.get("rope_type") or rope.get("type")) == "proportional"
    if fraction != 1.0 and not partial and not is_proportional:
        raise holder.error("partial_rotary_factor", fraction, "allowed: 1.0")
    if mrope:
        _check_sections(rope, "mrope_section", (3,))
        rope.boolean("mrope_interleaved", default=True)
    num_rotated = int(head_dim * fraction)
    if num_rotated < 2 or num_rotated % 2:
        tail = f"allowed: an even number of the {head_dim} channels of a head"
        raise holder.error("partial_rotary_factor", fraction, tail)
    if is_proportional:
        factor = rope.real("factor", 1.0, MAX_FACTOR, default=1.0)
        rope.refuse_others()
        return RopeConfig(theta, ProportionalScaling(int(fraction * head_dim // 2), factor))
    scaling = _hf_scaling(keys, rope, num_rotated // 2, max_positions)
    if isinstance(scaling, YarnScaling) and theta <= 1.0:
        raise rope.error("rope_theta", theta, "allowed: above 1")
    growth = _query_growth(rope, max_positions) if isinstance(scaling, YarnScaling) else 0.0
    rope.refuse_others()
    some = num_rotated if fraction != 1.0 else None
    return RopeConfig(theta, scaling, num_rotated=some, query_growth=growth)


def _query_growth(rope: Keys, max_positions: int) -> float:
    """Read Ministral's growth of queries. Its section repeats the maximum context."""
    growth = _or_zero(rope, "llama_4_scaling_beta", 0.0)
    if growth:
        rope.integer("max_position_embeddings", 1, MAX_POSITIONS, default=max_positions)
    return growth


def hf_rope_values(rope: RopeConfig, head_dim: int) -> dict[str, Any]:
    """Return config.json's ``rope_parameters`` for this rotation, without frequency factors."""
    found: dict[str, Any] = {"rope_type": "default", "rope_theta": rope.theta}
    if rope.num_rotated is not None:
        found["partial_rotary_factor"] = rope.num_rotated / head_dim
    scaling = rope.scaling
    if isinstance(scaling, LinearScaling):
        found |= {"rope_type": "linear", "factor": scaling.factor}
    elif isinstance(scaling, Llama3Scaling):
        found |= {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
            "original_max_position_embeddings": scaling.original_max_positions,
        }
    elif isinstance(scaling, LongRopeScaling):
        found |= {
            "rope_type": "longrope",
            "short_factor": list(scaling.short_factors),
            "long_factor": list(scaling.long_factors),
            "original_max_position_embeddings": scaling.original_max_positions,
            "attention_factor": scaling.attention_factor,
        }
    elif isinstance(scaling, ProportionalScaling):
        fraction = 2 * scaling.num_turned / head_dim
        found.update(
            rope_type="proportional", partial_rotary_factor=fraction, factor=scaling.factor
        )
    elif isinstance(scaling, YarnScaling):
        found |= {
            "rope_type": "yarn",
            "factor": scaling.factor,
            "original_max_position_embeddings": scaling.original_max_positions,
            "attention_factor": scaling.attention_factor,
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
        }
    if rope.query_growth:
        found["llama_4_scaling_beta"] = rope.query_growth
    return found


def _check_sections(keys: Keys, key: str, counts: tuple[int, ...]) -> None:
    """Check the numbers of pairs for each image coordinate.

    In text, all coordinates equal the position, so the numbers have no effect.
    """
    value = keys.get(key)
    if value is None:
        return
    found: Any = value.tolist() if hasattr(value, "tolist") else value
    is_list = isinstance(found, list) and len(found) in counts
    if not is_list or any(type(each) is not int or each < 0 for each in found):
        tail = f"allowed: {' or '.join(map(str, counts))} whole numbers from 0"
        raise keys.error(key, found, tail)


def _hf_section(keys: Keys, layers: str | None) -> tuple[str, Mapping[str, object]]:
    """Return the object with the rotation, and its name in messages."""
    section, value = "rope_parameters", keys.get("rope_parameters")
    older = keys.get("rope_scaling")
    if value is None:
        section, value = "rope_scaling", older
    elif older is not None and older != value:
        raise keys.error("rope_scaling", older, "allowed: null, or the same as rope_parameters")
    if isinstance(value, Mapping) and layers is not None and layers in value:
        section, value = f"{section}.{layers}", value[layers]
    if value is not None and not isinstance(value, Mapping):
        raise keys.error(section, value, "allowed: null or an object")
    return section, value or {}


def _hf_scaling(keys: Keys, rope: Keys, num_pairs: int, max_positions: int) -> Scaling | None:
    old_name = rope.get("type")
    type_key = "rope_type" if rope.get("rope_type") is not None else "type"
    if old_name is not None and type_key != "type":
        rope.choice("type", tuple(_TYPES), default="default")
    kind = _TYPES[rope.choice(type_key, tuple(_TYPES), default="default")]
    if kind == "linear":
        return LinearScaling(rope.real("factor", 1.0, MAX_FACTOR))
    if kind == "llama3":
        return _llama3_scaling(rope, max_positions)
    if kind == "longrope":
        return _longrope_scaling(keys, rope, num_pairs, max_positions)
    if kind == "yarn":
        return _yarn_scaling(rope, max_positions)
    if kind == "dynamic":  # no effect up to the model's maximum context
        rope.real("factor", 1.0, MAX_FACTOR)
        rope.integer("original_max_position_embeddings", 1, MAX_POSITIONS, default=max_positions)
    return None


def _llama3_scaling(rope: Keys, max_positions: int) -> Llama3Scaling:
    low = rope.real("low_freq_factor", 0.0, MAX_FACTOR)
    high = rope.real("high_freq_factor", 0.0, MAX_FACTOR)
    if high <= low:
        raise rope.error("high_freq_factor", high, f"allowed: above low_freq_factor, {low:g}")
    key = "original_max_position_embeddings"
    return Llama3Scaling(
        factor=rope.real("factor", 1.0, MAX_FACTOR),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=rope.integer(key, 1, MAX_POSITIONS, default=max_positions),
    )


def _longrope_scaling(
    keys: Keys, rope: Keys, num_pairs: int, max_positions: int
) -> LongRopeScaling:
    """Read LongRoPE. Phi-3's outer original length takes precedence over the inner value."""
    key = "original_max_position_embeddings"
    original = rope.integer(key, 2, MAX_POSITIONS, default=max_positions)
    original = keys.integer(key, 2, MAX_POSITIONS, default=original)
    factor = rope.real("factor", 0.0, MAX_FACTOR, default=max_positions / original)
    given = rope.optional_real("attention_factor", 0.0, MAX_FACTOR)
    return LongRopeScaling(
        short_factors=rope.reals("short_factor", num_pairs),
        long_factors=rope.reals("long_factor", num_pairs),
        original_max_positions=original,
        attention_factor=longrope_attention_factor(factor, original) if given is None else given,
    )


def _yarn_scaling(rope: Keys, max_positions: int) -> YarnScaling:
    """Read YaRN. 0 and null select a default, as in transformers."""
    key = "original_max_position_embeddings"
    original = rope.integer(key, 2, MAX_POSITIONS, default=max_positions)
    implied = max(1.0, max_positions / original)
    factor = rope.real("factor", 1.0, MAX_FACTOR, default=implied)
    fast, slow = _or_zero(rope, "beta_fast", 32.0), _or_zero(rope, "beta_slow", 1.0)
    if fast <= slow:
        raise rope.error("beta_fast", fast, f"allowed: above beta_slow, {slow:g}")
    scale, whole = _or_zero(rope, "mscale", 0.0), _or_zero(rope, "mscale_all_dim", 0.0)
    implied = yarn_attention_factor(factor)
    if scale and whole:
        implied = yarn_attention_factor(factor, scale) / yarn_attention_factor(factor, whole)
    return YarnScaling(
        factor=factor,
        original_max_positions=original,
        attention_factor=rope.real("attention_factor", 0.0, MAX_FACTOR, default=implied),
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.boolean("truncate", default=True),
    )


def _or_zero(rope: Keys, key: str, default: float) -> float:
    """Return a positive number. 0 and null select the default."""
    value = rope.get(key)
    is_zero = isinstance(value, int | float) and not isinstance(value, bool) and value == 0
    return default if is_zero else rope.real(key, 0.0, MAX_FACTOR, default=default)


def yarn_attention_factor(factor: float, scale: float = 1.0) -> float:
    """Return YaRN's factor for cosines and sines, if the context is ``factor`` times as long."""
    return 1.0 if factor <= 1.0 else 0.1 * scale * math.log(factor) + 1.0


def longrope_attention_factor(factor: float, original_max_positions: int) -> float:
    """Return LongRoPE's factor for cosines and sines, if the context is ``factor`` times as
    long.
    """
    if factor <= 1.0:
        return 1.0
    return math.sqrt(1 + math.log(factor) / math.log(original_max_positions))


def gguf_rope(
    keys: Keys, head_dim: int, *, partial: bool = False, mrope: bool = False
) -> RopeConfig:
    """Return the rotation in GGUF metadata. See `hf_rope` for ``partial`` and ``mrope``.

    Frequency factors are tensors. The file's reader adds them.

    Raises:
        CheckpointError: A scaling or a rotated channel count is unsupported.
    """
    key = "rope.dimension_count"
    num_rotated = keys.integer(key, 2, head_dim, default=head_dim)
    if num_rotated != head_dim and (not partial or num_rotated % 2):
        tail = f"allowed: {'an even number up to ' if partial else ''}the head size, {head_dim}"
        raise keys.error(key, num_rotated, tail)
    if mrope:
        _check_sections(keys, "rope.dimension_sections", (3, 4))
    factor = keys.real("rope.scale_linear", 0.0, MAX_FACTOR, default=1.0)  # older name
    factor = keys.real("rope.scaling.factor", 0.0, MAX_FACTOR, default=factor)
    kinds = ("none", "linear", "longrope", "yarn")
    kind = keys.choice("rope.scaling.type", kinds, default="linear")
    theta = keys.real("rope.freq_base", 1.0, MAX_THETA, default=10000.0)
    scaling: Scaling | None = None
    if kind == "yarn":
        scaling = _gguf_yarn(keys, factor, theta)
    elif kind == "linear" and factor != 1.0:
        scaling = LinearScaling(factor)
    return RopeConfig(
        theta=theta,
        scaling=scaling,
        num_rotated=num_rotated if num_rotated != head_dim else None,
    )


def _gguf_yarn(keys: Keys, factor: float, theta: float) -> YarnScaling:
    """Read YaRN with llama.cpp's arithmetic: borders are whole pairs."""
    if factor < 1.0 or theta <= 1.0:
        raise keys.error("rope.scaling.factor", factor, "allowed: 1 and above, and a base above 1")
    key = "rope.scaling.yarn_log_multiplier"
    if keys.get(key) not in (None, 0.0):
        raise keys.error(key, keys.get(key), "allowed: 0")
    context = keys.integer("context_length", 1, MAX_POSITIONS)
    fast = keys.real("rope.scaling.yarn_beta_fast", 0.0, MAX_FACTOR, default=32.0)
    slow = keys.real("rope.scaling.yarn_beta_slow", 0.0, MAX_FACTOR, default=1.0)
    if fast <= slow:
        raise keys.error("rope.scaling.yarn_beta_fast", fast, f"allowed: above {slow:g}")
    given = keys.real("rope.scaling.attn_factor", 0.0, MAX_FACTOR, default=1.0)
    return YarnScaling(
        factor=factor,
        original_max_positions=keys.integer(
            "rope.scaling.original_context_length", 2, MAX_POSITIONS, default=context
        ),
        attention_factor=given * yarn_attention_factor(factor),
        beta_fast=fast,
        beta_slow=slow,
    )


def longer_context(rope: RopeConfig, max_positions: int) -> int:
    """Return the model's maximum context, including YaRN scaling.

    Queries that grow limit it to the original context.
    """
    scaling = rope.scaling
    if not isinstance(scaling, YarnScaling):
        return max_positions
    if rope.query_growth:
        return min(max_positions, scaling.original_max_positions)
    return max(max_positions, min(MAX_POSITIONS, scaling.max_positions))


def gguf_longrope(
    keys: Keys, factors: tuple[tuple[float, ...], tuple[float, ...]], max_positions: int
) -> LongRopeScaling:
    """Return the scaling for a GGUF file with short and long ``factors``.

    Raises:
        CheckpointError: A key is missing or invalid.
    """
    short, long = factors
    original = keys.integer("rope.scaling.original_context_length", 2, MAX_POSITIONS)
    implied = longrope_attention_factor(max_positions / original, original)
    return LongRopeScaling(
        short_factors=short,
        long_factors=long,
        original_max_positions=original,
        attention_factor=keys.real("rope.scaling.attn_factor", 0.0, MAX_FACTOR, default=implied),
    )
