"""Where the parameters of a module stand in checkpoints that do not have a tensor for each."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Rows of a checkpoint's ``tensor``: ``rows`` (half-open; None: all), with ``offset`` added.

    Rows are counted over all axes but the last. ``shape``: that of the whole tensor, where it is
    more than the rows that parameters are made of.
    """

    tensor: str
    rows: tuple[int, int] | None = None
    offset: float = 0.0
    shape: tuple[int, ...] | None = None


Sources: TypeAlias = Mapping[str, tuple[TensorSource, ...]]
"""Of each parameter, by its name, the sources of its rows from top to bottom; sources that name no
rows have equally many."""


def cut_rows(
    tensor: str, rows: Iterable[tuple[int, int]], shape: tuple[int, ...]
) -> tuple[TensorSource, ...]:
    """The sources of a parameter made of these ``rows`` of one tensor, which is of ``shape``."""
    return tuple(TensorSource(tensor, each, shape=shape) for each in rows)


def stored_shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a checkpoint of the module holds, by name, tied ones once."""
    assert isinstance(module, nn.Module)
    sources: Sources = module.sources()  # type: ignore[operator]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, weight in module.named_parameters():
        parts = sources.get(name, (TensorSource(name),))
        for source in parts:
            if source.shape is not None:
                shapes[source.tensor] = source.shape
                continue
            shape = tuple(weight.shape)[1:] if len(parts) > 1 else tuple(weight.shape)
            if source.rows is not None:
                known = shapes.get(source.tensor, (0,))
                shape = (max(source.rows[1], known[0]), weight.shape[-1])
            shapes[source.tensor] = shape
    return shapes


def stored_offsets(module: Any) -> dict[str, float]:
    """What the module adds to tensors of a checkpoint, by name, where it adds anything."""
    sources: Sources = module.sources()
    parts = (source for parts in sources.values() for source in parts)
    return {source.tensor: source.offset for source in parts if source.offset}
