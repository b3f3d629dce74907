"""Random experts of a layer on a GPU, as they are held, for the scripts that measure them."""

from __future__ import annotations

import torch

from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.targets.cuda.weights.experts import place_experts
from tilewright.compiler.targets.cuda.weights.packed_weight import HeldWeight


def random_experts(
    count: int, size: tuple[int, int], kind: str = "bf16", *, paired: bool
) -> HeldWeight:
    """So many experts of ``size`` rows and columns each, in a format; ``paired``: gate and up."""
    dense = torch.randn(count, *size, device="cuda", dtype=torch.bfloat16) / size[1] ** 0.5
    recipe = WeightRecipe((Segment("w", count * size[0]),), (count, *size), kind)
    device = torch.device("cuda")
    return place_experts(
        recipe, kind, lambda name: dense, device, paired=paired, check=lambda *_: None
    )
