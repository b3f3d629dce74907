"""Only a product that swiglu_packed alone reads takes it in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.function_graphs import function_graph
from tests.tiny import context_of, lowered, precision_of, run_graph, step_inputs, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.passes.fuse_linear_swiglu import fuse_linear_swiglu
from tilewright.compiler.passes.runner import run_passes

REWRITE = """\
- %linear2: float32[T, 96] = linear(%rms_norm1, mlp.gate_proj_up_proj)  {group=ff1_3, weight=bfp8,
      fidelity=hifi2}
- %swiglu_packed0: float32[T, 48] = swiglu_packed(%linear2)
- %linear3: float32[T, 32] = linear(%swiglu_packed0, mlp.down_proj)  {group=ff2, weight=bfp8,
      fidelity=hifi2}
+ %fused_linear0: float32[T, 48] = fused_linear(%rms_norm1, mlp.gate_proj_up_proj, None, None,
      0.0, None, True)  {group=ff1_3, weight=bfp8, fidelity=hifi2}
+ %linear3: float32[T, 32] = linear(%fused_linear0, mlp.down_proj)  {group=ff2, weight=bfp8,
      fidelity=hifi2}"""


def of_no_product(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = ops.swiglu_packed(ops.linear(x, weight).sin())
    return out


def read_twice(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = ops.linear(x, weight)
    return torch.cat((ops.swiglu_packed(product), product), -1)


def packed_twice(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    product: Tensor = ops.linear(x, weight)
    out: Tensor = ops.swiglu_packed(product)
    return out + ops.swiglu_packed(product)


def with_a_residual(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    """The sum comes before swiglu here, and after it inside the fused product."""
    product = ops.fused_linear(x, weight, None, None, 0.0, torch.cat((x, x), -1))
    out: Tensor = ops.swiglu_packed(product)
    return out


def of_two_products(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = ops.swiglu(ops.linear(x, weight), ops.linear(x.sin(), weight))
    return out


@pytest.mark.parametrize(
    "function", [of_no_product, read_twice, packed_twice, with_a_residual, of_two_products]
)
def test_near_misses_are_left_alone(function: Callable[..., Tensor]) -> None:
    graph_module, model = function_graph(function, weight=(64, 32))
    assert fuse_linear_swiglu(graph_module, context_of(model)) == 0


@pytest.mark.parametrize("bias", [(), ("bias",)])
def test_it_is_taken_in(bias: tuple[str, ...]) -> None:
    def gated(x: Tensor, positions: Tensor, weight: Tensor, **bias: Tensor) -> Tensor:
        out: Tensor = ops.swiglu_packed(ops.linear(x, weight, *bias.values()))
        return out * 2

    shapes: dict[str, tuple[int, ...]] = {"weight": (40, 32)} | dict.fromkeys(bias, (40,))
    graph_module, model = function_graph(gated, **shapes)
    before = run_graph(graph_module, model, **step_inputs(5))
    ctx = context_of(model)
    run_passes(graph_module, [fuse_linear_swiglu], ctx)
    assert ctx.reports[-1].op_changes == {"fused_linear": 1, "linear": -1, "swiglu_packed": -1}
    (fused,) = find_calls(graph_module.graph, ops.fused_linear)
    assert fused.meta["val"].shape[-1] == 20
    after = run_graph(graph_module, model, **step_inputs(5))
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


def test_the_product_keeps_its_facts() -> None:
    precision = precision_of("bfp8", "hifi2")
    graph_module, ctx = lowered(tiny_model(), until="fuse_add_rms_norm", precision=precision)
    packed = find_calls(graph_module.graph, ops.swiglu_packed)
    products = [info(product) for node in packed for product in node.all_input_nodes]
    run_passes(graph_module, [fuse_linear_swiglu], ctx)
    assert [info(node) for node in find_calls(graph_module.graph, ops.fused_linear)] == products
    assert [facts.tensor_group for facts in products] == ["ff1_3"] * 2


def test_products_that_were_not_merged_stay() -> None:
    precision = precision_of("bfp8", layers="*.gate_proj: {ff1_3: bfp4}")
    graph_module, ctx = lowered(tiny_model(), until="fuse_add_rms_norm", precision=precision)
    assert fuse_linear_swiglu(graph_module, ctx) == 0
