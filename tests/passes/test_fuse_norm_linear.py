"""Only norms that products alone read, as what they multiply, move inside them."""

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
from tilewright.compiler.passes.fuse_norm_linear import fuse_norm_linear
from tilewright.compiler.passes.runner import run_passes

REWRITE = """\
- %rms_norm0: float32[T, 32] = rms_norm(%embedding0, input_layernorm, 1e-05)
- %linear0: float32[T, 128] = linear(%rms_norm0, self_attn.q_proj_k_proj_v_proj)  {group=wqkv,
      weight=bfp8, fidelity=hifi2}
- %rope_attention_step0: float32[T, 64] = rope_attention_step(%linear0, None, None, self_attn.kv,
      positions, cu_seqlens, slots, rotary.inv_freq, 4, 0.25, 0, False)  {group=kv_cache,
      weight=bfp8, fidelity=hifi2}
+ %fused_linear0: float32[T, 128] = fused_linear(%embedding0, self_attn.q_proj_k_proj_v_proj,
      None, input_layernorm, 1e-05, None, False)  {group=wqkv, weight=bfp8, fidelity=hifi2}
+ %rope_attention_step0: float32[T, 64] = rope_attention_step(%fused_linear0, None, None,
      self_attn.kv, positions, cu_seqlens, slots, rotary.inv_freq, 4, 0.25, 0, False)
      {group=kv_cache, weight=bfp8, fidelity=hifi2}
- %rms_norm1: float32[T, 32] = rms_norm(%fused_linear1, post_attention_layernorm, 1e-05)
- %fused_linear2: float32[T, 48] = fused_linear(%rms_norm1, mlp.gate_proj_up_proj, None, None,
      0.0, None, True)  {group=ff1_3, weight=bfp8, fidelity=hifi2}
- %fused_linear4: float32[T, 32] = fused_linear(%fused_linear2, mlp.down_proj, None, None, 0.0,
      %fused_linear1, False)  {group=ff2, weight=bfp8, fidelity=hifi2}
+ %fused_linear3: float32[T, 48] = fused_linear(%fused_linear1, mlp.gate_proj_up_proj, None,
      post_attention_layernorm, 1e-05, None, True)  {group=ff1_3, weight=bfp8, fidelity=hifi2}
+ %fused_linear4: float32[T, 32] = fused_linear(%fused_linear3, mlp.down_proj, None, None, 0.0,
      %fused_linear1, False)  {group=ff2, weight=bfp8, fidelity=hifi2}
- %rms_norm2: float32[R, 32] = rms_norm(%index_select0, norm, 1e-05)
- %linear1: float32[R, 61] = linear(%rms_norm2, embed_tokens)  {group=lm_head, weight=bfp8,
      fidelity=hifi2}
- return %linear1
+ %fused_linear5: float32[R, 61] = fused_linear(%index_select0, embed_tokens, None, norm, 1e-05,
      None, False)  {group=lm_head, weight=bfp8, fidelity=hifi2}
+ return %fused_linear5"""

Function = Callable[..., Tensor]


def norm(x: Tensor, scale: Tensor) -> Tensor:
    out: Tensor = ops.rms_norm(x, scale, 1e-2)
    return out


def product_of(x: Tensor, weight: Tensor) -> Tensor:
    out: Tensor = ops.linear(x, weight)
    return out


def of_no_product(x: Tensor, positions: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return product_of(norm(x, scale).sin(), weight)


def another_reader(x: Tensor, positions: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    normed = norm(x, scale)
    return product_of(normed, weight) + normed


def post_norm(x: Tensor, positions: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    normed = norm(x, scale)
    out: Tensor = ops.fused_linear(normed, weight, None, None, 0.0, normed)
    return out


def as_a_residual(x: Tensor, positions: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    out: Tensor = ops.fused_linear(x, weight, None, None, 0.0, norm(x, scale))
    return out


def as_a_weight(x: Tensor, positions: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return product_of(x, norm(weight, scale))


def of_a_normed_product(x: Tensor, positions: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    out: Tensor = ops.fused_linear(norm(x, scale), weight, None, scale, 1e-5)
    return out


def returned(x: Tensor, positions: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return norm(product_of(x, weight), scale)


@pytest.mark.parametrize(
    "function",
    [
        of_no_product,
        another_reader,
        post_norm,
        as_a_residual,
        as_a_weight,
        of_a_normed_product,
        returned,
    ],
)
def test_near_misses_are_left_alone(function: Function) -> None:
    graph_module, model = function_graph(function, weight=(32, 32), scale=(32,))
    assert fuse_norm_linear(graph_module, context_of(model)) == 0
    assert len(find_calls(graph_module.graph, ops.rms_norm)) == 1


def one(x: Tensor, positions: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return product_of(norm(x, scale), weight)


def biased(x: Tensor, positions: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    out: Tensor = ops.linear(norm(x, scale), weight, scale)
    return out


def three(x: Tensor, positions: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    normed = norm(x, scale)
    q, k, v = (product_of(normed, each) for each in (weight, weight.sin(), weight.cos()))
    return q * k * v


def gated(x: Tensor, positions: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    out: Tensor = ops.fused_linear(norm(x, scale), weight, swiglu=True)
    return out


def added(x: Tensor, positions: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    out: Tensor = ops.fused_linear(norm(x, scale), weight, None, None, 0.0, x)
    return out


def after_another_norm(x: Tensor, positions: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    return product_of(norm(norm(x, scale.sin()), scale), weight)


@pytest.mark.parametrize("function", [one, biased, three, gated, added, after_another_norm])
def test_the_norm_moves_into_its_readers(function: Function) -> None:
    graph_module, model = function_graph(function, weight=(32, 32), scale=(32,))
    before = run_graph(graph_module, model, **step_inputs(5))
    ctx = context_of(model)
    run_passes(graph_module, [fuse_norm_linear], ctx)
    assert ctx.reports[-1].num_rewrites == 1
    assert ctx.reports[-1].op_changes["rms_norm"] == -1
    found = find_calls(graph_module.graph, ops.linear, ops.fused_linear)
    assert len(found) == (3 if function is three else 1)
    assert all(ops.FusedArguments.of(node.args).eps == 1e-2 for node in found)
    after = run_graph(graph_module, model, **step_inputs(5))
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("layers", "num_products"), [("", 1 + 1), ("*.q_proj: {wqkv: bfp4}", 3 + 1)]
)
def test_products_keep_their_facts_merged_or_not(layers: str, num_products: int) -> None:
    precision = precision_of("bfp8", "hifi2", layers=layers)
    model = tiny_model(num_layers=1)
    graph_module, ctx = lowered(model, until="fuse_add_rms_norm", precision=precision)
    products = {info(node).fqn: info(node) for node in find_calls(graph_module.graph, ops.linear)}
    run_passes(graph_module, [fuse_norm_linear], ctx)
    assert ctx.reports[-1].num_rewrites == 3
    fused = [info(node) for node in find_calls(graph_module.graph, ops.fused_linear)]
    assert len(fused) == num_products + 1, "and the head, which has its norm beside it here"
    assert all(products[facts.fqn] == facts for facts in fused)
