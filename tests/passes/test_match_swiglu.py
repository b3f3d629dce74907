"""Gates that are nearly, but not, ``silu(gate) * up``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.function_graphs import function_graph
from tests.tiny import context_of
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.passes.match_swiglu import match_swiglu

REWRITE = """\
- %silu0: float32[T, 48] = aten.silu.default(%linear4)
- %mul0: float32[T, 48] = aten.mul.Tensor(%silu0, %linear5)
- %linear6: float32[T, 32] = linear(%mul0, mlp.down_proj)  {group=ff2}
+ %swiglu0: float32[T, 48] = swiglu(%linear4, %linear5)
+ %linear6: float32[T, 32] = linear(%swiglu0, mlp.down_proj)  {group=ff2}"""


@pytest.mark.parametrize(
    "function",
    [
        lambda x, positions: F.gelu(x) * (x + 1),
        lambda x, positions: F.silu(x) + (x + 1),
        lambda x, positions: F.silu(x) * 2.0,
        lambda x, positions: x.sigmoid() * (x + 1),
    ],
    ids=["gelu", "sum", "number", "sigmoid"],
)
def test_near_misses_are_left_alone(function: Callable[..., Tensor]) -> None:
    graph_module, model = function_graph(function)
    assert match_swiglu(graph_module, context_of(model)) == 0


@pytest.mark.parametrize("flipped", [False, True])
def test_the_gate_is_the_side_with_the_silu(flipped: bool) -> None:
    def gated(x: Tensor, positions: Tensor) -> Tensor:
        return (x + 1) * F.silu(x) if flipped else F.silu(x) * (x + 1)

    graph_module, model = function_graph(gated)
    assert match_swiglu(graph_module, context_of(model)) == 1
    (found,) = find_calls(graph_module.graph, ops.swiglu)
    gate, up = found.args
    assert gate.op == "call_function" and "embedding" in str(gate.target)  # type: ignore[union-attr]
    assert "add" in str(up.target)  # type: ignore[union-attr]


def test_a_gate_of_another_width_is_left_alone() -> None:
    """A factor that is broadcast is no second half of a feed-forward block."""
    graph_module, model = function_graph(
        lambda x, positions, weight: F.silu(x) * weight, weight=(32,)
    )
    assert match_swiglu(graph_module, context_of(model)) == 0
