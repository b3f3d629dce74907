"""Cases of the kernel benchmark with experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.cuda.variant import Variant


def _expert_weights(
    size: tuple[int, int, int], fmt: str, values: Callable[[tuple[int, ...]], Any]
) -> tuple[Any, Any]:
    """Return packed expert weights: gate and up, and down.

    Args:
        size: Experts, model width, expert width.
        values: Returns values with a shape.
    """
    import torch

    from tilewright.compiler.ir.recipe import Segment, WeightRecipe
    from tilewright.compiler.targets.cuda.weights.experts import place_experts

    count, hidden, inner = size

    def make(*shape: int, paired: bool) -> Any:
        recipe, of = WeightRecipe((Segment("w", count * shape[1]),), shape, fmt), values(shape)
        named: dict[str, Any] = {"paired": paired, "check": lambda *_: None}
        return place_experts(recipe, fmt, lambda name: of, torch.device("cuda"), **named)

    return make(count, 2 * inner, hidden, paired=True), make(count, hidden, inner, paired=False)


def _random_values(shape: tuple[int, ...]) -> Any:
    import torch

    return torch.randn(shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5


def _random_codes(shape: tuple[int, ...]) -> Any:
    """Return random 4-bit float values."""
    import torch

    from tilewright.compiler.formats.scaled_codes import E2M1

    values = torch.tensor(E2M1, device="cuda", dtype=torch.bfloat16) / 64
    return values[torch.randint(0, 16, shape, device="cuda", dtype=torch.uint8).int()]


def _dense(*shape: int, fmt: str, paired: bool = False) -> Any:
    """Return a packed random weight."""
    from tilewright.compiler.targets.cuda.weights.packing import hold

    return hold(_random_values(shape), fmt, paired=paired)


def random_experts(
    rows: int, *, fmt: str, top_k: int, hidden: int, inner: int
) -> Iterator[Variant]:
    """Routing, gate and up with SwiGLU, down with the weighted sum.

    Decode kernels include a shared expert. In prompts, it is a dense matmul.
    """
    import torch

    from tilewright.compiler.targets.cuda.kernels.experts import experts, moe_small, route
    from tilewright.compiler.targets.cuda.kernels.experts.expert_pairs import Shared

    count, num_layers, device = 256, 12, torch.device("cuda")
    up, down = _expert_weights((count, hidden, inner), fmt, _random_values)
    shared_up = _dense(2 * inner, hidden, fmt=fmt, paired=True)
    shared_down = _dense(hidden, inner, fmt=fmt)
    x = torch.randn(rows, hidden, device=device).bfloat16()
    logits = torch.randn(num_layers, rows, count, device=device)
    gate, positions = torch.randn(rows, 1, device=device), torch.zeros(rows, device=device).long()
    between = torch.empty(rows, top_k * inner, device=device).bfloat16()
    shared = torch.empty(rows, inner, device=device).bfloat16()
    out = torch.empty(rows, hidden, device=device)
    tiles = route.Tiles.empty(min(rows, route.MAX_TOKENS), top_k, count, device)
    weights = torch.empty(rows, top_k, device=device)
    selected = torch.empty_like(weights, dtype=torch.int32)
    of_up, of_down = Shared(x, shared_up, shared), Shared(shared, shared_down)

    def decode(at: int, *, steps: tuple[int, int]) -> None:
        route.route(weights, selected, logits[at], positions, tiles, renormalise=True)
        named: dict[str, Any] = {"top_k": top_k, "swiglu": True, "shared": of_up}
        experts.expert_linear(between, x, up, tiles, small_depth=steps[0], **named)
        named = {"residual": False, "gate": gate, "shared": of_down, "small_depth": steps[1]}
        experts.expert_sum(out, between, down, tiles, weights, **named)

    if rows <= route.MAX_TOKENS:
        yield Variant("experts.cu", partial(decode, steps=(0, 0)), num_layers)
    if rows <= moe_small.MAX_TOKENS:
        yield Variant("moe_small.cu", partial(decode, steps=moe_small.DEPTHS[fmt]), num_layers)
    num_bytes = min(count, rows * top_k) / count * (up.data.nbytes + down.data.nbytes)
    chain = _Prompt(up, down, x, between, out, logits, positions, top_k)
    yield from chain.variants(fmt, num_bytes)


def expert_layer(rows: int, *, fmt: str) -> Iterator[Variant]:
    """Matmuls in a Qwen3.5-35B-A3B layer with linear attention, in turn. Only for a single row.

    The expert matmuls select the experts.
    """
    import torch

    from tilewright.compiler.targets.cuda.kernels.experts import experts, route
    from tilewright.compiler.targets.cuda.kernels.experts.expert_pairs import Shared
    from tilewright.compiler.targets.cuda.kernels.matmul import gemv

    if rows > 1:
        return
    num_layers, top_k, count, hidden, inner, width = 12, 8, 256, 2048, 512, 12_352
    device = torch.device("cuda")
    up, down = _expert_weights((count, hidden, inner), fmt, _random_values)
    shared_up = _dense(2 * inner, hidden, fmt=fmt, paired=True)
    shared_down = _dense(hidden, inner, fmt=fmt)
    mixer = _dense(width, hidden, fmt=fmt), _dense(hidden, 4096, fmt=fmt)
    routers = [_dense(count + 1, hidden, fmt="bf16") for _ in range(num_layers)]
    norm: dict[str, Any] = {"norm": (torch.ones(hidden, device=device), 1e-6)}
    x, projected = torch.randn(1, hidden, device=device), torch.empty(1, width, device=device)
    mixed, normed = torch.randn(1, 4096, device=device).bfloat16(), torch.empty_like(x).bfloat16()
    between = torch.empty(1, top_k * inner, device=device).bfloat16()
    shared = torch.empty(1, inner, device=device).bfloat16()
    logits = torch.empty(num_layers, 1, count + 1, device=device)
    positions = torch.zeros(1, device=device).long()
    tiles = route.Tiles.empty(1, top_k, count, device)
    weights = torch.empty(1, top_k, device=device)
    of_up, of_down = Shared(normed, shared_up, shared), Shared(shared, shared_down)

    def launch(at: int) -> None:
        store: dict[str, Any] = {"epilogue": gemv.STORE, "num_tokens": 1, **norm}
        gemv.linear(projected, x, mixer[0], **store)
        gemv.linear(x, mixed, mixer[1], epilogue=gemv.ADD, num_tokens=1)
        gemv.linear(logits[at], x, routers[at], normed=normed, **store)
        choice = route.TopKParams(logits[at, :, :count], positions, True)
        named: dict[str, Any] = {"top_k": top_k, "swiglu": True, "shared": of_up, "choice": choice}
        experts.expert_linear(between, normed, up, tiles, **named)
        named = {"residual": True, "gate": logits[at, :, count:], "shared": of_down}
        experts.expert_sum(x, between, down, tiles, weights, choice=choice, **named)

    yield Variant("gemv and moe_small.cu", launch, num_layers)


@dataclass(frozen=True, slots=True)
class _Prompt:
    """Expert matmuls for a prompt, with routing before and the weighted sum after them.

    Attributes:
        up, down: Packed weights: gate and up, and down.
        x, between, out: Inputs, ``up`` results, and sums.
        logits: Router logits by operand set.
        finish: Biases and the bound of SwiGLU, for ``up`` and for ``down``.
    """

    up: Any
    down: Any
    x: Any
    between: Any
    out: Any
    logits: Any
    positions: Any
    top_k: int
    finish: tuple[Any, Any] | None = None

    def variants(self, fmt: str, num_bytes: float) -> Iterator[Variant]:
        """Yield the prompt kernels with their tile sizes."""
        import torch

        from tilewright.compiler.targets.cuda.kernels.experts import (
            experts_triton,
            gemm_experts,
            route_triton,
        )
        from tilewright.compiler.targets.cuda.kernels.experts.expert_pairs import PLAIN

        first, last = self.finish or (PLAIN, PLAIN)
        rows, num_experts, device = len(self.x), self.up.num_experts, self.x.device
        weights = torch.empty(rows, self.top_k, device=device)
        selected = torch.empty_like(weights, dtype=torch.int32)
        products = torch.empty(rows, self.top_k * self.out.shape[1], device=device).bfloat16()
        sizes = [experts_triton.DECODE_PAIRS, experts_triton.PREFILL_PAIRS]
        if fmt == "bf16":
            sizes += experts_triton.SHORT_PAIRS, experts_triton.MOST_PAIRS
        linears: Any = experts_triton.expert_linear, gemm_experts.expert_linear
        kinds = [("triton", linears[0], size) for size in sorted(sizes)]
        if fmt in gemm_experts.FORMATS:
            kinds += [("gemm_experts.cu", linears[1], size) for size in gemm_experts.TILE_SIZES]

        def layer(at: int, *, linear: Any, groups: Any) -> None:
            logits, top_k = self.logits[at], {"top_k": self.top_k}
            route_triton.route(weights, selected, logits, self.positions, renormalise=True)
            route_triton.group(groups, selected)
            linear(self.between, self.x, self.up, groups, swiglu=True, finish=first, **top_k)
            linear(products, self.between, self.down, groups, finish=last, **top_k)
            experts_triton.sum_experts(self.out, products, weights, selected, residual=False)

        for name, linear, size in kinds:
            groups = route_triton.Groups.empty(rows * self.top_k, num_experts, size, device)
            call = partial(layer, linear=linear, groups=groups)
            yield Variant(f"{name}, {size} pairs", call, len(self.logits), num_bytes)


def biased_experts(rows: int, *, fmt: str) -> Iterator[Variant]:
    """Matmuls of gpt-oss 20B with biases and the clamp, as in decode steps and as in prompts. 32
    experts.
    """
    import torch

    from tilewright.compiler.targets.cuda.kernels.experts import experts, moe_small, route
    from tilewright.compiler.targets.cuda.kernels.experts.expert_pairs import Finish

    count, top_k, size, num_layers, device = 32, 4, 2880, 12, torch.device("cuda")
    up, down = _expert_weights((count, size, size), fmt, _random_codes)
    first = Finish(torch.randn(count, 2 * size, 1, device=device), 7.0, 1.702)
    last = Finish(torch.randn(count, size, 1, device=device))
    x = torch.randn(rows, size, device=device).bfloat16()
    logits = torch.randn(num_layers, rows, count, device=device)
    positions = torch.zeros(rows, device=device).long()
    between = torch.empty(rows, top_k * size, device=device).bfloat16()
    out = torch.empty(rows, size, device=device)
    tiles = route.Tiles.empty(min(rows, route.MAX_TOKENS), top_k, count, device)
    weights, selected = (
        torch.empty(rows, top_k, device=device, dtype=t) for t in (torch.float, torch.int)
    )
    up_how: dict[str, Any] = {"top_k": top_k, "swiglu": True, "finish": first}

    def layer(at: int, *, steps: tuple[int, int]) -> None:
        route.route(weights, selected, logits[at], positions, tiles, renormalise=True)
        experts.expert_linear(between, x, up, tiles, small_depth=steps[0], **up_how)
        experts.expert_sum(
            out, between, down, tiles, weights, residual=False, small_depth=steps[1], finish=last
        )

    num_bytes = min(count, rows * top_k) / count * (up.data.nbytes + down.data.nbytes)
    chain = _Prompt(up, down, x, between, out, logits, positions, top_k, (first, last))
    yield from chain.variants(fmt, num_bytes)
    if rows <= route.MAX_TOKENS:
        yield Variant("experts.cu", partial(layer, steps=(0, 0)), num_layers, num_bytes)
    if rows <= moe_small.MAX_TOKENS:
        steps = moe_small.DEPTHS[fmt]
        yield Variant("moe_small.cu", partial(layer, steps=steps), num_layers, num_bytes)
