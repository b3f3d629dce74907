"""Runs expert instructions. Decode steps use CUDA C++ if available, else Triton. Prefill uses
CUDA C++ for block formats, else Triton. float32 operands select float32 arithmetic.

Legend: T tokens, K experts per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.table import EXACT, FAST, Gpu
from tilewright.compiler.targets.cuda.kernels.experts import experts as native_experts
from tilewright.compiler.targets.cuda.kernels.experts import gemm_experts, moe_small
from tilewright.compiler.targets.cuda.kernels.experts import route as native_route
from tilewright.compiler.targets.cuda.kernels.experts import router as native_router
from tilewright.compiler.targets.cuda.kernels.experts.expert_pairs import (
    Finish,
    Shared,
    takes_shared,
)
from tilewright.compiler.targets.cuda.kernels.experts.experts_triton import (
    DECODE_PAIRS,
    expert_linear,
    sum_experts,
)
from tilewright.compiler.targets.cuda.kernels.experts.route_triton import Groups, group, route
from tilewright.compiler.targets.cuda.kernels.experts.table import (
    BLOCKS,
    INSIDE,
    JOINED,
    TRITON,
    ExpertsSite,
    PromptSite,
    bind_route,
    prompt_kernel,
    tile_size,
)
from tilewright.compiler.targets.cuda.steps import routes as steps_routes
from tilewright.compiler.targets.cuda.steps.buffers import Buffers
from tilewright.compiler.targets.cuda.steps.routes import (
    Routing,
    joined_routers,
    left_to_products,
    routed,
    routed_with_product,
)
from tilewright.compiler.targets.cuda.weights.stream import Weights, product_of
from tilewright.compiler.targets.program.instructions import (
    ExpertLinearOp,
    ExpertSum,
    Instruction,
    KernelProgram,
    LinearOp,
    TopKRouteOp,
)


def experts_bytes(plan: KernelProgram, num_tokens: int) -> int:
    """Return the largest scratch size for experts in bytes, without the program's buffers: float32
    products, or bfloat16 products and arranged inputs.
    """
    sizes, top_k = [0], 0
    for each in plan.instructions:
        if isinstance(each, TopKRouteOp):
            top_k = each.top_k
        if isinstance(each, ExpertLinearOp | ExpertSum):
            num_experts, num_rows, num_columns = each.weight.shape
            num_pairs = min(num_tokens, steps_routes.PART_TOKENS) * top_k
            products = num_pairs * num_rows if isinstance(each, ExpertSum) else 0
            sizes.append(4 * products)
            if product_of(each).kind in gemm_experts.FORMATS:
                arranged = gemm_experts.arranged_bytes(num_pairs, num_experts, num_columns)
                sizes.append(2 * products + arranged)
    return max(sizes)


def _behind_products(steps: Sequence[Instruction]) -> set[int]:
    """Return the instructions directly after expert matmuls, by identity. These may start early: no
    instruction between writes their inputs.
    """
    return {id(last) for first, last in pairwise(steps) if isinstance(first, ExpertLinearOp)}


class ExpertsRunner:
    """Experts with their weights. CUDA graphs can capture them.

    Args:
        max_rows: Maximum rows in a decode step.
        gpu: GPU for the op tables.
        arithmetic: Arithmetic for the op tables.
    """

    def __init__(
        self,
        plan: KernelProgram,
        weights: Weights,
        device: torch.device,
        *,
        gpu: Gpu,
        arithmetic: str,
        max_rows: int,
    ) -> None:
        self._weights, self._gpu, self._arithmetic = weights, gpu, arithmetic
        self._routing: Routing | None = None  # from the last `TopKRouteOp`
        self._launched: Routing | None = None  # from the last expert matmul
        self._watched: list[Tensor] | None = None
        most = min(max_rows, native_route.MAX_TOKENS)
        self.why_not_native = self._why_not_native(plan, most)
        fits = not self.why_not_native
        products = [
            product_of(op) for op in plan.instructions if isinstance(op, ExpertLinearOp | ExpertSum)
        ]
        kernel = prompt_kernel(
            [PromptSite(spec.kind, arithmetic, gpu, spec.recipe.shape[-1]) for spec in products]
        )
        self._is_blocks = kernel == BLOCKS
        # Larger strict steps would run the shared expert separately, with other sums.
        joins = arithmetic == FAST and not self._is_blocks
        self._shared = self._find_shared(plan) if fits or joins else {}
        self._along = {id(op) for op in self._shared.values()}
        routers = joined_routers(plan, weights) if fits and arithmetic == FAST else {}
        apart = [op for op in plan.instructions if id(op) not in self._along]
        inside = self._find_inside(apart) if fits else set()
        self._close = _behind_products(apart)
        self._is_bf16 = all(spec.kind == "bf16" for spec in products)
        triton_linear = partial(expert_linear, has_copy_engine=gpu.has_copy_engine)
        self._linear = gemm_experts.expert_linear if self._is_blocks else triton_linear
        if self._is_blocks:
            nvrtc.load(device, gemm_experts.SOURCE)
        routes = [each for each in plan.instructions if isinstance(each, TopKRouteOp)]
        if fits and routes:
            sources = (native_route.SOURCE, native_experts.PRODUCTS, native_experts.MOE_SMALL)
            nvrtc.load(device, *sources, *([native_router.SOURCE] if routers else []))
        self._routers = routers
        self._max_small = self._max_small_rows(routes, fits)
        self._max_along = self._max_small if fits else min(self._max_small, DECODE_PAIRS)
        self._site = ExpertsSite(arithmetic, gpu, decodes=True, fits=fits, max_rows=self._max_small)
        self._routes = {
            id(each): bind_route(
                replace(
                    self._site, is_inside=id(each) in inside, is_joined=id(each) in self._routers
                )
            )
            for each in routes
        }
        self._joined = {
            id(self._routers[at]): each for at, each in self._routes.items() if at in routers
        }

    def _why_not_native(self, plan: KernelProgram, max_rows: int) -> str:
        """Return the reason against CUDA C++ in decode steps. Empty: decode steps use CUDA C++."""
        if self._arithmetic == EXACT:
            return "float32"
        if self._gpu.capability == (0, 0):
            return self._gpu.why_no_cpp
        top_k = 0
        for each in plan.instructions:
            if isinstance(each, TopKRouteOp):
                if each.bias is not None:
                    return "a bias in the selection of experts"
                top_k = each.top_k
                if each.logits.width > native_route.MAX_EXPERTS:
                    return f"{each.logits.width} experts"
            elif isinstance(each, ExpertLinearOp | ExpertSum):
                packed, is_sum = self._weights.weight_of(each), isinstance(each, ExpertSum)
                if not native_experts.takes(
                    packed, num_tokens=max_rows, top_k=top_k, is_sum=is_sum
                ):
                    return f"{packed.num_experts} experts of {packed.num_columns} columns"
        return self._gpu.why_no_cpp if top_k else ""

    def _find_shared(self, plan: KernelProgram) -> dict[int, LinearOp]:
        """Return the shared-expert matmuls fused with expert matmuls in decode steps, by identity
        of the expert instruction.
        """
        found: dict[int, LinearOp] = {}
        for index in range(len(plan.instructions) - 3):
            first, up, down, last = plan.instructions[index : index + 4]
            if not (isinstance(first, ExpertLinearOp) and isinstance(last, ExpertSum)):
                continue
            if not (isinstance(up, LinearOp) and isinstance(down, LinearOp) and last.shared):
                continue
            if (up.x, down.x, last.shared[0]) != (first.x, up.out, down.out):
                continue
            ends = [product.bias is None for product in (first, last)]
            plain = all(each.norm is None and each.bias is None for each in (up, down))
            plain = plain and all(ends) and not first.limit
            if not plain or down.residual or up.swiglu != first.swiglu:
                continue
            pairs = ((first, up), (last, down))
            packed = [[self._weights.weight_of(each) for each in pair] for pair in pairs]
            if all(takes_shared(shared, own) for own, shared in packed):
                found |= {id(expert): shared for expert, shared in pairs}
        return found

    def _find_inside(self, steps: Sequence[Instruction]) -> set[int]:
        """Return the routers fused into the next expert matmuls for a single token, by identity.
        The expert sum must follow directly.
        """
        found = set()
        for router, first, last in zip(steps, steps[1:], steps[2:], strict=False):
            if not (isinstance(router, TopKRouteOp) and isinstance(last, ExpertSum)):
                continue
            is_own = last.shared is None or id(last) in self._shared
            if not (isinstance(first, ExpertLinearOp) and first.swiglu and is_own):
                continue
            pairs = []
            for each in (first, last):
                along = self._shared.get(id(each))
                shared = None if along is None else self._weights.weight_of(along)
                pairs.append((self._weights.weight_of(each), shared))
            if moe_small.takes_choice(pairs, router.logits.width, router.top_k):
                found.add(id(router))
        return found

    def _max_small_rows(self, routes: Sequence[TopKRouteOp], fits: bool) -> int:
        """Return the largest row count of a decode step with kernels of its own."""
        if not self._is_blocks:
            return native_route.MAX_TOKENS
        limits = [gemm_experts.max_small_rows(op.logits.width, op.top_k) for op in routes]
        return min([native_route.MAX_TOKENS, *limits]) if fits else 0

    @property
    def prompt_kernel(self) -> str:
        """Return the kernel for prompts, and for decode steps without kernels of their own."""
        return BLOCKS if self._is_blocks else "Triton"

    def runs_along(self, each: LinearOp, num_rows: int) -> bool:
        """Return whether another instruction computes this matmul in decode steps with
        ``num_rows``.
        """
        routes = self._joined.get(id(each))
        if routes is not None:
            return routes.at(num_rows) == JOINED
        return id(each) in self._along and num_rows <= self._max_along

    def watch(self, run: Callable[[], object]) -> list[Tensor]:
        """Run a function and return the selected experts ``[T, K]`` for each `TopKRouteOp`."""
        self._watched = []
        run()
        found, self._watched = self._watched, None
        return found

    def run(
        self,
        each: TopKRouteOp | ExpertLinearOp | ExpertSum,
        step: Buffers,
        positions: Tensor,
        *,
        decodes: bool,
    ) -> None:
        """Run an instruction of an expert block."""
        if isinstance(each, TopKRouteOp):
            logits = step.view(each.logits)
            kernel = self._routes[id(each)].at(len(logits)) if decodes else TRITON
            if kernel != TRITON:
                self._routing = self._route_native(each, step, positions, kernel)
            else:
                self._routing = self._route(each, logits, positions, decodes)
            if self._watched is not None:
                self._watched.append(self._routing.experts)
        elif isinstance(each, ExpertLinearOp):
            self._products(each, step)
        else:
            self._sum(each, step)

    def _route_native(
        self, each: TopKRouteOp, step: Buffers, positions: Tensor, kernel: str
    ) -> Routing:
        logits = step.view(each.logits)
        if kernel == INSIDE and self._watched is None:
            return left_to_products(each, logits, positions)
        if kernel != JOINED:
            return routed(each, logits, positions)
        router = self._routers[id(each)]
        packed = self._weights.weight_of(router)
        return routed_with_product(
            each, step.view(router.out), step.view(router.x), packed, positions
        )

    def _route(
        self, each: TopKRouteOp, logits: Tensor, positions: Tensor, decodes: bool
    ) -> Routing:
        num_tokens, num_experts = len(logits), each.num_experts
        if num_tokens == 1:  # each pair has a tile, even without an expert on this rank
            num_experts = max(num_experts, each.top_k)
        weights = logits.new_empty(num_tokens, each.top_k)
        experts = torch.empty_like(weights, dtype=torch.int32)
        parts = []
        for first in range(0, num_tokens, steps_routes.PART_TOKENS):
            num_pairs = min(steps_routes.PART_TOKENS, num_tokens - first) * each.top_k
            is_small = decodes and num_tokens <= self._max_small
            size = DECODE_PAIRS if is_small else self._tile_size(num_pairs, each.logits.width)
            parts.append(Groups.empty(num_pairs, num_experts, size, logits.device))
        alone = parts[0] if num_tokens == 1 else None
        route(
            weights,
            experts,
            logits,
            positions,
            renormalise=each.renormalise,
            groups=alone,
            first=each.first,
            count=each.num_experts,
            bias=self._vector(each.bias),
            scale=each.scale,
        )
        routing = Routing(weights, experts, tuple(parts))
        if alone is None:
            for part, groups in routing.parts():
                group(groups, experts[part])
        return routing

    def _vector(self, recipe: WeightRecipe | None) -> Tensor | None:
        return None if recipe is None else self._weights.constant(recipe)

    def _tile_size(self, num_pairs: int, num_experts: int) -> int:
        if self._is_blocks:
            return gemm_experts.tile_size(num_pairs, num_experts)
        return tile_size(num_pairs, num_experts, site=self._site, is_bf16=self._is_bf16)

    def _products(self, each: ExpertLinearOp, step: Buffers) -> None:
        routing, packed = self._routing, self._weights.weight_of(each)
        assert routing is not None
        out, x = step.view(each.out), step.view(each.x)
        top_k, swiglu = routing.top_k, each.swiglu
        self._launched = routing
        given = self._shared.get(id(each))
        finish = Finish(self._vector(each.bias), each.limit, each.alpha)
        for part, tiles in routing.native_parts():
            shared = None
            if given is not None:
                shared = self._shared_rows(given, step, part)
            native_experts.expert_linear(
                out[part],
                x[part],
                packed,
                tiles,
                top_k=top_k,
                swiglu=swiglu,
                shared=shared,
                choice=routing.choice,
                finish=finish,
            )
        for part, groups in routing.parts():
            how: dict[str, Any] = {"top_k": top_k, "swiglu": swiglu, "finish": finish}
            shared = self._shared_in(groups, each, step, part)
            how |= {} if shared is None else {"shared": shared}
            self._linear(out[part], x[part], packed, groups, **how)

    def _shared_rows(self, op: LinearOp, step: Buffers, rows: slice) -> Shared:
        x, out = step.view(op.x)[rows], step.view(op.out)[rows]
        return Shared(x, self._weights.weight_of(op), out)

    def _shared_in(
        self, groups: Groups, op: ExpertLinearOp | ExpertSum, step: Buffers, rows: slice
    ) -> Shared | None:
        """Return the shared expert of a Triton matmul, or None. Prompts have larger tiles."""
        along = self._shared.get(id(op))
        if along is None or groups.tile_size != DECODE_PAIRS:
            return None
        shared = self._shared_rows(along, step, rows)
        return shared if len(shared.x) <= self._max_along else None

    def _sum_native(
        self,
        each: ExpertSum,
        step: Buffers,
        routing: Routing,
        part: slice,
        tiles: native_route.Tiles,
    ) -> None:
        assert self._launched is routing  # the kernel reads tiles without a wait
        shared: Shared | Tensor | None = None
        gate = None
        if each.shared is not None:
            shared, gate = step.view(each.shared[0])[part], step.view(each.shared[1])[part]
        along = self._shared.get(id(each))
        if along is not None:
            weight = self._weights.weight_of(along)
            shared = Shared(step.view(along.x)[part], weight)
        native_experts.expert_sum(
            step.view(each.out)[part],
            step.view(each.x)[part],
            self._weights.weight_of(each),
            tiles,
            routing.weights[part],
            residual=each.residual,
            gate=gate,
            shared=shared,
            choice=routing.choice,
            small_depth=None if id(each) in self._close else 0,
            finish=Finish(self._vector(each.bias)),
        )

    def _sum(self, each: ExpertSum, step: Buffers) -> None:
        routing, packed = self._routing, self._weights.weight_of(each)
        assert routing is not None
        for part, tiles in routing.native_parts():
            self._sum_native(each, step, routing, part, tiles)
        if routing.tiles:
            return
        out, x = step.view(each.out), step.view(each.x)
        shared = None
        if each.shared is not None:
            shared = step.view(each.shared[0]), step.view(each.shared[1])
        most = min(steps_routes.PART_TOKENS, len(out))
        products = x.new_empty(most, routing.top_k * packed.num_rows)  # in the operand type
        for part, groups in routing.parts():
            results = products[: len(x[part])]
            finish = Finish(self._vector(each.bias))
            how: dict[str, Any] = {"top_k": routing.top_k, "finish": finish}
            along = self._shared_in(groups, each, step, part)
            how |= {} if along is None else {"shared": along}
            if not self._is_blocks and groups.tile_size == DECODE_PAIRS:
                how["is_early"] = self._launched is routing
            self._linear(results, x[part], packed, groups, **how)
            sum_experts(
                out[part],
                results,
                routing.weights[part],
                routing.experts[part],
                residual=each.residual,
                shared=None if shared is None else (shared[0][part], shared[1][part]),
            )
