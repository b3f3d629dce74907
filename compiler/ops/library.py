"""How an operator of ours is declared: a torch.library op, its fake, and its cost.

The body of the decorated function is the eager reference that every kernel and lowering is compared
with; it favours clarity and fp32 arithmetic over speed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

NAMESPACE = "tilewright"


@dataclass(frozen=True, slots=True)
class Cost:
    """What one call must do at the least: floating-point operations, elements moved, and elements
    that a rank sends to others.
    """

    flops: float = 0.0
    elements_read: float = 0.0
    elements_written: float = 0.0
    elements_sent: float = 0.0


CostFunction = Callable[..., Cost]


@dataclass(frozen=True, slots=True)
class Operator:
    """One entry of the op set: ``overload`` stands in graphs; calling it runs the reference.

    ``reference`` is the plain function, for callers that want no dispatch.
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
        fake: same arguments, returns empty tensors of the result's shapes.
        cost: same arguments (tensors may be fake), returns the call's :class:`Cost`.
        mutates: names of the arguments the op writes to (state).
    """

    def declare(reference: Callable[..., Any]) -> Operator:
        name = reference.__name__
        custom = torch.library.custom_op(f"{NAMESPACE}::{name}", reference, mutates_args=mutates)
        custom.register_fake(fake)
        entry = Operator(name, reference, custom, cost)
        OPERATORS[entry.overload] = entry
        return entry

    return declare
