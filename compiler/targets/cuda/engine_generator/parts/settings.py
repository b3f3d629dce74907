"""The checked model_config. A missing key without a default is an error."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.plan import (
    HybridPlan,
    Instruction,
    Plan,
)

ALIASES = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "rms_norm_eps": "norm_eps"}
ALIASES |= {"num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads"}
ALIASES |= {"rope_theta": "rope_base", "max_position_embeddings": "max_seq_len"}
ALIASES |= {"torch_dtype": "dtype"}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
ROPE_STYLES = ("interleaved", "half")
ROPE_SCALINGS = ("default", "linear", "llama3")
ABSENT = ("attention_bias", "mlp_bias", "sliding_window")


class EngineError(ValueError):
    """An invalid configuration, weight or request, with its place and the allowed values."""


@dataclass(frozen=True)
class Settings:
    """Sizes and switches of a model.

    ``interleaved``: rotation pairs are channels (0, 1), (2, 3) ... Otherwise the pairs are
    (0, D/2), (1, D/2 + 1) ..., as in Hugging Face checkpoints.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    eps: float
    theta: float
    scaling: tuple[tuple[str, Any], ...]
    interleaved: bool
    dtype: torch.dtype

    @property
    def qkv_heads(self) -> int:
        """Heads of q, k and v together."""
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def scale(self) -> float:
        """Attention score factor."""
        return self.head_dim**-0.5

    @property
    def num_cached(self) -> int:
        """Layers with keys and values."""
        return self.num_layers

    @property
    def norm_dtype(self) -> torch.dtype:
        """Type for norm weights."""
        return self.dtype

    def steps_of(self, plan: Plan, layer: int) -> tuple[Instruction, ...]:
        """Return a layer's instructions."""
        return plan.layer

    def place_of(self, layer: int) -> int:
        """Return the number of a layer among layers of its kind."""
        return layer

    def frequencies(self) -> Tensor:
        """Return the angle per position for channel pairs, float32 ``[head_dim / 2]``."""
        return inverse_frequencies(self, self.head_dim)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every tensor's required shape in a file, by name."""
        found = self._shapes_outside()
        hidden, inner = self.hidden_size, self.intermediate_size
        layer = {
            **self._shapes_of_attention(self.num_heads),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        for index in range(self.num_layers):
            found |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        return found

    def _shapes_outside(self) -> dict[str, tuple[int, ...]]:
        table, norm = (self.vocab_size, self.hidden_size), (self.hidden_size,)
        return {"embed_tokens.weight": table, "lm_head.weight": table, "norm.weight": norm}

    def _shapes_of_attention(self, query_heads: int) -> dict[str, tuple[int, ...]]:
        hidden, width = self.hidden_size, self.num_heads * self.head_dim
        kv = self.num_kv_heads * self.head_dim
        return {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (query_heads * self.head_dim, hidden),
            "self_attn.k_proj.weight": (kv, hidden),
            "self_attn.v_proj.weight": (kv, hidden),
            "self_attn.o_proj.weight": (hidden, width),
        }

    def prepared(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the plan's tensors from a file's tensors."""
        return tensors

    def centre(self, name: str) -> float:
        """Return the mean of a tensor's random values."""
        return 1.0 if "norm" in name else 0.0


def read_settings(config: Mapping[str, Any], device: torch.device) -> Settings:
    """Check a ``model_config``: fp32 on a CPU, else fp16, or bf16 if requested.

    Raises:
        EngineError: for a missing key, or an invalid value.
    """
    if not isinstance(config, Mapping):
        raise EngineError(f"model_config {str(config)[:40]!r}; allowed: a mapping of keys")
    hidden, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    head_dim = _count(config, "head_dim", hidden // heads if hidden % heads == 0 else None)
    kv_heads = _count(config, "num_key_value_heads", heads)
    if heads % kv_heads:
        raise EngineError(
            f"model_config: num_attention_heads {heads} and num_key_value_heads {kv_heads}; "
            "allowed: a multiple of the other"
        )
    if head_dim % 2:
        raise EngineError(f"model_config: head_dim {head_dim}; allowed: an even number")
    style = _one_of("rope_style", config.get("rope_style") or "interleaved", ROPE_STYLES)
    name = str(_value(config, "torch_dtype", "float16")).removeprefix("torch.")
    dtype = DTYPES[_one_of("torch_dtype", name, tuple(DTYPES))]
    if device.type == "cpu" or dtype != torch.bfloat16:
        dtype = torch.float32 if device.type == "cpu" else torch.float16
    for key in filter(config.get, ABSENT):
        raise EngineError(f"model_config: {key} {config[key]!r}; allowed: none")
    _one_of("hidden_act", config.get("hidden_act") or "silu", ("silu", "swish"))
    scaling = _read_scaling(rope := config.get("rope_scaling") or config.get("rope_parameters"))
    return Settings(
        vocab_size=_count(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_count(config, "intermediate_size"),
        num_layers=_count(config, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=_count(config, "max_position_embeddings"),
        eps=_number(config, "rms_norm_eps"),
        theta=_number(config, "rope_theta", (rope or {}).get("rope_theta", 10000.0)),
        scaling=scaling,
        interleaved=style == "interleaved",
        dtype=dtype,
    )


def _value(config: Mapping[str, Any], key: str, default: Any = None) -> Any:
    names = (key, *([ALIASES[key]] if key in ALIASES else []))
    found = next((config[name] for name in names if config.get(name) is not None), default)
    if found is None:
        others = "".join(f" (or {name!r})" for name in names[1:])
        raise EngineError(f"model_config has no {key!r}{others}")
    return found


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    found = _value(config, key, default)
    if isinstance(found, bool) or not isinstance(found, int) or found < 1:
        raise EngineError(f"model_config: {key} {found!r}; allowed: a whole number, 1 or more")
    return found


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    found = _value(config, key, default)
    if type(found) not in (int, float) or not math.isfinite(found) or found <= 0:
        raise EngineError(f"model_config: {key} {found!r}; allowed: a number above 0")
    return float(found)


def _one_of(key: str, found: Any, known: tuple[str, ...]) -> str:
    if found not in known:
        raise EngineError(f"model_config: {key} {found!r}; allowed: {', '.join(known)}")
    return str(found)


def _read_scaling(given: Any) -> tuple[tuple[str, Any], ...]:
    """Return a configuration's ``rope_scaling``, empty without scaling."""
    if given is None:
        return ()
    if not isinstance(given, Mapping):
        raise EngineError(f"model_config: rope_scaling {given!r}; allowed: null or a mapping")
    kind = given.get("rope_type", given.get("type"))
    kind = _one_of("rope_scaling's rope_type", kind, ROPE_SCALINGS)
    keys: tuple[str, ...] = ("factor",) if kind != "default" else ()
    if kind == "llama3":
        keys += ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    numbers = [(key, _number(given, key)) for key in keys]
    return (("rope_type", kind), *numbers) if numbers else ()


def inverse_frequencies(settings: Settings, num_channels: int) -> Tensor:
    """Return the scaled angle per position for pairs of ``num_channels`` channels."""
    channels = torch.arange(0, num_channels, 2, dtype=torch.float32)
    found = 1.0 / settings.theta ** (channels / num_channels)
    if not (scaling := dict(settings.scaling)):
        return found
    slow = found / scaling["factor"]
    if scaling["rope_type"] == "linear":
        return slow
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * found / (2 * math.pi)
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return slow * (1 - share) + found * share


def turn_table(settings: Settings, device: torch.device) -> Tensor:
    """Return cosines and sines of every position, ``[positions, head_dim]`` in the model's type."""
    speeds = settings.frequencies().to(device)
    turns = speeds.new_empty(settings.max_positions, 2 * len(speeds), dtype=settings.dtype)
    positions = torch.arange(settings.max_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * speeds
    turns[:, : len(speeds)], turns[:, len(speeds) :] = angles.cos(), angles.sin()
    return turns


LENGTH_EPS = 1e-6
"""Epsilon for the lengths of q and k in linear attention."""

LINEAR = "linear_attention"
LAYER_TYPES = (LINEAR, "full_attention")


@dataclass(frozen=True)
class HybridSettings(Settings):
    """Settings with linear attention and experts.

    ``num_turned``: rotated channels per head. ``linear_layers``: layers with linear attention. It
    has ``value_heads`` heads, and ``key_heads`` distinct keys.
    """

    num_turned: int
    linear_layers: tuple[bool, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    num_experts: int
    num_chosen: int
    expert_size: int
    shared_size: int

    @property
    def mixed_width(self) -> int:
        """Channels of q, k and v in the linear attention convolution."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def num_linear(self) -> int:
        """Layers with linear attention."""
        return sum(self.linear_layers)

    @property
    def num_cached(self) -> int:
        return self.num_layers - self.num_linear

    @property
    def norm_dtype(self) -> torch.dtype:
        return torch.float32

    def steps_of(self, plan: Plan, layer: int) -> tuple[Instruction, ...]:
        assert isinstance(plan, HybridPlan)
        return plan.linear_layer if self.linear_layers[layer] else plan.layer

    def place_of(self, layer: int) -> int:
        return self.linear_layers[:layer].count(self.linear_layers[layer])

    def frequencies(self) -> Tensor:
        """Return angles, 0 for unrotated pairs. `prepared` orders the pairs."""
        found = inverse_frequencies(self, self.num_turned)
        return F.pad(found, (0, self.head_dim // 2 - len(found)))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        found = self._shapes_outside()
        for index, is_linear in enumerate(self.linear_layers):
            layer = self._shapes_of_experts()
            layer |= self._shapes_of_linear() if is_linear else self._shapes_of_gated()
            found |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
        return found

    def _shapes_of_gated(self) -> dict[str, tuple[int, ...]]:
        return {
            **self._shapes_of_attention(2 * self.num_heads),
            "self_attn.q_norm.weight": (self.head_dim,),
            "self_attn.k_norm.weight": (self.head_dim,),
        }

    def _shapes_of_linear(self) -> dict[str, tuple[int, ...]]:
        hidden, heads = self.hidden_size, self.value_heads
        width = heads * self.value_dim
        return {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "linear_attn.in_proj_qkv.weight": (self.mixed_width, hidden),
            "linear_attn.in_proj_z.weight": (width, hidden),
            "linear_attn.in_proj_a.weight": (heads, hidden),
            "linear_attn.in_proj_b.weight": (heads, hidden),
            "linear_attn.conv1d.weight": (self.mixed_width, 1, self.taps),
            "linear_attn.A_log": (heads,),
            "linear_attn.dt_bias": (heads,),
            "linear_attn.norm.weight": (self.value_dim,),
            "linear_attn.out_proj.weight": (hidden, width),
        }

    def _shapes_of_experts(self) -> dict[str, tuple[int, ...]]:
        hidden, count = self.hidden_size, self.num_experts
        inner, shared = self.expert_size, self.shared_size
        return {
            "mlp.gate.weight": (count, hidden),
            "mlp.shared_expert_gate.weight": (1, hidden),
            "mlp.experts.gate_up_proj": (count, 2 * inner, hidden),
            "mlp.experts.down_proj": (count, hidden, inner),
            "mlp.shared_expert.gate_proj.weight": (shared, hidden),
            "mlp.shared_expert.up_proj.weight": (shared, hidden),
            "mlp.shared_expert.down_proj.weight": (hidden, shared),
        }

    def prepared(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert a file's tensors: per head, a query's rows precede its gate's. Norms lack 1.

        Rotation pairs are in the first ``num_turned`` channels. The channels of q and k are
        reordered, so that pairs are half a head apart. Scores are equal.
        """
        found = dict(tensors)
        for name, tensor in tensors.items():
            if name.endswith("norm.weight") and self.centre(name) == 0:
                found[name] = tensor.float() + 1
        order = self._channels()
        for layer, is_linear in enumerate(self.linear_layers):
            at = f"layers.{layer}.self_attn."
            if is_linear:
                continue
            pairs = tensors[at + "q_proj.weight"].view(self.num_heads, 2, self.head_dim, -1)
            keys = tensors[at + "k_proj.weight"].view(self.num_kv_heads, self.head_dim, -1)
            found[at + "q_proj.weight"] = pairs[:, 0, order].flatten(0, 1)
            found[at + "gate_proj.weight"] = pairs[:, 1].flatten(0, 1)
            found[at + "k_proj.weight"] = keys[:, order].flatten(0, 1)
            for name in (at + "q_norm.weight", at + "k_norm.weight"):
                found[name] = found[name][order]
        return found

    def _channels(self) -> Tensor:
        """Return a head's channels: in each half, rotated channels first."""
        channels = torch.arange(self.head_dim)
        turned, rest = channels[: self.num_turned].chunk(2), channels[self.num_turned :]
        middle = len(rest) // 2
        return torch.cat((turned[0], rest[:middle], turned[1], rest[middle:]))

    def centre(self, name: str) -> float:
        return 1.0 if name.endswith("linear_attn.norm.weight") else 0.0


def read_hybrid_settings(config: Mapping[str, Any], device: torch.device) -> HybridSettings:
    """Check a ``model_config`` with experts and linear attention.

    Raises:
        EngineError: for a missing key, or an invalid value.
    """
    plain = read_settings(config, device)
    names = "linear_num_key_heads", "linear_num_value_heads", "num_experts", "num_experts_per_tok"
    key_heads, value_heads, experts, chosen = (_count(config, name) for name in names)
    if value_heads % key_heads:
        said = f"allowed: a multiple of {names[0]} {key_heads}"
        raise EngineError(f"model_config: {names[1]} {value_heads}; {said}")
    if chosen > experts:
        raise EngineError(f"model_config: {names[3]} {chosen}; allowed: up to {names[2]} {experts}")
    if plain.interleaved:
        raise EngineError("model_config: rope_style 'interleaved'; allowed for this model: half")
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or len(kinds) != plain.num_layers or set(kinds) - {*LAYER_TYPES}:
        said = " or ".join(LAYER_TYPES)
        raise EngineError(f"model_config: layer_types; allowed: {plain.num_layers} times {said}")
    turned = plain.head_dim * _number(config, "partial_rotary_factor", 1.0)
    if not 0 < turned <= plain.head_dim or turned % 2:
        raise EngineError(
            f"model_config: partial_rotary_factor turns {turned} of {plain.head_dim} channels; "
            "allowed: an even number of them"
        )
    return HybridSettings(
        **{each.name: getattr(plain, each.name) for each in fields(plain)},
        num_turned=int(turned),
        linear_layers=tuple(kind == LINEAR for kind in kinds),
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=_count(config, "linear_key_head_dim"),
        value_dim=_count(config, "linear_value_head_dim"),
        taps=_count(config, "linear_conv_kernel_dim", 4),
        num_experts=experts,
        num_chosen=chosen,
        expert_size=_count(config, "moe_intermediate_size"),
        shared_size=_count(config, "shared_expert_intermediate_size"),
    )
