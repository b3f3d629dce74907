"""The walk over plans with mixers, whatever they run on, and what they read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.engine_generator.parts.hybrid_settings import HybridSettings
from tilewright.compiler.targets.cuda.engine_generator.parts.mixer_plan import (
    Experts,
    Mixer,
)
from tilewright.compiler.targets.cuda.engine_generator.parts.settings import Settings
from tilewright.compiler.targets.cuda.engine_generator.parts.steps import Bound, Executor


@dataclass(frozen=True, kw_only=True)
class BoundMixer(Bound):
    """With its tensors by the names of fields: experts in the model's type, all else float32."""

    tensors: dict[str, Tensor]


def bind_mixers(
    program: Sequence[Bound], tensors: dict[str, Tensor], settings: Settings, device: torch.device
) -> list[Bound]:
    """A bound plan whose mixers have their weights, too."""
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
    """Binds mixers besides the instructions that all plans have."""

    settings: HybridSettings

    def bind(self, tensors: dict[str, Tensor]) -> list[Bound]:
        return bind_mixers(super().bind(tensors), tensors, self.settings, self.device)
