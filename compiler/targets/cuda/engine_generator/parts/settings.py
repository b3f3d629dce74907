"""What a model_config says, checked; nothing of it is guessed that has no default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.plan import Instruction, Plan

ALIASES = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "rms_norm_eps": "norm_eps"}
ALIASES |= {"num_attention_heads": "n_heads", "num_key_value_heads": "n_kv_heads"}
ALIASES |= {"rope_theta": "rope_base", "max_position_embeddings": "max_seq_len"}
ALIASES |= {"torch_dtype": "dtype"}
DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
ROPE_STYLES = ("interleaved", "half")
ROPE_SCALINGS = ("default", "linear", "llama3")
ABSENT = ("attention_bias", "mlp_bias", "sliding_window")


class EngineError(ValueError):
    """A configuration, weights or a request that the engine cannot take: what, where, allowed."""


@dataclass(frozen=True)
class Settings:
    """The sizes and switches of a model. ``interleaved``: rotation turns channels (0, 1), (2, 3)
    ...; otherwise (0, D/2), (1, D/2 + 1) ..., as Hugging Face orders them.
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
        """Heads of q, k and v side by side."""
        return self.num_heads + 2 * self.num_kv_heads

    @property
    def scale(self) -> float:
        """What attention scores are multiplied by."""
        return self.head_dim**-0.5

    @property
    def num_cached(self) -> int:
        """Layers that remember keys and values."""
        return self.num_layers

    @property
    def norm_dtype(self) -> torch.dtype:
        """What the weights of norms are held in."""
        return self.dtype

    def steps_of(self, plan: Plan, layer: int) -> tuple[Instruction, ...]:
        """What a layer computes."""
        return plan.layer

    def place_of(self, layer: int) -> int:
        """Its place among the layers that remember the same."""
        return layer

    def frequencies(self) -> Tensor:
        """The angle per position of every pair of channels, float32 ``[head_dim / 2]``."""
        return inverse_frequencies(self, self.head_dim)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every tensor that a file of weights must have, by name."""
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
        """The tensors that the plan names, from those of a file."""
        return tensors

    def centre(self, name: str) -> float:
        """What the values of a tensor lie around."""
        return 1.0 if "norm" in name else 0.0


def read_settings(config: Mapping[str, Any], device: torch.device) -> Settings:
    """The settings of a ``model_config``; fp32 on a CPU, else fp16, or bf16 if it says so.

    Raises:
        EngineError: for a key that is missing or has no possible value.
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
    """The ``rope_scaling`` of a configuration; empty where frequencies stay as they are."""
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
    """The angle per position of each pair of so many channels, scaled as the configuration says."""
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
    """Cosines, then sines, of every position: ``[positions, head_dim]`` in the model's type."""
    speeds = settings.frequencies().to(device)
    turns = speeds.new_empty(settings.max_positions, 2 * len(speeds), dtype=settings.dtype)
    positions = torch.arange(settings.max_positions, dtype=torch.float32, device=device)
    angles = positions[:, None] * speeds
    turns[:, : len(speeds)], turns[:, len(speeds) :] = angles.cos(), angles.sin()
    return turns
