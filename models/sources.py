"""Where a module's parameters stand in checkpoints, when not each in a tensor of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import nn


@dataclass(frozen=True, slots=True)
class TensorSource:
    """``rows`` (half-open; None: all) of the checkpoint's ``tensor``, with ``offset`` added.

    Rows are counted over all axes but the last. ``shape``: that of the whole tensor, where it is
    more than the rows that parameters are made of.
    """

    tensor: str
    rows: tuple[int, int] | None = None
    offset: float = 0.0
    shape: tuple[int, ...] | None = None


Sources: TypeAlias = Mapping[str, TensorSource | tuple[TensorSource, ...]]
"""By parameter; several sources lie below one another, of equally many rows if they name none."""


def each_source(source: TensorSource | tuple[TensorSource, ...]) -> tuple[TensorSource, ...]:
    """One or several, as several."""
    return source if isinstance(source, tuple) else (source,)


def cut_rows(tensor: str, rows: Iterable[tuple[int, int]], shape: tuple[int, ...]) -> Any:
    """The sources of a parameter made of these ``rows`` of one tensor."""
    return tuple(TensorSource(tensor, each, shape=shape) for each in rows)


def stored_shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a checkpoint of the module holds, by name, tied ones once."""
    assert isinstance(module, nn.Module)
    sources: Sources = module.sources()  # type: ignore[operator]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, weight in module.named_parameters():
        parts = each_source(sources.get(name, TensorSource(name)))
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
    found = (each for one in sources.values() for each in each_source(one))
    return {source.tensor: source.offset for source in found if source.offset}
