"""Views for stacked or separate tensors under the names required by an architecture.

Experts have three storage forms, defined here. Files are read elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.base import check_shape

if TYPE_CHECKING:
    from tilewright.models.config import MoeConfig

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TensorSlice:
    """Rows ``[first, stop)`` of a container's ``tensor``. For three axes, rows of a single
    ``expert``.
    """

    tensor: str
    first: int
    stop: int
    expert: int | None = None


@dataclass(frozen=True, slots=True)
class View:
    """A tensor with ``shape``, concatenated from ``pieces``.

    Rows are counted over all axes except the last.
    """

    shape: Shape
    pieces: tuple[TensorSlice, ...]

    def rows(self, start: int, stop: int) -> Iterator[TensorSlice]:
        """Yield the source rows for rows ``[start, stop)`` of the first axis."""
        inner = math.prod(self.shape[1:-1])
        return self.all_rows(start * inner, stop * inner)

    def parts(self, start: int, stop: int, first: int, last: int) -> Iterator[TensorSlice]:
        """Yield the source rows for second-axis rows ``[first, last)`` in first-axis rows ``[start,
        stop)``.
        """
        for outer in range(start, stop):
            yield from self.all_rows(outer * self.shape[1] + first, outer * self.shape[1] + last)

    def all_rows(self, low: int, high: int) -> Iterator[TensorSlice]:
        """Yield the source rows for rows ``[low, high)``, counted over all axes except the last."""
        for piece in self.pieces:
            first, last = max(low, 0), min(high, piece.stop - piece.first)
            if first < last:
                yield TensorSlice(
                    piece.tensor, piece.first + first, piece.first + last, piece.expert
                )
            low -= piece.stop - piece.first
            high -= piece.stop - piece.first


def expert_views(
    config: MoeConfig, stored: Mapping[str, Shape], *, together: bool, path: Path
) -> dict[str, View]:
    """Return views for expert tensors with a different form in ``stored`` than requested.

    The requested form is ``together`` (``experts.gate_up_proj``, ``experts.down_proj``) or separate
    (``experts.0.gate_proj.weight``). A container may also have ``experts.gate_proj`` and
    ``experts.up_proj``. Layers in the requested form, and layers without experts, need no views.

    Raises:
        CheckpointError: A tensor is missing or has the wrong shape. The message has ``path``.
    """
    found: dict[str, View] = {}
    for layer in range(config.num_layers):
        if layer in config.dense_layers:
            continue
        block = f"model.layers.{layer}.mlp.experts"
        stacked = _stacked(block, config, stored)
        if stacked:
            _check(stacked, stored, path)
            if not together:
                found |= _apart(block, config, stacked)
            elif f"{block}.gate_proj" in stacked:
                names = f"{block}.gate_proj", f"{block}.up_proj"
                found[f"{block}.gate_up_proj"] = _interleaved(config, names)
        elif together and f"{block}.0.gate_proj.weight" in stored:
            _check(_names_apart(block, config), stored, path)
            found |= _together(block, config)
    for name in found:
        if name in stored:
            raise CheckpointError(
                f"{path}: tensor {name} is stored stacked and separately; allowed: once"
            )
    return found


def _stacked(block: str, config: MoeConfig, stored: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return a layer's stacked expert tensors with their shapes, or none for separate
    tensors.
    """
    count, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
    if f"{block}.gate_up_proj" in stored:
        names = {f"{block}.gate_up_proj": (count, 2 * inner, hidden)}
    elif f"{block}.gate_proj" in stored or f"{block}.up_proj" in stored:
        names = dict.fromkeys((f"{block}.gate_proj", f"{block}.up_proj"), (count, inner, hidden))
    elif f"{block}.down_proj" in stored:
        names = {f"{block}.gate_up_proj": (count, 2 * inner, hidden)}
    else:
        return {}
    return {**names, f"{block}.down_proj": (count, hidden, inner)}


def _names_apart(block: str, config: MoeConfig) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.expert_size
    shapes = {
        "gate_proj": (inner, hidden),
        "up_proj": (inner, hidden),
        "down_proj": (hidden, inner),
    }
    return {
        f"{block}.{expert}.{part}.weight": shape
        for expert in range(config.num_experts)
        for part, shape in shapes.items()
    }


def _check(expected: Mapping[str, Shape], stored: Mapping[str, Shape], path: Path) -> None:
    for name, shape in expected.items():
        check_shape(path, name, stored.get(name), shape)


def _apart(block: str, config: MoeConfig, stacked: Mapping[str, Shape]) -> dict[str, View]:
    """Return a view per matmul and expert from stacked tensors."""
    inner, found = config.expert_size, {}
    for name, shape in _names_apart(block, config).items():
        expert, part = name.removeprefix(f"{block}.").removesuffix(".weight").split(".")
        tensor, first = f"{block}.{part}", 0
        if tensor not in stacked:
            tensor, first = f"{block}.gate_up_proj", inner * (part == "up_proj")
        piece = TensorSlice(tensor, first, first + shape[0], int(expert))
        found[name] = View(shape, (piece,))
    return found


def _interleaved(config: MoeConfig, names: tuple[str, ...]) -> View:
    """Return a view with each expert's rows from all tensors in turn."""
    count, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
    pieces = (TensorSlice(name, 0, inner, expert) for expert in range(count) for name in names)
    return View((count, len(names) * inner, hidden), tuple(pieces))


def _together(block: str, config: MoeConfig) -> dict[str, View]:
    count, hidden, inner = config.num_experts, config.hidden_size, config.expert_size
    halves = [
        TensorSlice(f"{block}.{expert}.{part}.weight", 0, inner)
        for expert in range(count)
        for part in ("gate_proj", "up_proj")
    ]
    downs = [
        TensorSlice(f"{block}.{expert}.down_proj.weight", 0, hidden) for expert in range(count)
    ]
    return {
        f"{block}.gate_up_proj": View((count, 2 * inner, hidden), tuple(halves)),
        f"{block}.down_proj": View((count, hidden, inner), tuple(downs)),
    }


def merged_type(types: set[str]) -> str:
    """Return a view's type name: the common type, or all types of its sources."""
    return "+".join(sorted(types))
