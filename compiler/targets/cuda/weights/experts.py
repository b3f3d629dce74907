"""Expert weights: read, converted and packed in groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.ir.recipe import (
    LastTwoTensors,
    ReadsParts,
    WeightRecipe,
    cut,
    load_dense,
)
from tilewright.compiler.targets.cuda.numerics import format_values
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_ROWS, PackedWeight
from tilewright.compiler.targets.cuda.weights.packing import GROUP, hold, scale_of

_TOGETHER = 1 << 24
"""Maximum number of values converted together. Experts are small, and launches are costly."""


def packed_sizes(recipe: WeightRecipe, *, paired: bool) -> tuple[int, int, int]:
    """Return the expert count in a packed weight, and an expert's rows and columns.

    If ``paired``, gate rows and up rows are padded to multiples of 8.
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
) -> PackedWeight:
    """Pack a recipe's expert weights ``[E, out, in]`` on a device.

    Args:
        kind: Storage format.
        paired: As in `hold`.
        check: Called with an expert's values, the common scale and the tensor names. Raises an
            error for unsupported values.
    """
    get = _source(get_weight, device)
    num_experts, num_rows, num_columns = packed_sizes(recipe, paired=paired)
    step = max(1, _TOGETHER // max(1, num_rows * num_columns))
    scale, packed, first = 1.0, None, 0
    while first < num_experts:
        last = min(first + step, num_experts)
        some = _some(recipe, first, last)
        with torch.device(device):  # generated weights are created on this device
            dense = load_dense(some, get).view(some.shape)
        if kind == "bf16" and recipe.format != "bf16":
            dense = format_values(dense, some)
        wanted = scale_of(dense, kind)
        if wanted > scale:  # Rare: a value above 2. Earlier experts are packed again.
            scale, first = wanted, 0
            continue
        if kind != "bf16":
            for index, values in enumerate(dense):
                check(values, scale, _some(some, index, index + 1).names)
        part = hold(
            _below_one_another(dense, paired),
            kind,
            paired=False,
            scale=scale,
            name_of=partial(_name_of, some, -(-num_rows // TILE_ROWS) * TILE_ROWS),
        ).data
        if packed is None:
            data = part.new_empty((len(part) // len(dense) * num_experts, *part.shape[1:]))
            packed = PackedWeight(kind, num_rows, num_columns, data, paired, scale, num_experts)
        rows = len(packed.data) // num_experts
        packed.data[first * rows : last * rows] = part
        first = last
    assert packed is not None
    return dataclasses.replace(packed, scale=scale)


def _source(get_weight: Callable[[str], Tensor], device: torch.device) -> Callable[[str], Tensor]:
    """Return a source of tensor parts if supported, so that a rank reads only its part of an expert
    stack.
    """
    get = on_device(get_weight, device)
    return get if isinstance(get, ReadsParts) else LastTwoTensors(get)


def on_device(get_weight: Callable[[str], Tensor], device: torch.device) -> Callable[[str], Tensor]:
    """Return a source whose tensors, and tensor parts if supported, are on a device."""
    source = _PartsOnDevice if isinstance(get_weight, ReadsParts) else _OnDevice
    return source(get_weight, device)


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


def _some(recipe: WeightRecipe, first: int, last: int) -> WeightRecipe:
    """Return the recipe for some experts, ``[last - first, out, in]``."""
    rows = recipe.shape[-2]
    segments = cut(recipe, first * rows, last * rows)
    return dataclasses.replace(recipe, segments=segments, shape=(last - first, *recipe.shape[1:]))


def _name_of(recipe: WeightRecipe, num_rows: int, index: int) -> str:
    """Return the tensors of the expert at a packed index, with ``num_rows`` packed rows each."""
    expert = index // num_rows
    return ", ".join(_some(recipe, expert, expert + 1).names)


def _below_one_another(dense: Tensor, paired: bool) -> Tensor:
    """Return experts ``[E, out, in]`` as ``[rows, in]``, padded to whole tiles.

    If ``paired``, gate and up rows alternate.
    """
    num_columns = dense.shape[2]
    if paired:
        halves = dense.unflatten(1, (2, -1))
        missing = -halves.shape[2] % GROUP
        halves = torch.nn.functional.pad(halves, (0, 0, 0, missing)) if missing else halves
        dense = halves.unflatten(2, (-1, GROUP)).transpose(1, 2).flatten(1, 3)
    missing = -dense.shape[1] % TILE_ROWS
    dense = torch.nn.functional.pad(dense, (0, 0, 0, missing)) if missing else dense
    return dense.reshape(-1, num_columns)
