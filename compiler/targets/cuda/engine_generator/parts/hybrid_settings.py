"""The configuration of a mixture of experts with layers of linear attention, and its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.mixer_plan import HybridPlan
from tilewright.compiler.targets.cuda.engine_generator.parts.plan import Instruction, Plan
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import (
    EngineError,
    Settings,
    _count,
    _number,
    inverse_frequencies,
    read_settings,
)

LENGTH_EPS = 1e-6
"""Of the lengths of q and k of linear attention."""

LINEAR = "linear_attention"
LAYER_TYPES = (LINEAR, "full_attention")


@dataclass(frozen=True)
class HybridSettings(Settings):
    """``num_turned``: channels of a head that rotation turns. ``linear_layers``: which layers have
    linear attention, of ``value_heads`` heads, ``key_heads`` of which have keys of their own.
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
        """Channels of q, k and v of linear attention, which the convolution passes over."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def num_linear(self) -> int:
        """Layers of linear attention."""
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
        """Pairs that do not turn have an angle of 0: see `prepared` for which these are."""
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
        """A file has a query's rows above its gate's, head by head, and norms' weights less one.

        Rotation turns pairs of the first ``num_turned`` channels. The channels of q and k are put
        in an order in which pairs are half a head apart, as where all turn: scores are the same.
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
        """Channels of a head: those that turn and those that do not, half of each in a half."""
        channels = torch.arange(self.head_dim)
        turned, rest = channels[: self.num_turned].chunk(2), channels[self.num_turned :]
        middle = len(rest) // 2
        return torch.cat((turned[0], rest[:middle], turned[1], rest[middle:]))

    def centre(self, name: str) -> float:
        return 1.0 if name.endswith("linear_attn.norm.weight") else 0.0


def read_hybrid_settings(config: Mapping[str, Any], device: torch.device) -> HybridSettings:
    """The settings of a ``model_config`` with experts and layers of linear attention.

    Raises:
        EngineError: for a key that is missing or has no possible value.
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
