"""Vision tower on the reference: its graph in fp32 on dequantized weights, and its files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from torch.fx import GraphModule

from tilewright.compiler.ir.info import INPUT, info
from tilewright.compiler.ir.recipe import WeightRecipe, load_values
from tilewright.compiler.ir.verify import verify_matched
from tilewright.compiler.passes.round_activations import round_activations
from tilewright.compiler.targets.host.tensor_files import save_tensors
from tilewright.compiler.targets.interface.base import Stage
from tilewright.compiler.targets.pipeline import MATCH, PRECISION, fuse
from tilewright.errors import CheckpointError

STAGES: tuple[Stage, ...] = (MATCH, PRECISION, fuse(round_activations))
"""Stages of a tower. It has no state and no logits, so nothing is lowered."""

ENCODER_STAGES: tuple[Stage, ...] = (Stage("match", MATCH.passes, verify_matched), *STAGES[1:])
"""Stages of a tower whose result is not from a linear."""

_WEIGHTS = "weights.safetensors"
_STORED = {"bf16": torch.bfloat16, "fp16": torch.float16}


class ReferenceTower:
    """A tower's graph with its values. ``is_fast``: Use bfloat16 in matmuls and attention."""

    def __init__(
        self,
        graph_module: GraphModule,
        get_values: Callable[[WeightRecipe], Tensor],
        device: str = "cpu",
        *,
        is_fast: bool = False,
    ) -> None:
        self._run, self._device = graph_module, torch.device(device)
        self._is_fast = is_fast and self._device.type == "cuda"
        inputs = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
        recipes = [info(node).recipe for node in inputs if info(node).role != INPUT]
        values = (get_values(recipe) for recipe in recipes if recipe is not None)
        self._values = [value.to(self._device) for value in values]

    @torch.no_grad()
    def __call__(self, *inputs: np.ndarray) -> Tensor:
        """Return the tower's result, float32, on its device."""
        tensors = [torch.from_numpy(values).to(self._device) for values in inputs]
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_fast):
            result: Tensor = self._run(*tensors, *self._values)
        return result.float()


def compile_tower(
    graph_module: GraphModule,
    get_weight: Callable[[str], Tensor],
    device: str = "cpu",
    *,
    is_fast: bool = False,
) -> ReferenceTower:
    """Return a tower from its weights. Formats are applied on the device."""
    own_device = torch.device(device)

    def get(name: str) -> Tensor:
        with own_device:  # for random weights: quantized weights are read on the CPU
            return get_weight(name).to(own_device)

    def get_values(recipe: WeightRecipe) -> Tensor:
        return load_values(recipe, get)

    return ReferenceTower(graph_module, get_values, device, is_fast=is_fast)


def build_tower(
    graph_module: GraphModule, get_weight: Callable[[str], Tensor], folder: Path
) -> None:
    """Write a tower's weights to ``folder``.

    Raises:
        NoRoomError: They cannot be written.
    """
    values = {}
    for index, recipe in enumerate(_recipes(graph_module)):
        result = load_values(recipe, get_weight)
        values[str(index)] = result.to(_STORED.get(str(recipe.format), result.dtype)).contiguous()
    save_tensors(values, folder / _WEIGHTS)


def load_tower(
    graph_module: GraphModule, folder: Path, device: str = "cpu", *, is_fast: bool = False
) -> ReferenceTower:
    """Return a tower of `build_tower`.

    Raises:
        CheckpointError: The file is missing or does not match the graph.
    """
    path = folder / _WEIGHTS
    try:
        values = load_file(path)
        stored = {
            recipe: values[str(index)].float()
            for index, recipe in enumerate(_recipes(graph_module))
        }
    except (OSError, SafetensorError, KeyError) as error:
        raise CheckpointError(f"{path}: not the weights of this tower: {error}") from None
    return ReferenceTower(graph_module, stored.__getitem__, device, is_fast=is_fast)


def _recipes(graph_module: GraphModule) -> list[WeightRecipe]:
    nodes = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    result = [info(node).recipe for node in nodes]
    return list(dict.fromkeys(recipe for recipe in result if recipe is not None))
