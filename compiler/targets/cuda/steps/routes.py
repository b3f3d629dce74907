"""Expert routing for a step, and the kernels for routing in decode steps.

Legend: T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.experts import route as native_route
from tilewright.compiler.targets.cuda.kernels.experts import router as native_router
from tilewright.compiler.targets.cuda.kernels.experts.route_triton import Groups
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight
from tilewright.compiler.targets.cuda.weights.stream import Weights, product_of
from tilewright.compiler.targets.program.instructions import KernelProgram, LinearOp, TopKRouteOp

PART_TOKENS = 8192 + 512
"""Maximum tokens per launch of prefill experts. It limits the scratch memory. The largest mixed
batch fits a single launch, because a second launch reads all experts again.
"""


_Each = TypeVar("_Each")


@dataclass(frozen=True, slots=True)
class Routing:
    """A step's selected experts.

    Attributes:
        weights: Expert weights ``[T, K]``.
        experts: Expert indices ``[T, K]``.
        groups: Pairs sorted by expert, for prefill.
        tiles: Pairs sorted by expert, for decode steps.
        choice: Router outputs for a single token, if the expert matmul selects its experts.
    """

    weights: Tensor
    experts: Tensor
    groups: tuple[Groups, ...] = ()
    tiles: tuple[native_route.Tiles, ...] = ()
    choice: native_route.TopKParams | None = None

    @property
    def top_k(self) -> int:
        return self.experts.shape[1]

    def parts(self) -> Iterator[tuple[slice, Groups]]:
        """Yield token ranges with their groups."""
        return _runs(self.groups, PART_TOKENS)

    def native_parts(self) -> Iterator[tuple[slice, native_route.Tiles]]:
        """Yield decode-token ranges with their tiles."""
        return _runs(self.tiles, native_route.MAX_TOKENS)


def _runs(found: Sequence[_Each], size: int) -> Iterator[tuple[slice, _Each]]:
    for index, each in enumerate(found):
        yield slice(index * size, (index + 1) * size), each


def joined_routers(plan: KernelProgram, weights: Weights) -> dict[int, LinearOp]:
    """Return routers fused with expert selection, by the identity of the selection."""
    found: dict[int, LinearOp] = {}
    for product, each in pairwise(plan.instructions):
        if not (isinstance(product, LinearOp) and isinstance(each, TopKRouteOp)):
            continue
        out, logits = product.out, each.logits
        is_plain = product.norm is None is product.bias
        is_plain = is_plain and not (product.residual or product.swiglu)
        places = [(one.buffer, one.first, one.pitch) for one in (out, logits)]
        packed = weights.packed(product_of(product))
        if is_plain and places[0] == places[1] and native_router.takes(packed, each.logits.width):
            found[id(each)] = product
    return found


def left_to_products(each: TopKRouteOp, logits: Tensor, positions: Tensor) -> Routing:
    """Return a single token's routing. The expert matmul selects the experts."""
    how = each.renormalise, each.first, each.num_experts
    return _empty(each, logits, native_route.TopKParams(logits, positions, *how))


def routed(each: TopKRouteOp, logits: Tensor, positions: Tensor) -> Routing:
    """Select experts from logits with route.cu."""
    routing = _empty(each, logits)
    for part, some in routing.native_parts():
        native_route.route(
            routing.weights[part],
            routing.experts[part],
            logits[part],
            positions[part],
            some,
            renormalise=each.renormalise,
            first=each.first,
            count=each.num_experts,
        )
    return routing


def routed_with_product(
    each: TopKRouteOp, logits: Tensor, x: Tensor, packed: PackedWeight, positions: Tensor
) -> Routing:
    """Compute router logits and select experts with router.cu."""
    routing = _empty(each, logits)
    native_router.router(
        routing.weights,
        routing.experts,
        logits,
        x,
        packed,
        positions,
        routing.tiles[0],
        renormalise=each.renormalise,
        num_experts=each.logits.width,
        first=each.first,
        count=each.num_experts,
    )
    return routing


def _empty(
    each: TopKRouteOp, logits: Tensor, choice: native_route.TopKParams | None = None
) -> Routing:
    """Allocate the routing of a decode step."""
    num_tokens, most = len(logits), native_route.MAX_TOKENS
    weights = logits.new_empty(num_tokens, each.top_k)
    counts = [min(most, num_tokens - first) for first in range(0, num_tokens, most)]
    tiles = tuple(
        native_route.Tiles.empty(count, each.top_k, each.num_experts, logits.device)
        for count in counts
    )
    experts = torch.empty_like(weights, dtype=torch.int32)
    return Routing(weights, experts, tiles=tiles, choice=choice)
