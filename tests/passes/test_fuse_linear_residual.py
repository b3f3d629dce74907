"""Only residual adds, and only into products that nobody else reads."""

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
from tilewright.compiler.passes.fuse_linear_residual import fuse_linear_residual
from tilewright.compiler.passes.runner import run_passes

REWRITE = """\
- %linear1: float32[T, 32] = linear(%flatten0, self_attn.o_proj)  {group=wo, weight=bfp8,
      fidelity=hifi2}
- %add0: float32[T, 32] = aten.add.Tensor(%embedding0, %linear1)
- %rms_norm1: float32[T, 32] = rms_norm(%add0, post_attention_layernorm, 1e-05)
+ %fused_linear0: float32[T, 32] = fused_linear(%flatten0, self_attn.o_proj, None, None, 0.0,
      %embedding0, False)  {group=wo, weight=bfp8, fidelity=hifi2}
+ %rms_norm1: float32[T, 32] = rms_norm(%fused_linear0, post_attention_layernorm, 1e-05)
- %linear2: float32[T, 32] = linear(%fused_linear1, mlp.down_proj)  {group=ff2, weight=bfp8,
      fidelity=hifi2}
- %add1: float32[T, 32] = aten.add.Tensor(%add0, %linear2)
- %rms_norm2: float32[T, 32] = rms_norm(%add1, norm, 1e-05)
+ %fused_linear2: float32[T, 32] = fused_linear(%fused_linear1, mlp.down_proj, None, None, 0.0,
      %fused_linear0, False)  {group=ff2, weight=bfp8, fidelity=hifi2}
+ %rms_norm2: float32[T, 32] = rms_norm(%fused_linear2, norm, 1e-05)"""

Function = Callable[..., Tensor]


def product_of(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = ops.linear(x, weight)
    return out


def of_no_product(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return x + product_of(x, weight).sin()


def scaled(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return torch.add(x, product_of(x, weight), alpha=2)


def a_number(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return product_of(x, weight) + 1.0


def one_row(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return weight[0] + product_of(x, weight)


def of_another_type(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return x.to(torch.float64) + product_of(x, weight)


def read_twice(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    product = product_of(x, weight)
    return (x + product) * product


def added_to_itself(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    product = product_of(x, weight)
    return product + product


def with_a_residual(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = ops.fused_linear(x, weight, None, None, 0.0, x.sin())
    return x + out


def with_swiglu(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = ops.fused_linear(x, torch.cat((weight, weight)), swiglu=True)
    return x + out


def a_difference(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return x - product_of(x, weight)


@pytest.mark.parametrize(
    "function",
    [
        of_no_product,
        scaled,
        a_number,
        one_row,
        of_another_type,
        read_twice,
        added_to_itself,
        with_a_residual,
        with_swiglu,
        a_difference,
    ],
)
def test_near_misses_are_left_alone(function: Function) -> None:
    graph_module, model = function_graph(function, weight=(32, 32))
    assert fuse_linear_residual(graph_module, context_of(model)) == 0


def residual_first(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return x + product_of(x.sin(), weight)


def product_first(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return product_of(x.sin(), weight) + x


def residual_made_later(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    product = product_of(x, weight)
    return product + x.sin()


def of_a_normed_product(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = ops.fused_linear(x, weight, None, weight[0], 1e-5)
    return x + out


def two_products(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    return product_of(x, weight) + product_of(x.sin(), weight)


def one_of_which_is_read(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
    product = product_of(x.sin(), weight)
    return (product_of(x, weight) + product) * product


@pytest.mark.parametrize(
    "function",
    [
        residual_first,
        product_first,
        residual_made_later,
        of_a_normed_product,
        two_products,
        one_of_which_is_read,
    ],
)
def test_the_sum_moves_inside(function: Function) -> None:
    graph_module, model = function_graph(function, weight=(32, 32))
    before = run_graph(graph_module, model, **step_inputs(5))
    ctx = context_of(model)
    run_passes(graph_module, [fuse_linear_residual], ctx)
    assert ctx.reports[-1].num_rewrites == 1
    assert ctx.reports[-1].op_changes["aten.add.Tensor"] == -1
    after = run_graph(graph_module, model, **step_inputs(5))
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


def test_a_chain_of_sums_is_a_chain_of_products() -> None:
    def chain(x: Tensor, positions: Tensor, weight: Tensor) -> Tensor:
        for _ in range(3):
            x = x + product_of(x.sin(), weight)
        return x

    graph_module, model = function_graph(chain, weight=(32, 32))
    before = run_graph(graph_module, model, **step_inputs(5))
    ctx = context_of(model)
    run_passes(graph_module, [fuse_linear_residual], ctx)
    first, second, third = find_calls(graph_module.graph, ops.fused_linear)
    residuals = [ops.FusedArguments.of(node.args).residual for node in (second, third)]
    assert residuals == [first, second]
    after = run_graph(graph_module, model, **step_inputs(5))
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


def test_the_product_keeps_its_facts() -> None:
    precision = precision_of("bfp8", "hifi2")
    graph_module, ctx = lowered(tiny_model(), until="fuse_add_rms_norm", precision=precision)
    products = [info(node) for node in find_calls(graph_module.graph, ops.linear)]
    run_passes(graph_module, [fuse_linear_residual], ctx)
    fused = [info(node) for node in find_calls(graph_module.graph, ops.fused_linear)]
    assert fused == [facts for facts in products if facts.tensor_group in ("wo", "ff2")]
    assert len(fused) == 4
