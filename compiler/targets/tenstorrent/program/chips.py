"""Values and weights on a mesh's chips. Chips with equal data share a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.recipe import load_dense
from tilewright.compiler.mesh import COLUMNS, ROWS, Mesh
from tilewright.compiler.targets.tenstorrent.program.instructions import TtValue, TtWeight

Chip = tuple[int, int]
"""Row and column in the mesh. The index is 0 along an axis without sharding."""


class PerChip:
    """The shards of a value, by chip."""

    def __init__(self, mesh: Mesh, axes: str) -> None:
        """Create an empty value. ``axes`` are the mesh axes (``r``, ``c``) that shard it."""
        self._rows = mesh.rows if ROWS in axes else 1
        self._columns = mesh.columns if COLUMNS in axes else 1
        self._parts: dict[Chip, Tensor] = {}

    def chips(self) -> Iterator[Chip]:
        """Yield one chip for every distinct shard, by row and column."""
        return ((r, c) for r in range(self._rows) for c in range(self._columns))

    def __getitem__(self, chip: Chip) -> Tensor:
        return self._parts[chip[0] % self._rows, chip[1] % self._columns]

    def __setitem__(self, chip: Chip, part: Tensor) -> None:
        self._parts[chip] = part

    def parts(self) -> dict[Chip, Tensor]:
        """Return every distinct shard, by its first chip."""
        return self._parts


def axes_of(operand: TtValue | TtWeight) -> str:
    """Return the mesh axes that shard an operand."""
    if isinstance(operand, TtWeight):
        return operand.in_over + operand.out_over + operand.expert_over
    return operand.over + operand.partial


def along(mesh: Mesh, axis: str, chip: Chip) -> list[Chip]:
    """Return the chips on the line through ``chip`` along a mesh axis, in order."""
    if axis == ROWS:
        return [(row, chip[1]) for row in range(mesh.rows)]
    return [(chip[0], column) for column in range(mesh.columns)]


def load_weight(weight: TtWeight, mesh: Mesh, get: Callable[[str], Tensor]) -> PerChip:
    """Return a weight as the host packs it for the chips.

    The shards are bfloat16 with values exact in the weight's format. Rotary frequencies are
    float32. The layout is ``[in, out]`` with blocks along out. Tables and vectors keep their
    layout.

    Args:
        get: Returns a tensor from the checkpoint by name.
    """
    dense = load_dense(weight.recipe, get)
    if dense.ndim == 3 and not weight.num_experts:
        dense = dense.squeeze(1)  # a convolution
    if weight.transposed:
        dense = dense.mT
    parts = PerChip(mesh, axes_of(weight))
    for chip in parts.chips():
        part = dense
        if weight.expert_split is not None:
            part = weight.expert_split.take(part, 0, _rank(weight.expert_over, chip))
        if weight.in_split is not None:
            part = weight.in_split.take(part, part.ndim - 2, _rank(weight.in_over, chip))
        if weight.out_split is not None:
            part = weight.out_split.take(part, part.ndim - 1, _rank(weight.out_over, chip))
        exact = get_format(weight.format).round_trip(part).contiguous()
        parts[chip] = exact if weight.format == "fp32" else exact.bfloat16()
    return parts


def check_part(weight: TtWeight, name: str, part: Tensor) -> Tensor:
    """Return a stored shard after a check of its shape and type.

    Raises:
        ValueError: The shape or type differs from the result of :func:`load_weight`.
    """
    is_vector = len(weight.recipe.shape) == 1
    shape: tuple[int, ...] = (weight.rows, weight.columns)
    if is_vector:
        shape = (weight.columns,)
    elif weight.num_experts:
        shape = (weight.num_experts, *shape)
    dtype = torch.float32 if weight.format == "fp32" else torch.bfloat16
    if part.shape != shape or part.dtype != dtype:
        raise ValueError(f"{name} is {part.dtype} {list(part.shape)}, not {dtype} {list(shape)}")
    return part


def _rank(over: str, chip: Chip) -> int:
    return chip[0] if over == ROWS else chip[1]
