"""Only attention whose q and k are turned by the same angles takes the rotation in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.function_graphs import function_graph
from tests.tiny import context_of, lowered, precision_of, run_graph, step_inputs, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.passes.fuse_rope_attention import fuse_rope_attention
from tilewright.compiler.passes.insert_state import insert_state
from tilewright.compiler.passes.runner import run_passes

REWRITE = """\
- %split_with_sizes0: (float32[T, 64], float32[T, 32], float32[T, 32]) =
      aten.split_with_sizes.default(%linear0, [64, 32, 32], -1)
- %unflatten0: float32[T, 4, 16] = aten.unflatten.int(%split_with_sizes0.0, -1, [-1, 16])
- %unflatten1: float32[T, 2, 16] = aten.unflatten.int(%split_with_sizes0.1, -1, [-1, 16])
- %unflatten2: float32[T, 2, 16] = aten.unflatten.int(%split_with_sizes0.2, -1, [-1, 16])
- %rope0: float32[T, 4, 16] = rope(%unflatten0, positions, rotary.inv_freq)
- %rope1: float32[T, 2, 16] = rope(%unflatten1, positions, rotary.inv_freq)
- %attention_step0: float32[T, 4, 16] = attention_step(%rope0, %rope1, %unflatten2, self_attn.kv,
      positions, cu_seqlens, slots, 0.25, 0)  {group=kv_cache, weight=bfp8, fidelity=hifi2}
- %flatten0: float32[T, 64] = aten.flatten.using_ints(%attention_step0, -2)
- %linear1: float32[T, 32] = linear(%flatten0, self_attn.o_proj)  {group=wo, weight=bfp8,
      fidelity=hifi2}
+ %rope_attention_step0: float32[T, 64] = rope_attention_step(%linear0, None, None, self_attn.kv,
      positions, cu_seqlens, slots, rotary.inv_freq, 4, 0.25, 0, False)  {group=kv_cache,
      weight=bfp8, fidelity=hifi2}
