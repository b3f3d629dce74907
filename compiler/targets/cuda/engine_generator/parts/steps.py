"""Binds a plan to weights, and runs its instructions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.generated import PLAN
from tilewright.compiler.targets.cuda.engine_generator.parts.plan import (
    Embed,
    Experts,
    Instruction,
    Linear,
    Mixer,
    Norm,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import (
    HybridSettings,
    Settings,
)

Values = dict[str, Tensor]
"""Values of a step by name, each ``[tokens, width]``."""


@dataclass(frozen=True)
class Bound:
    """An instruction with its layer and weights: stacked rows ``[out, in]``, a norm ``[in]``.

    ``ends``: values without later readers.
    """

    does: Any
    layer: int
    weight: Tensor | None = None
    norm: Tensor | None = None
    ends: tuple[str, ...] = ()


def bind(tensors: dict[str, Tensor], settings: Settings, device: torch.device) -> list[Bound]:
    """Bind the plan layer by layer, with weights on a device in the model's type."""
    on_device: dict[tuple[str, ...], Tensor] = {}  # a tied table is stored once
    sizes = {t.data_ptr(): t.numel() for t in tensors.values() if isinstance(t, Tensor)}
    whole = (sum(sizes.values()) + settings.max_positions * settings.head_dim + 1024**2) * 2
    if device.type == "cuda" and whole < 1024**3:  # reserve one block for all weights
        torch.empty(whole, dtype=torch.uint8, device=device)

    def place(names: tuple[str, ...], dtype: torch.dtype = settings.dtype) -> Tensor:
        parts = [tensors[name] for name in names]
        key = tuple(str(part.data_ptr()) for part in parts)
        if key not in on_device:
            count = sum(len(part) for part in parts)
            shape = -(-count // 16) * 16, *parts[0].shape[1:]  # kernels read complete tiles
            whole = torch.empty(shape, dtype=dtype, device=device)
            torch.cat([part.to(device, dtype) for part in parts], out=whole[:count])
            whole[count:].zero_()
            on_device[key] = whole[:count]
        return on_device[key]

    def bound(each: Instruction, layer: int = 0, prefix: str = "") -> Bound:
        if isinstance(each, Embed):
            return Bound(each, layer, place((each.table,)))
        if isinstance(each, Norm):
            return Bound(each, layer, norm=place((prefix + each.weight,), settings.norm_dtype))
        if isinstance(each, Linear):
            weight = place(tuple(prefix + name for name in each.weights))
            norms = [place((prefix + each.norm,), settings.norm_dtype)] if each.norm else [None]
            return Bound(each, layer, weight, *norms)
        return Bound(each, layer)

    program = [bound(each) for each in PLAN.first]
    for layer in range(settings.num_layers):
        steps = settings.steps_of(PLAN, layer)
        program += [bound(each, layer, f"layers.{layer}.") for each in steps]
    return program + [bound(each) for each in PLAN.last]


def with_ends(program: Sequence[Bound]) -> list[Bound]:
    """Return the program with `Bound.ends`."""
    read, found = {"logits"}, list[Bound]()
    for each in reversed(program):
        out, inputs = {each.does.out}, vars(each.does).items()
        names = {value for key, value in inputs if isinstance(value, str) and key != "out"}
        names |= out if each.does.residual else set()
        found.append(replace(each, ends=tuple((names | out) - read)))
        read = (read - out) | names
    return found[::-1]


class Executor:
    """Runs the plan on a device, and stores the sequence state. Knows no request ids.

    ``prefill`` returns a sequence for a prompt, with its ``length``. ``decode`` adds a token to
    each of some sequences, and ``release`` frees them. The method with an instruction's name runs
    the instruction.
    """

    device: torch.device
    settings: Settings
    program: list[Bound]
    prefill: Callable[..., tuple[list[Any], Tensor]]
    decode: Callable[..., Tensor]
    release: Callable[..., None]
    product: Callable[[Bound, Tensor, Tensor | None], Tensor]
    normed: Callable[[Bound, Tensor], Tensor]
    attended: Callable[[Bound, Tensor, Any], Tensor]

    def rehearsals(self) -> Iterable[tuple[int, int]]:
        """Return calls for a new engine: prompts and their length."""
        return ()

    def bind(self, tensors: dict[str, Tensor]) -> list[Bound]:
        """Bind the plan to weights."""
        return bind(tensors, self.settings, self.device)

    def run(self, program: Sequence[Bound], values: Values, batch: Any) -> Values:
        """Run the instructions in order. ``batch`` maps rows to sequences."""
        for each in program:
            values[each.does.out] = getattr(self, each.does.name)(each, values, batch)
            for name in each.ends:
                values.pop(name, None)
        return values

    def linear(self, each: Bound, values: Values, batch: Any) -> Tensor:
        residual = values[each.does.out] if each.does.residual else None
        return self.product(each, values[each.does.x], residual)

    def norm(self, each: Bound, values: Values, batch: Any) -> Tensor:
        return self.normed(each, values[each.does.x])

    def attend(self, each: Bound, values: Values, batch: Any) -> Tensor:
        return self.attended(each, values[each.does.qkv], batch)


@dataclass(frozen=True, kw_only=True)
class BoundMixer(Bound):
    """A bound mixer with tensors by field: experts in the model's type, others in float32."""

    tensors: dict[str, Tensor]


def bind_mixers(
    program: Sequence[Bound], tensors: dict[str, Tensor], settings: Settings, device: torch.device
) -> list[Bound]:
    """Bind a plan with mixers."""
    found: list[Bound] = []
    for each in program:
        if isinstance(each.does, Mixer):
            dtype = settings.dtype if isinstance(each.does, Experts) else torch.float32
            placed = {}
            for field in each.does.weight_fields:
                tensor = tensors[f"layers.{each.layer}.{getattr(each.does, field)}"]
                placed[field] = tensor.to(device, dtype, copy=True).contiguous()
            each = BoundMixer(each.does, each.layer, tensors=placed)
        found.append(each)
    return found


class MixedExecutor(Executor):
    """Binds mixers in addition to the common instructions."""

    settings: HybridSettings

    def bind(self, tensors: dict[str, Tensor]) -> list[Bound]:
        return bind_mixers(super().bind(tensors), tensors, self.settings, self.device)
