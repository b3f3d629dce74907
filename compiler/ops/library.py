"""Declaration of Tilewright's operators: a torch.library op, its fake, and its cost.

The decorated function is the eager reference for every kernel and lowering. It favors clarity and
fp32 arithmetic over speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

NAMESPACE = "tilewright"


@dataclass(frozen=True, slots=True)
class Cost:
    """Lower bounds for a call.

    Attributes:
        flops: Floating-point operations.
        elements_read: Elements read from memory.
        elements_written: Elements written to memory.
        elements_sent: Elements from this rank to other ranks.
    """

    flops: float = 0.0
    elements_read: float = 0.0
    elements_written: float = 0.0
    elements_sent: float = 0.0


CostFunction = Callable[..., Cost]


@dataclass(frozen=True, slots=True)
class Operator:
    """An entry of the op set. Graphs contain ``overload``. Calling the entry runs the reference.

    ``reference`` is the plain function, without torch's dispatch.
    """

    name: str
    reference: Callable[..., Any]
    cost: CostFunction

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.overload(*args, **kwargs)

    @property
    def overload(self) -> Any:
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default


OPERATORS: dict[Any, Operator] = {}
_LIBRARY = torch.library.Library(NAMESPACE, "FRAGMENT")


def like(x: torch.Tensor) -> torch.Tensor:
    """Return an empty contiguous tensor like ``x``, for fakes.

    ``empty_like`` and ``new_empty`` of a dynamic length take longer.
    """
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def operator(
    *, fake: Callable[..., Any], cost: CostFunction, mutates: Sequence[str] = ()
) -> Callable[[Callable[..., Any]], Operator]:
    """Declare the decorated eager reference as ``tilewright::<its name>``.

    Args:
        fake: Takes the same arguments, returns empty tensors with the result shapes.
        cost: Takes the same arguments (tensors may be fake), returns the call's :class:`Cost`.
        mutates: Names of the arguments the op writes (state).
    """

    def declare(reference: Callable[..., Any]) -> Operator:
        name = reference.__name__
        schema = torch.library.infer_schema(reference, mutates_args=mutates)
        _LIBRARY.define(name + schema)
        _LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_LIBRARY)
        entry = Operator(name, reference, cost)
        OPERATORS[entry.overload] = entry
        return entry

    return declare