+ %linear1: float32[T, 32] = linear(%rope_attention_step0, self_attn.o_proj)  {group=wo,
      weight=bfp8, fidelity=hifi2}"""


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    out: Tensor = ops.attention(q, k, v, 0.25)
    return out.flatten(-2)


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (-1, 16))


def plain(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    q, k = (ops.rope(heads(y), positions, inv_freq) for y in (x, x.sin()))
    return attend(q, k, heads(x.cos()))


def interleaved(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    q, k = (ops.rope(heads(y), positions, inv_freq, True) for y in (x, x.sin()))
    return attend(q, k, heads(x.cos()))


def unequal_order(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    q = ops.rope(heads(x), positions, inv_freq, True)
    k = ops.rope(heads(x.sin()), positions, inv_freq, False)
    return attend(q, k, heads(x.cos()))


def only_q(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    return attend(ops.rope(heads(x), positions, inv_freq), heads(x.sin()), heads(x.cos()))


def unequal_frequencies(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    q = ops.rope(heads(x), positions, inv_freq)
    k = ops.rope(heads(x.sin()), positions, inv_freq * 2)
    return attend(q, k, heads(x.cos()))


def other_positions(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    q, k = (ops.rope(heads(y), positions + 1, inv_freq) for y in (x, x.sin()))
    return attend(q, k, heads(x.cos()))


def normed_heads(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    q, k = (ops.rope(heads(y).tanh(), positions, inv_freq) for y in (x, x.sin()))
    return attend(q, k, heads(x.cos()))


def with_norms(x: Tensor, positions: Tensor, inv_freq: Tensor, one: Tensor, two: Tensor) -> Tensor:
    q = ops.rope(ops.rms_norm(heads(x), one, 1e-5), positions, inv_freq, False, 1.5)
    k = ops.rope(ops.rms_norm(heads(x.sin()), two, 1e-5), positions, inv_freq, False, 1.5)
    out: Tensor = ops.attention(q, k, heads(x.cos()), 0.25, 3, 2.0)
    return out.flatten(-2)


def one_norm(x: Tensor, positions: Tensor, inv_freq: Tensor, one: Tensor, two: Tensor) -> Tensor:
    q = ops.rope(ops.rms_norm(heads(x), one, 1e-5), positions, inv_freq)
    return attend(q, ops.rope(heads(x.sin()), positions, inv_freq), heads(x.cos()))


def two_eps(x: Tensor, positions: Tensor, inv_freq: Tensor, one: Tensor, two: Tensor) -> Tensor:
    q = ops.rope(ops.rms_norm(heads(x), one, 1e-5), positions, inv_freq)
    k = ops.rope(ops.rms_norm(heads(x.sin()), two, 1e-6), positions, inv_freq)
    return attend(q, k, heads(x.cos()))


def two_factors(x: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    q = ops.rope(heads(x), positions, inv_freq, False, 2.0)
    return attend(q, ops.rope(heads(x.sin()), positions, inv_freq), heads(x.cos()))


def test_norms_of_heads_a_factor_a_window_and_a_cap_move_inside() -> None:
    graph_module, model = function_graph(with_norms, inv_freq=(8,), one=(16,), two=(16,))
    ctx = context_of(model)
    run_passes(graph_module, [insert_state], ctx)
    before = run_graph(graph_module, model, **step_inputs(9))
    run_passes(graph_module, [fuse_rope_attention], ctx)
    (fused,) = find_calls(graph_module.graph, ops.rope_attention_step)
    given = ops.RopeAttentionArguments.of(fused.args)
    assert (given.window, given.factor, given.soft_cap, given.norm_eps) == (3, 1.5, 2.0, 1e-5)
    assert str(given.q_norm) == "one" and str(given.k_norm) == "two"
    assert not find_calls(graph_module.graph, ops.rms_norm, ops.rope)
    after = run_graph(graph_module, model, **step_inputs(9))
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("function", [one_norm, two_eps])
def test_norms_that_differ_are_left_alone(function: Callable[..., Tensor]) -> None:
    graph_module, model = function_graph(function, inv_freq=(8,), one=(16,), two=(16,))
    ctx = context_of(model)
    assert insert_state(graph_module, ctx) == 1
    assert fuse_rope_attention(graph_module, ctx) == 0


@pytest.mark.parametrize("function", [plain, interleaved])
def test_the_rotation_moves_inside(function: Callable[..., Tensor]) -> None:
    graph_module, model = function_graph(function, inv_freq=(8,))
    ctx = context_of(model)
    run_passes(graph_module, [insert_state], ctx)
    before = run_graph(graph_module, model, **step_inputs(5))
    run_passes(graph_module, [fuse_rope_attention], ctx)
    (fused,) = find_calls(graph_module.graph, ops.rope_attention_step)
    assert fused.args[-1] is (function is interleaved)
    after = run_graph(graph_module, model, **step_inputs(5))
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "function",
    [unequal_order, only_q, unequal_frequencies, other_positions, normed_heads, two_factors],
)
def test_near_misses_are_left_alone(function: Callable[..., Tensor]) -> None:
    graph_module, model = function_graph(function, inv_freq=(8,))
    ctx = context_of(model)
    assert insert_state(graph_module, ctx) == 1
    assert fuse_rope_attention(graph_module, ctx) == 0


def test_products_that_were_not_merged_are_read_one_by_one() -> None:
    precision = precision_of("bfp8", layers="0: {}, *.layers.0.*.q_proj: {wqkv: bfp4}")
    graph_module, _ = lowered(tiny_model(), precision=precision)
    apart, packed = find_calls(graph_module.graph, ops.rope_attention_step)
    assert None not in apart.args[:3]
    assert packed.args[1:3] == (None, None)


def test_pieces_in_another_order_are_read_one_by_one() -> None:
    def reordered(x: Tensor, positions: Tensor, inv_freq: Tensor, weight: Tensor) -> Tensor:
        product: Tensor = ops.linear(x, weight)
        k, q, v = product.split([32, 32, 32], -1)
        q, k = (ops.rope(heads(y), positions, inv_freq) for y in (q, k))
        return attend(q, k, heads(v))

    graph_module, model = function_graph(reordered, inv_freq=(8,), weight=(96, 32))
    ctx = context_of(model)
    run_passes(graph_module, [insert_state], ctx)
    before = run_graph(graph_module, model, **step_inputs(5))
    run_passes(graph_module, [fuse_rope_attention], ctx)
    (fused,) = find_calls(graph_module.graph, ops.rope_attention_step)
    assert None not in fused.args[:3]
    after = run_graph(graph_module, model, **step_inputs(5))
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)
