"""The fused forms of experts and of the delta rule are what they are made of."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler import ops


def operands() -> dict[str, torch.Tensor]:
    return {
        "x": torch.randn(5, 8),
        "weight": torch.randn(4, 6, 8),
        "experts": torch.tensor([[0, 3], [1, 0], [2, 3], [3, 1], [0, 1]]),
    }


def test_halves_of_every_product_are_gated() -> None:
    given = operands()
    gate, up = given["weight"][:, :3], given["weight"][:, 3:]
    parts = [ops.expert_linear(given["x"], each, given["experts"]) for each in (gate, up)]
    got = ops.fused_expert_linear(**given, swiglu=True)
    assert got.shape == (5, 2, 3)
    torch.testing.assert_close(got, ops.swiglu(*parts))


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_a_sum_and_what_is_added_to_it(residual: bool, shared: bool) -> None:
    given = operands() | {"weights": torch.rand(5, 2)}
    expected = ops.expert_linear(**given)
    more: dict[str, torch.Tensor] = {}
    if residual:
        more["residual"] = torch.randn(5, 6)
        expected = expected + more["residual"]
    if shared:
        more |= {"shared": torch.randn(5, 6), "shared_gate": torch.randn(5, 1)}
        expected = expected + more["shared"] * more["shared_gate"].sigmoid()
    got = ops.fused_expert_linear(**given, **more)
    torch.testing.assert_close(got, expected)
    empty = [torch.empty_like(each, device="meta") for each in given.values()]
    assert ops.fused_expert_linear(*empty).shape == got.shape


def test_costs_are_the_products_and_what_is_read_besides() -> None:
    given = operands() | {"weights": torch.rand(5, 2)}
    plain = ops.expert_linear.cost(*given.values())
    args = (*given.values(), False, torch.randn(5, 6))
    fused = ops.fused_expert_linear.cost(*args)
    assert fused.flops == plain.flops and fused.elements_read == plain.elements_read + 30
    assert fused.elements_written == plain.elements_written


def test_the_delta_rule_with_its_norm() -> None:
    num_tokens, heads, key_dim, value_dim = 3, 2, 4, 6
    qkv = torch.randn(num_tokens, 2 * key_dim + heads * value_dim)
    a, b, z = (torch.randn(num_tokens, width) for width in (heads, heads, heads * value_dim))
    a_log, dt_bias = torch.randn(2, heads)
    where = (torch.arange(3) + 4, torch.tensor([0, 3]), torch.tensor([1]))
    states = torch.randn(2, heads, key_dim, value_dim)
    own = states.clone()
    rule = (qkv, a, b, a_log, dt_bias, 1, key_dim)
    heads_THV = ops.gated_delta_rule_step(*rule, states, *where)
    weight = torch.rand(value_dim)
    expected = ops.rms_norm(heads_THV, weight, 1e-6).flatten(1) * torch.nn.functional.silu(z)
    got = ops.delta_rule_norm_step(*rule, own, *where, z, weight, 1e-6)
    torch.testing.assert_close(got, expected)
    assert torch.equal(own, states)
