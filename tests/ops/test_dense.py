"""Operators without state against torch's and transformers' own functions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tilewright.compiler import ops
from tilewright.compiler.ops import OPERATORS, Cost

T, C, H, D = 5, 24, 3, 8


def inverse_frequencies(num_pairs: int) -> torch.Tensor:
    return 10000.0 ** (-torch.arange(num_pairs) / num_pairs)


def test_linear_is_torchs() -> None:
    x, weight, bias = torch.randn(T, C), torch.randn(7, C), torch.randn(7)
    assert torch.equal(ops.linear(x, weight), x @ weight.T)
    torch.testing.assert_close(ops.linear(x, weight, bias), x @ weight.T + bias)


def test_embedding_picks_rows() -> None:
    weight = torch.randn(11, C)
    tokens = torch.tensor([3, 0, 10, 3])
    assert torch.equal(ops.embedding(tokens, weight), F.embedding(tokens, weight))


@pytest.mark.parametrize("eps", [1e-6, 1e-1])
def test_rms_norm_is_torchs(eps: float) -> None:
    x, weight = torch.randn(T, C), torch.randn(C)
    expected = F.rms_norm(x, (C,), weight, eps)
    torch.testing.assert_close(ops.rms_norm(x, weight, eps), expected, atol=1e-6, rtol=1e-6)


def test_rms_norm_works_in_fp32_inside() -> None:
    x = torch.full((1, C), 300.0, dtype=torch.float16)  # squares overflow float16
    normed = ops.rms_norm(x, torch.ones(C, dtype=torch.float16), 1e-6)
    assert normed.dtype == torch.float16
    torch.testing.assert_close(normed, torch.ones_like(x))


def test_add_rms_norm_gives_the_norm_and_the_sum() -> None:
    x, residual, weight = torch.randn(T, C), torch.randn(T, C), torch.randn(C)
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(total, x + residual)
    assert torch.equal(normed, ops.rms_norm(x + residual, weight, 1e-5))


def test_rope_is_transformers() -> None:
    x, inv_freq = torch.randn(T, H, D), inverse_frequencies(D // 2)
    positions = torch.tensor([0, 1, 2, 70, 1000])
    angles = torch.cat([positions.float()[:, None] * inv_freq] * 2, dim=-1)
    batched = x.transpose(0, 1)[None]
    expected, _ = apply_rotary_pos_emb(batched, batched, angles.cos()[None], angles.sin()[None])
    got = ops.rope(x, positions, inv_freq)
    torch.testing.assert_close(got, expected[0].transpose(0, 1), atol=1e-6, rtol=1e-6)


def test_interleaved_rope_turns_neighbours() -> None:
    x, inv_freq = torch.randn(T, H, D), inverse_frequencies(D // 2)
    positions = torch.arange(T) * 3
    order = [i for pair in range(D // 2) for i in (pair, pair + D // 2)]
    halves = ops.rope(x, positions, inv_freq)
    neighbours = ops.rope(x[..., order], positions, inv_freq, True)
    torch.testing.assert_close(neighbours, halves[..., order])
    # as complex numbers: a multiplication by exp(i angle)
    angles = positions[:, None].double() * inv_freq.double()
    turned = torch.view_as_complex(x.double().unflatten(-1, (-1, 2))) * torch.polar(
        torch.ones_like(angles), angles
    ).unsqueeze(1)
    expected = torch.view_as_real(turned).flatten(-2).float()
    torch.testing.assert_close(
        ops.rope(x, positions, inv_freq, True), expected, atol=1e-5, rtol=1e-5
    )


@pytest.mark.parametrize("interleaved", [False, True])
def test_partial_rope_leaves_the_rest(interleaved: bool) -> None:
    x, inv_freq = torch.randn(T, H, D), inverse_frequencies(2)
    positions = torch.arange(1, T + 1)
    turned = ops.rope(x, positions, inv_freq, interleaved)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert torch.equal(turned[..., :4], ops.rope(x[..., :4], positions, inv_freq, interleaved))
    assert not torch.allclose(turned[..., :4], x[..., :4])


def test_position_zero_is_not_turned() -> None:
    x = torch.randn(1, H, D)
    assert torch.equal(ops.rope(x, torch.zeros(1).long(), inverse_frequencies(D // 2)), x)


def test_swiglu_and_its_packed_form() -> None:
    gate, up = torch.randn(T, C), torch.randn(T, C)
    expected = gate * torch.sigmoid(gate) * up
    torch.testing.assert_close(ops.swiglu(gate, up), expected)
    packed = torch.cat((gate, up), dim=-1)
    torch.testing.assert_close(ops.swiglu_packed(packed), expected)


DELTA = torch.randn(T, C), *torch.randn(2, T, 2), *torch.randn(2, 2)
"""Heads of 4 channels, one of keys and two of values, whose channels are 8."""

EXAMPLES: dict[str, tuple[Any, ...]] = {
    "embedding": (torch.tensor([1, 2, 0]), torch.randn(4, C)),
    "linear": (torch.randn(T, C), torch.randn(7, C), torch.randn(7)),
    "fused_linear": (
        *(torch.randn(T, C), torch.randn(14, C), torch.randn(14)),
        *(torch.randn(C), 1e-5, torch.randn(T, 7), True),
    ),
    "rms_norm": (torch.randn(T, C), torch.randn(C), 1e-5),
    "add_rms_norm": (torch.randn(T, C), torch.randn(T, C), torch.randn(C), 1e-5),
    "rope": (torch.randn(T, H, D), torch.arange(T), torch.rand(D // 2)),
    "gelu": (torch.randn(T, C), "tanh"),
    "layer_norm": (torch.randn(T, C), torch.randn(C), torch.randn(C), 1e-6),
    "full_attention": (*(torch.randn(3, T, 4, D).unbind(0)), 0.3),
    "interpolate_rows": (torch.randn(9, C), torch.randint(9, (T, 4)), torch.randn(T, 4)),
    "merge_rows": (torch.randn(2 * T, C), 2),
    "swiglu": (torch.randn(T, C), torch.randn(T, C)),
    "swiglu_packed": (torch.randn(T, C),),
    "attention": (torch.randn(T, 4, D), torch.randn(T, 2, D), torch.randn(T, 2, D), 0.3, 2),
    "attention_step": (
        *(torch.randn(T, 4, D), torch.randn(T, 2, D), torch.randn(T, 2, D)),
        *(torch.zeros(3, 2, 16, 2, D), torch.tensor([0, 1, 2, 0, 1])),
        *(torch.tensor([0, 3, 5]), torch.tensor([2, 0]), 0.3),
    ),
    "rope_attention_step": (
        *(torch.randn(T, (4 + 2 + 2) * D), None, None),
        *(torch.zeros(3, 2, 16, 2, D), torch.tensor([0, 1, 2, 0, 1])),
        *(torch.tensor([0, 3, 5]), torch.tensor([2, 0]), torch.rand(D // 2), 4, 0.3),
    ),
    "sigmoid_gate": (torch.randn(T, C), torch.randn(T, 1)),
    "clamped_swiglu": (torch.randn(T, C), torch.randn(T, C), 0.5, 1.7),
    "router": (torch.randn(T, 6), 2, True),
    "expert_linear": (
        *(torch.randn(T, 2, C), torch.randn(6, 7, C)),
        *(torch.tensor([[0, 5], [1, 2], [3, 0], [4, 2], [5, 1]]), torch.rand(T, 2)),
    ),
    "fused_expert_linear": (
        *(torch.randn(T, C), torch.randn(6, 14, C)),
        *(torch.tensor([[0, 5], [1, 2], [3, 0], [4, 2], [5, 1]]), None, True),
    ),
    "delta_rule_norm_step": (
        *(*DELTA, 1, 4, torch.zeros(3, 2, 4, 8)),
        *(torch.tensor([0, 1, 2, 7, 8]), torch.tensor([0, 3, 5]), torch.tensor([2, 0])),
        *(torch.randn(T, 16), torch.randn(8), 1e-6),
    ),
    "experts": (
        *(torch.randn(T, C), torch.randn(T, 6), torch.randn(6, 7, C), torch.randn(6, 7, C)),
        *(torch.randn(6, C, 7), 2, False),
    ),
    "causal_conv1d": (torch.randn(T, C), torch.randn(C, 1, 4)),
    "causal_conv1d_step": (
        *(torch.randn(T, C), torch.randn(C, 1, 4), torch.zeros(3, C, 3)),
        *(torch.tensor([0, 1, 2, 7, 8]), torch.tensor([0, 3, 5]), torch.tensor([2, 0])),
    ),
    "gated_delta_rule": (*DELTA, 1, 4),
    "gated_delta_rule_step": (
        *(*DELTA, 1, 4, torch.zeros(3, 2, 4, 8)),
        *(torch.tensor([0, 1, 2, 7, 8]), torch.tensor([0, 3, 5]), torch.tensor([2, 0])),
    ),
    "add_gated": (torch.randn(T, C), torch.randn(T, C), torch.randn(1)),
    "add_tile_rows": (
        *(torch.randn(2, 3, C), torch.randn(5, 2 * C), torch.tensor([4]), torch.randn(1)),
    ),
    "add_position_rows": (torch.randn(2, 3, C), torch.randn(3, C), torch.randn(1)),
    "mask_text_rows": (torch.randn(T, C), torch.tensor([[1, 1], *[[0, 2]] * (T - 1)])),
    "join_columns": ([torch.randn(T, C), torch.randn(T, 3)],),
    "add_rows": (torch.randn(T, C), torch.randn(T, C)),
    "pool_blocks": (torch.randn(16, C), 2),
    "project_rows": (torch.randn(T, C), torch.randn(C, 3), 0.5),
    "prepend_row": (torch.randn(2, 3, C), torch.randn(C)),
    "pad_rows": (torch.randn(2, 3, C), 8),
    "tile_features": (torch.randn(16, C), [torch.randn(16, C), torch.randn(16, C)], 2, 5),
    "tile_attention": (*torch.randn(3, T, 2, 4), torch.arange(T) > 5, 0.5),
    "cross_attention": (
        *(torch.randn(T, 4 * 4), torch.randn(3, 2 * 2 * 2 * 4)),
        *(torch.tensor([[0, 0], [0, 3], *[[1, 2]] * (T - 2)]), torch.randn(4), 1e-5, 2, 1, 0.5),
    ),
    "round_q80": (torch.randn(T, C),),
    "all_reduce": (torch.randn(T, C), 2, "bf16"),
    "all_reduce_add": (*(torch.randn(T, C), torch.randn(T, C), torch.randn(C)), 1e-5, 2, "bf16"),
    "all_gather": (torch.randn(T, C), [C - 1, 1]),
    "reduce_scatter": (torch.randn(T, C), [C], "bf16"),
    "all_to_all": (torch.randn(T, C), [T - 1, 1]),
    "local_experts": (torch.tensor([[0, 3], [2, 1]]), 1, 2),
    "sample": (
        *(torch.randn(2, 9), torch.tensor([0.0, 1.0]), torch.tensor([0, 3])),
        *(torch.tensor([1.0, 0.5]), torch.tensor([1, 2]), torch.tensor([0, 5])),
    ),
}


WITHOUT_ARITHMETIC = (
    "join_columns",
    "prepend_row",
    "pad_rows",
    "tile_features",
    "merge_rows",
    "embedding",
    "all_gather",
    "all_to_all",
    "local_experts",
    "reduce_scatter",
)
"""The last: of a single rank, as its example is."""


def test_every_operator_has_an_example() -> None:
    assert {operator.name for operator in OPERATORS.values()} == set(EXAMPLES)


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_the_fake_and_the_schema_tell_the_truth(operator: ops.Operator) -> None:
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator.overload, EXAMPLES[operator.name], test_utils=checks)


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=lambda operator: operator.name)
def test_costs_count_at_least_the_result(operator: ops.Operator) -> None:
    arguments = EXAMPLES[operator.name]
    cost = operator.cost(*arguments)
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
    result = operator(*copies)
    first = result[0] if isinstance(result, tuple) else result
    assert isinstance(cost, Cost)
    assert cost.elements_written >= first.numel()
    assert cost.elements_read > 0
    assert (cost.flops == 0) == (operator.name in WITHOUT_ARITHMETIC)
    fakes = [a.to("meta") if isinstance(a, torch.Tensor) else a for a in arguments]
    assert operator.cost(*fakes) == cost, "a cost depends on shapes alone"


def test_the_cost_of_a_product() -> None:
    assert ops.linear.cost(torch.empty(5, 8), torch.empty(3, 8)) == Cost(240.0, 64, 15)


def test_a_sigmoid_gates_each_channel_or_all() -> None:
    x, gate = torch.randn(T, C), torch.randn(T, C)
    torch.testing.assert_close(ops.sigmoid_gate(x, gate), x * torch.sigmoid(gate))
    torch.testing.assert_close(ops.sigmoid_gate(x, gate[:, :1]), x * torch.sigmoid(gate[:, :1]))
