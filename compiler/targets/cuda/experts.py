"""The weights of experts: read, converted and placed one expert at a time."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.ir.recipe import ReadsParts, WeightRecipe, cut, load_dense
from tilewright.compiler.targets.cuda.held import HeldWeight
from tilewright.compiler.targets.cuda.numerics import format_values
from tilewright.compiler.targets.cuda.packing import GROUP, hold, scale_of


def held_sizes(recipe: WeightRecipe, *, paired: bool) -> tuple[int, int, int]:
    """How many experts a weight is held for, and the rows and columns of each.

    Halves of experts that are no multiple of 8 rows are held with rows of zeros behind them.
    """
    *experts, num_rows, num_columns = recipe.shape
    if experts and paired:
        num_rows = 2 * (-(-num_rows // (2 * GROUP)) * GROUP)
    return (experts or [1])[0], num_rows, num_columns


def place_experts(
    recipe: WeightRecipe,
    kind: str,
    get_weight: Callable[[str], Tensor],
    device: torch.device,
    *,
    paired: bool,
    check: Callable[[Tensor, float, Sequence[str]], None],
) -> HeldWeight:
    """The weight ``[E, out, in]`` of a recipe, held on a device; ``paired`` as in `hold`.

    ``check`` is given every expert's values, the scale that all of them are held with, and the
    names of the tensors that they come from.
    """
    get = _source(get_weight, device)
    num_experts, num_rows, num_columns = held_sizes(recipe, paired=paired)
    scale, held, index = 1.0, None, 0
    while index < num_experts:
        one = _one(recipe, index)
        with torch.device(device):  # where weights that are made up are made
            dense = load_dense(one, get)
        if kind == "bf16" and recipe.format != "bf16":
            dense = format_values(dense, one)
        if paired:
            dense = _padded_halves(dense)
        wanted = scale_of(dense, kind)
        if wanted > scale:  # rare: a value of 2 or more; those before are held once more
            scale, index = wanted, 0
            continue
        check(dense, scale, one.names)
        part = hold(dense, kind, paired=paired, scale=scale)
        if held is None or index == 0:
            data = part.data.new_empty((num_experts, *part.data.shape))
            held = HeldWeight(
                kind, num_rows, num_columns, data.flatten(0, 1), paired, scale, num_experts
            )
        held.data.view(num_experts, *part.data.shape)[index] = part.data
        index += 1
    assert held is not None
    return held


def _source(get_weight: Callable[[str], Tensor], device: torch.device) -> Callable[[str], Tensor]:
    """Parts of tensors where the source reads such: a rank keeps little of a stack of experts."""
    if isinstance(get_weight, ReadsParts):
        return on_device(get_weight, device)
    return _Last(get_weight, device)


def on_device(get_weight: Callable[[str], Tensor], device: torch.device) -> Callable[[str], Tensor]:
    """A source whose tensors, and parts of tensors where it reads these, are on a device."""
    kind = _PartsOnDevice if isinstance(get_weight, ReadsParts) else _OnDevice
    return kind(get_weight, device)


class _OnDevice:
    def __init__(self, get_weight: Any, device: torch.device) -> None:
        self._get_weight, self._device = get_weight, device

    def __call__(self, name: str) -> Tensor:
        found: Tensor = self._get_weight(name).to(self._device)
        return found


class _PartsOnDevice(_OnDevice):
    def part(
        self, name: str, rows: tuple[int, int] | None, columns: tuple[int, int] | None
    ) -> Tensor:
        found: Tensor = self._get_weight.part(name, rows, columns).to(self._device)
        return found


class _Last:
    """A source of tensors that keeps the last one on the device: all experts may be its rows."""

    def __init__(self, get_weight: Callable[[str], Tensor], device: torch.device) -> None:
        self._get_weight, self._device = get_weight, device
        self._name, self._tensor = "", torch.empty(0)

    def __call__(self, name: str) -> Tensor:
        if name != self._name:
            self._tensor = torch.empty(0)  # the one before goes first
            self._tensor = self._get_weight(name).to(self._device)
            self._name = name
        return self._tensor


def _one(recipe: WeightRecipe, index: int) -> WeightRecipe:
    """``[out, in]`` of one expert."""
    rows = recipe.shape[-2]
    segments = cut(recipe, index * rows, (index + 1) * rows)
    return dataclasses.replace(recipe, segments=segments, shape=recipe.shape[1:])


def _padded_halves(dense: Tensor) -> Tensor:
    """Gate and up with rows of zeros behind each, up to a multiple of 8."""
    missing = -(dense.shape[0] // 2) % GROUP
    if not missing:
        return dense
    halves = dense.view(2, -1, dense.shape[1])
    return torch.nn.functional.pad(halves, (0, 0, 0, missing)).flatten(0, 1)
