"""Exchanges: what a whole group makes of its ranks' values, in one order and one rounding."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler import ops
from tilewright.compiler.formats import get_format
from tilewright.compiler.ops.collectives import (
    COLLECTIVES,
    GROUPS,
    all_gather_group,
    all_reduce_add_group,
    all_reduce_group,
    all_to_all_group,
    reduce_scatter_group,
    tree_sum,
)


def values(count: int) -> list[torch.Tensor]:
    return list(torch.randn(count, 3, 64, generator=torch.Generator().manual_seed(count)))


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 8])
def test_sums_are_a_tree_in_rank_order(count: int) -> None:
    given = values(count)
    expected = {
        1: lambda v: v[0],
        2: lambda v: v[0] + v[1],
        3: lambda v: (v[0] + v[1]) + v[2],
        4: lambda v: (v[0] + v[1]) + (v[2] + v[3]),
        5: lambda v: ((v[0] + v[1]) + (v[2] + v[3])) + v[4],
        8: lambda v: ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])),
    }[count](given)
    assert torch.equal(tree_sum(given), expected)
    assert all(torch.equal(each, expected) for each in all_reduce_group(given, "fp32"))


@pytest.mark.parametrize("wire", ["bf16", "q80"])
def test_a_rank_s_own_part_is_rounded_too(wire: str) -> None:
    given, rounded = values(2), get_format(wire).round_trip
    sent = rounded(given[0]) + rounded(given[1])
    one, two = (all_reduce_group(given, wire, hops=hops) for hops in (1, 2))
    assert all(torch.equal(each, sent) for each in one)
    assert all(torch.equal(each, rounded(sent)) for each in two), "taken back as it was sent"


def test_scattered_and_gathered_is_the_whole_sum() -> None:
    given, sizes = values(3), [24, 24, 16]
    parts = reduce_scatter_group(given, sizes, "fp32")
    assert [part.shape[-1] for part in parts] == sizes
    whole = all_gather_group(parts, sizes)
    total = all_reduce_group(given, "fp32")[0]
    assert all(torch.equal(each, total) for each in whole)
    rows = reduce_scatter_group(given, [1, 1, 1], "fp32", 0)
    assert torch.equal(torch.cat(rows), whole[0])


def test_the_fused_sum_is_its_parts() -> None:
    given, residual, weight = values(2), torch.randn(3, 64), torch.rand(64)
    total = residual + all_reduce_group(given, "fp32")[0]
    for normed, found in all_reduce_add_group(given, [residual] * 2, weight, 1e-5, "fp32"):
        assert torch.equal(found, total)
        assert torch.equal(normed, ops.rms_norm.reference(total, weight, 1e-5))
    normed, found = ops.all_reduce_add(given[0], residual, None, 0.0, 2, "fp32")
    assert torch.equal(normed, found)
    assert torch.equal(found, residual + given[0])


def test_rows_reach_the_ranks_they_are_meant_for() -> None:
    given = [torch.arange(4.0)[:, None] + 10 * rank for rank in range(2)]
    first, second = all_to_all_group(given, [(1, 3), (2, 2)])
    assert first.flatten().tolist() == [0, 10, 11]
    assert second.flatten().tolist() == [1, 2, 3, 12, 13]


def test_on_one_tensor_they_are_the_group_of_one() -> None:
    x = torch.randn(4, 64)
    assert torch.equal(ops.all_reduce(x, 2, "fp32"), x)
    assert torch.equal(ops.all_reduce(x, 2, "bf16"), get_format("bf16").round_trip(x))
    assert torch.equal(ops.all_gather(x, [32, 32]), x)
    assert torch.equal(ops.reduce_scatter(x, [32, 32], "fp32"), x)
    assert torch.equal(ops.all_to_all(x, [2, 2]), x)


def test_what_is_sent_is_counted() -> None:
    x = torch.empty(5, 64, device="meta")
    assert ops.all_reduce.cost(x, 4, "fp32").elements_sent == 3 * 320
    assert ops.all_gather.cost(x, [64, 64, 32]).elements_sent == 2 * 320
    assert ops.reduce_scatter.cost(x, [32, 32], "bf16").elements_sent == 160
    assert ops.linear.cost(x, torch.empty(8, 64, device="meta")).elements_sent == 0


def test_every_collective_has_its_group() -> None:
    assert {ops.OPERATORS[each].name for each in COLLECTIVES} == {
        "all_gather",
        "all_reduce",
        "all_reduce_add",
        "all_to_all",
        "reduce_scatter",
    }
    x = torch.randn(2, 64)
    calls = [(x, x, None, 0.0, 1, "fp32")]
    assert torch.equal(GROUPS[ops.all_reduce_add.overload](calls)[0][1], 2 * x)
