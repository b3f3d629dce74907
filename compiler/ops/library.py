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
    custom_op: Any
    cost: CostFunction

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.custom_op(*args, **kwargs)

    @property
    def overload(self) -> Any:
        return getattr(getattr(torch.ops, NAMESPACE), self.name).default


OPERATORS: dict[Any, Operator] = {}


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
        custom = torch.library.custom_op(f"{NAMESPACE}::{name}", reference, mutates_args=mutates)
        custom.register_fake(fake)
        entry = Operator(name, reference, custom, cost)
        OPERATORS[entry.overload] = entry
        return entry

    return declare
