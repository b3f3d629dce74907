"""The plan bound to weights, and the walk over it; what an instruction does, an executor says."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.generated import PLAN
from tilewright.compiler.targets.cuda.engine_generator.parts.plan import (
    Attend,
    Embed,
    Gather,
    Instruction,
    Linear,
    Norm,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import Settings

Values = dict[str, Tensor]
"""What a step has computed so far, by name: ``[tokens, width]`` each."""


@dataclass(frozen=True)
class Bound:
    """An instruction with its layer and weights: stacked rows ``[out, in]``, a norm ``[in]``."""

    does: Any
    layer: int
    weight: Tensor | None = None
    norm: Tensor | None = None


def bind(tensors: dict[str, Tensor], settings: Settings, device: torch.device) -> list[Bound]:
    """The plan, layer by layer, with its weights on a device in the model's type."""
    on_device: dict[tuple[str, ...], Tensor] = {}  # a tied table is placed once

    def place(names: tuple[str, ...], dtype: torch.dtype = settings.dtype) -> Tensor:
        parts = [tensors[name] for name in names]
        key = tuple(str(part.data_ptr()) for part in parts)
        if key not in on_device:
            moved = [part.to(device, dtype, copy=True) for part in parts]
            rest = -sum(len(part) for part in moved) % 16  # rows of zeros: kernels read whole tiles
            moved.append(moved[0].new_zeros(rest, *moved[0].shape[1:]))
            on_device[key] = torch.cat(moved)[: -rest or None]
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


class Executor(ABC):
    """Runs the plan on a device and keeps what sequences remember; knows no request ids.

    A sequence is whatever `prefill` returns for a prompt: only its ``length`` is looked at.
    """

    device: torch.device
    settings: Settings
    program: list[Bound]

    def bind(self, tensors: dict[str, Tensor]) -> list[Bound]:
        """The plan with its weights."""
        return bind(tensors, self.settings, self.device)

    @abstractmethod
    def prefill(self, prompts: Sequence[Tensor]) -> tuple[list[Any], Tensor]:
        """A new sequence for each prompt, and the logits of their last tokens ``[B, vocab]``."""

    @abstractmethod
    def decode(self, sequences: Sequence[Any], tokens: Tensor) -> Tensor:
        """One more token ``[B]`` for each sequence: logits ``[B, vocab]``."""

    @abstractmethod
    def release(self, sequence: Any) -> None:
        """Forget a sequence; its memory is free for others."""

    def run(self, program: Sequence[Bound], values: Values, batch: Any) -> Values:
        """The instructions of ``program`` in order; ``batch`` says whose the rows are."""
        for each in program:
            does = each.does
            if isinstance(does, Embed):
                values[does.out] = self.embed(each, batch)
            elif isinstance(does, Linear):
                residual = values[does.out] if does.residual else None
                values[does.out] = self.product(each, values[does.x], residual)
            elif isinstance(does, Norm):
                values[does.out] = self.normed(each, values[does.x])
            elif isinstance(does, Attend):
                values[does.out] = self.attend(each, values[does.qkv], batch)
            elif isinstance(does, Gather):
                values[does.out] = self.gather(values[does.x], batch)
        return values

    @abstractmethod
    def embed(self, each: Bound, batch: Any) -> Tensor:
        """The table's rows of the batch's tokens."""

    @abstractmethod
    def product(self, each: Bound, x: Tensor, residual: Tensor | None) -> Tensor:
        """What `Linear` says."""

    @abstractmethod
    def normed(self, each: Bound, x: Tensor) -> Tensor:
        """What `Norm` says."""

    @abstractmethod
    def attend(self, each: Bound, qkv: Tensor, batch: Any) -> Tensor:
        """What `Attend` says: heads side by side."""

    @abstractmethod
    def gather(self, x: Tensor, batch: Any) -> Tensor:
        """What `Gather` says."""
