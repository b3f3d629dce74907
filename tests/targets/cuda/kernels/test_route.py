"""The choice of experts against the op, and the grouping of pairs against a stable sort."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler import ops
from tilewright.compiler.targets.cuda.kernels.experts import route_triton as module
from tilewright.compiler.targets.cuda.kernels.experts.route_triton import Groups, group, route

NAN = float("nan")
SIZES = [(1, 6, 2), (5, 6, 2), (17, 40, 10), (40, 7, 3), (3, 4, 4)]


def chosen(
    num_tokens: int, num_experts: int, top_k: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Logits between other columns, positions whose last is padding, poisoned results."""
    logits = torch.randn(num_tokens, num_experts + 3, device=device)[:, :num_experts]
    positions = torch.arange(num_tokens, device=device)
    if num_tokens > 1:
        positions[-1] = -1
    weights = torch.full((num_tokens, top_k), NAN, device=device)
    return logits, positions, weights, torch.full_like(weights, -7, dtype=torch.int32)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_likeliest_experts(
    size: tuple[int, int, int], renormalise: bool, device: torch.device
) -> None:
    logits, positions, weights, experts = chosen(*size, device)
    expected, indices = ops.router.reference(logits, size[2], renormalise)
    route(weights, experts, logits, positions, renormalise=renormalise)
    torch.testing.assert_close(weights, expected)
    is_real = positions >= 0
    assert torch.equal(experts[is_real].long(), indices[is_real])
    assert bool((experts[~is_real] == -1).all())


@pytest.mark.parametrize("size", SIZES)
def test_experts_of_a_rank(size: tuple[int, int, int], device: torch.device) -> None:
    """They are counted from its first; of those that other ranks have there are no pairs."""
    num_tokens, num_experts, top_k = size
    logits, positions, weights, experts = chosen(*size, device)
    expected, indices = ops.router.reference(logits, top_k, True)
    first, count = num_experts // 3, num_experts // 2
    groups = Groups.empty(num_tokens * top_k, max(count, top_k), 2, device)
    own = {"first": first, "count": count, "renormalise": True}
    alone = groups if num_tokens == 1 else None
    route(weights, experts, logits, positions, groups=alone, **own)  # type: ignore[arg-type]
    torch.testing.assert_close(weights, expected)
    local = ops.local_experts.reference(indices, first, count)
    assert torch.equal(experts.long(), local.masked_fill(positions.unsqueeze(1) < 0, -1))
    if alone is None:
        group(groups, experts)
    check_groups(groups, experts)


def test_of_equals_the_first_and_of_no_numbers_some(device: torch.device) -> None:
    logits = torch.zeros(2, 5, device=device)
    logits[0, 3], logits[1] = 1.0, NAN
    weights = torch.empty(2, 3, device=device)
    experts = torch.empty(2, 3, dtype=torch.int32, device=device)
    route(weights, experts, logits, torch.arange(2, device=device), renormalise=True)
    assert experts[0].tolist() == [3, 0, 1]
    assert bool(((experts[1] >= 0) & (experts[1] < 5)).all())


def check_groups(groups: Groups, experts: torch.Tensor) -> None:
    """Every pair of a real token once, in a tile of its expert."""
    flat = experts.flatten().cpu()
    count = int((flat >= 0).sum())
    expected = flat.masked_fill(flat < 0, 10**6).argsort(stable=True)[:count]
    order, tiles = groups.order.cpu(), groups.tiles.T.tolist()
    assert torch.equal(order[:count].long(), expected) or len(experts) == 1
    seen = []
    used = [tile for tile in tiles if tile[0] >= 0]
    for expert, first, last in used:
        assert 0 < last - first <= groups.tile_size
        pairs = order[first:last].tolist()
        assert {int(flat[pair]) for pair in pairs} == {expert}
        seen += pairs
    assert sorted(seen) == sorted(expected.tolist())


@pytest.mark.parametrize("small_pairs", [1024, 0])
@pytest.mark.parametrize("tile_size", [2, 16])
@pytest.mark.parametrize("size", SIZES)
def test_pairs_in_tiles(
    size: tuple[int, int, int],
    tile_size: int,
    small_pairs: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one program, and by one an expert."""
    monkeypatch.setattr(module, "_MAX_SMALL_PAIRS", small_pairs)
    num_tokens, num_experts, top_k = size
    logits, positions, weights, experts = chosen(*size, device)
    route(weights, experts, logits, positions, renormalise=True)
    groups = Groups.empty(num_tokens * top_k, num_experts, tile_size, device)
    for each in (groups.order, groups.tiles, groups.counts):
        each.fill_(-9)
    group(groups, experts)
    check_groups(groups, experts)


@pytest.mark.parametrize("small_pairs", [1024, 0])
def test_all_pairs_of_one_expert(
    small_pairs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The most tiles that an expert has; and none at all where all is padding."""
    monkeypatch.setattr(module, "_MAX_SMALL_PAIRS", small_pairs)
    experts = torch.full((9, 1), 3, dtype=torch.int32, device=device)
    groups = Groups.empty(9, 5, 2, device)
    group(groups, experts)
    check_groups(groups, experts)
    experts.fill_(-1)
    group(groups, experts)
    check_groups(groups, experts)


def test_one_token_is_grouped_where_it_is_routed(device: torch.device) -> None:
    logits, positions, weights, experts = chosen(1, 9, 3, device)
    groups = Groups.empty(3, 9, 16, device)
    route(weights, experts, logits, positions, renormalise=True, groups=groups)
    check_groups(groups, experts)
    route(weights, experts, logits, positions - 1, renormalise=True, groups=groups)
    assert bool((groups.tiles[0] == -1).all())
