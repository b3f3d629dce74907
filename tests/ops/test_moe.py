"""The choice of experts and their products, against transformers' and plain loops."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from tilewright.compiler import ops
from tilewright.compiler.ops.moe import expected_experts

T, C, E, K, INNER = 7, 24, 5, 2, 16


def weights() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of the router, and gate, up and down of every expert."""
    shapes = (E, C), (E, INNER, C), (E, INNER, C), (E, C, INNER)
    router, gate, up, down = (torch.randn(shape) * 0.3 for shape in shapes)
    return router, gate, up, down


@pytest.mark.parametrize("renormalise", [False, True])
def test_a_block_is_transformers(renormalise: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=C,
        num_experts=E,
        num_experts_per_tok=K,
        moe_intermediate_size=INNER,
        norm_topk_prob=renormalise,
    )
    theirs = Qwen3MoeSparseMoeBlock(config)
    router, gate, up, down = weights()
    theirs.load_state_dict(
        {
            "gate.weight": router,
            "experts.gate_up_proj": torch.cat((gate, up), dim=1),
            "experts.down_proj": down,
        }
    )
    x = torch.randn(T, C)
    with torch.no_grad():
        expected = theirs(x[None])
    expected = expected[0] if isinstance(expected, tuple) else expected
    got = ops.experts(x, x @ router.T, gate, up, down, K, renormalise)
    torch.testing.assert_close(got, expected.view(T, C), atol=1e-5, rtol=1e-5)


def test_equal_experts_are_chosen_in_their_order() -> None:
    shares, experts = ops.router(torch.zeros(3, E), 3, True)
    assert experts.tolist() == [[0, 1, 2]] * 3
    torch.testing.assert_close(shares, torch.full((3, 3), 1 / 3))


def test_the_likeliest_come_first() -> None:
    shares, experts = ops.router(torch.tensor([[0.0, 3.0, -1.0, 2.0, 1.0]]), 3, False)
    assert experts.tolist() == [[1, 3, 4]]
    assert 0.9 < shares.sum() < 1 and (shares.diff() < 0).all()


def test_products_are_of_each_tokens_own_experts() -> None:
    _, gate, _, down = weights()
    x = torch.randn(T, C)
    experts = torch.stack([torch.randperm(E)[:K] for _ in range(T)])
    inner = ops.expert_linear(x, gate, experts)
    assert inner.shape == (T, K, INNER)
    shares = torch.rand(T, K)
    out = ops.expert_linear(inner, down, experts, shares)
    for token in range(T):
        total = torch.zeros(C)
        for place, expert in enumerate(experts[token].tolist()):
            torch.testing.assert_close(inner[token, place], gate[expert] @ x[token])
            total += shares[token, place] * (down[expert] @ inner[token, place])
        torch.testing.assert_close(out[token], total, atol=1e-5, rtol=1e-5)


def test_a_step_reads_the_experts_that_were_chosen() -> None:
    assert expected_experts(256, 1, 8) == pytest.approx(8)
    assert expected_experts(256, 64, 8) == pytest.approx(256 * (1 - (1 - 8 / 256) ** 64))
    weight, experts = torch.empty(256, 8, 16), torch.zeros(1, 8, dtype=torch.int64)
    one = ops.expert_linear.cost(torch.empty(1, 16), weight, experts)
    assert one.elements_read == pytest.approx(16 + 8 * 8 * 16)
    assert one.flops == 2 * 8 * 8 * 16
