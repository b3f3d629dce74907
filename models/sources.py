"""Sources of a module's parameters in checkpoints with a different tensor layout."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from torch import nn


@dataclass(frozen=True, slots=True)
class TensorSource:
    """Rows of a checkpoint's ``tensor``.

    Rows are counted over all axes except the last.

    Attributes:
        tensor: Tensor name.
        rows: Half-open range. None: all rows.
        offset: Number added to all values.
        shape: The whole tensor's shape, if parameters use only some rows.
    """

    tensor: str
    rows: tuple[int, int] | None = None
    offset: float = 0.0
    shape: tuple[int, ...] | None = None


_T = TypeVar("_T")

Sources: TypeAlias = Mapping[str, tuple[TensorSource, ...]]
"""Sources by parameter name, in order. Sources without rows divide the parameter equally."""


def cut_rows(
    tensor: str, rows: Iterable[tuple[int, int]], shape: tuple[int, ...]
) -> tuple[TensorSource, ...]:
    """Return the sources for a parameter with these ``rows`` from a tensor with ``shape``."""
    return tuple(TensorSource(tensor, each, shape=shape) for each in rows)


def stored_shapes(module: Any) -> dict[str, tuple[int, ...]]:
    """Return the expected tensor shapes in a checkpoint by name, with tied tensors once."""
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
    """Return the model's nonzero offsets by tensor name."""
    sources: Sources = module.sources()
    parts = (source for parts in sources.values() for source in parts)
    return {source.tensor: source.offset for source in parts if source.offset}


def of_modules(read: Callable[[Any], Mapping[str, _T]], modules: Iterable[Any]) -> dict[str, _T]:
    """Return the results of ``read`` for all modules by tensor name."""
    return {name: value for module in modules for name, value in read(module).items()}
