"""Where a module's parameters stand in checkpoints, when not each in a tensor of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class TensorSource:
    """``rows`` (half-open; None: all) of the checkpoint's ``tensor``, with ``offset`` added."""

    tensor: str
    rows: tuple[int, int] | None = None
    offset: float = 0.0


def stored_shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that a checkpoint of the module holds, by name, tied ones once."""
    assert isinstance(module, nn.Module)
    sources = module.sources()  # type: ignore[operator]
    shapes: dict[str, tuple[int, ...]] = {}
    for name, weight in module.named_parameters():
        source = sources.get(name, TensorSource(name))
        first = weight.shape[0] if source.rows is None else source.rows[1]
        known = shapes.get(source.tensor, (0,))
        shapes[source.tensor] = (max(first, known[0]), *weight.shape[1:])
    return shapes
