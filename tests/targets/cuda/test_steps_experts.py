"""Which kernels experts run on, what runs along with them, and on a GPU that all agree."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.models.test_qwen3_5_moe import ON_CUDA
from tests.targets.cuda.test_conformance_cuda import BF16_NOISE, noise
from tests.tiny import (
    compiled,
    copy_slot,
    leave_slot,
    lowered,
    precision_of,
    prefill,
    random_tokens,
    step,
    take_slot,
    tiny_model,
)
from tilewright.compiler.driver import weight_source
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.targets.cuda.executable import CudaExecutable
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.table import (
    ADA,
    EXACT,
    FAST,
    HOPPER,
    INTERPRETER,
    STRICT,
    Gpu,
)
from tilewright.compiler.targets.cuda.kernels.experts import experts as native_experts
from tilewright.compiler.targets.cuda.kernels.experts import route as native_route
from tilewright.compiler.targets.cuda.kernels.experts.experts_triton import DECODE_PAIRS
from tilewright.compiler.targets.cuda.kernels.experts.table import INSIDE
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.cuda.steps.experts import ExpertsRunner
from tilewright.compiler.targets.cuda.weights.stream import load_weights
from tilewright.compiler.targets.program.instructions import KernelProgram, LinearOp, TopKRouteOp
from tilewright.models.config import DeltaShape

BF16 = precision_of("bf16")
CPU = torch.device("cpu")
LARGER: dict[str, Any] = {
    **{"hidden_size": 256, "num_heads": 4, "num_kv_heads": 1, "head_dim": 64},
    **{"delta": DeltaShape(2, 4, 64, 64, 4), "num_experts": 12, "experts_per_token": 3},
    **{"expert_size": 128, "shared_size": 128},
}
"""As the CUDA C++ kernels take them."""


def model_of(**changes: Any) -> Any:
    return tiny_model(std=0.05, model_type="qwen3_5_moe", **{**ON_CUDA, **changes})


def experts_of(
    precision: PrecisionConfig,
    gpu: Gpu,
    *,
    arithmetic: str = FAST,
) -> tuple[KernelProgram, ExpertsRunner]:
    model = model_of()
    plan = lower_to_program(lowered(model, target="cuda", precision=precision)[0])
    weights = load_weights(plan, weight_source(model), CPU, lambda what, done, total: None)
    return plan, ExpertsRunner(plan, weights, CPU, gpu=gpu, arithmetic=arithmetic, max_rows=4)


def test_tiles_are_large_where_experts_have_many_pairs() -> None:
    """And their weights are bfloat16, and so is arithmetic."""
    (_, dense), (_, exact) = (
        experts_of(BF16, INTERPRETER),
        experts_of(BF16, INTERPRETER, arithmetic=EXACT),
    )
    (_, blocks) = experts_of(precision_of("bfp8"), INTERPRETER)
    sizes = [each._tile_size(64 * 12, 12) for each in (dense, exact, blocks)]
    assert sizes == [128, 8, 64] and dense._tile_size(64 * 12 - 1, 12) == 64
    assert [dense._tile_size(16 * 12 + more, 12) for more in (0, 1)] == [32, 64]


def test_tiles_go_by_the_pairs_of_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that holds half of the experts computes about half of the pairs."""
    plan, experts = experts_of(BF16, INTERPRETER)
    route = next(each for each in plan.instructions if isinstance(each, TopKRouteOp))
    asked: list[tuple[int, int]] = []
    take = experts._tile_size
    monkeypatch.setattr(experts, "_tile_size", lambda *sizes: asked.append(sizes) or take(*sizes))
    some = dataclasses.replace(route, first=1, count=2)
    logits, positions = torch.randn(9, route.logits.width), torch.arange(9)
    experts._route(some, logits, positions, decodes=False)
    assert asked == [(9 * route.top_k, route.logits.width)]


def test_why_not_in_cuda_c(monkeypatch: pytest.MonkeyPatch) -> None:
    assert experts_of(BF16, INTERPRETER)[1].why_not_native == "no GPU"
    assert experts_of(BF16, HOPPER, arithmetic=EXACT)[1].why_not_native == "float32"
    assert experts_of(BF16, HOPPER)[1].why_not_native == ""
    assert experts_of(BF16, ADA)[1].why_not_native == "made for compute capability 9.0"
    monkeypatch.setattr(native_experts, "takes", lambda *_, **__: False)
    assert experts_of(BF16, HOPPER)[1].why_not_native == "4 experts of 32 columns"


@pytest.mark.parametrize(
    ("formats", "is_along"),
    [({}, True), ({"shared_ff2": "bfp8"}, False), ({"shared_ff1_3": "bfp4"}, False)],
)
def test_the_expert_of_all_tokens_runs_along_where_it_is_held_alike(
    formats: dict[str, str], is_along: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_experts, "takes", lambda *_, **__: True)
    monkeypatch.setattr(native_experts, "TILE_COLUMNS", 8)
    plan, experts = experts_of(precision_of("bf16", **formats), HOPPER)
    products = [each for each in plan.instructions if isinstance(each, LinearOp)]
    shared = [each for each in products if ".shared_expert." in each.fqn]
    assert len(shared) == 4
    along = [each for each in products if experts.runs_along(each, 1)]
    assert along == (shared if is_along else [])


@pytest.mark.parametrize(
    ("gpu", "arithmetic", "is_along"),
    [(ADA, FAST, True), (ADA, STRICT, False), (INTERPRETER, FAST, True), (ADA, EXACT, False)],
)
def test_triton_runs_the_shared_expert_with_the_experts_of_small_steps(
    gpu: Gpu, arithmetic: str, is_along: bool
) -> None:
    plan, experts = experts_of(BF16, gpu, arithmetic=arithmetic)
    products = [each for each in plan.instructions if isinstance(each, LinearOp)]
    shared = [each for each in products if ".shared_expert." in each.fqn]
    for count in (1, DECODE_PAIRS):
        along = [each for each in products if experts.runs_along(each, count)]
        assert along == (shared if is_along else [])
    assert not any(experts.runs_along(each, DECODE_PAIRS + 1) for each in products)


def holding(values: torch.Tensor) -> Any:
    """Buffers of which every place holds these values."""
    return SimpleNamespace(view=lambda place: values)


@pytest.mark.parametrize(
    ("formats", "is_inside"),
    [
        ({}, True),
        ({"shared_ff2": "bfp8"}, False),  # the shared expert is a product of its own
    ],
)
def test_one_row_s_products_find_its_experts_where_nothing_lies_between(
    formats: dict[str, str], is_inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_experts, "takes", lambda *_, **__: True)
    monkeypatch.setattr(native_experts, "TILE_COLUMNS", 8)
    routed: list[int] = []
    launched = lambda *_, **__: routed.append(1)  # noqa: E731
    monkeypatch.setattr(native_route, "route", launched)
    plan, experts = experts_of(precision_of("bf16", **formats), HOPPER)
    router = next(each for each in plan.instructions if isinstance(each, TopKRouteOp))
    for count in (1, 2):
        logits, positions = torch.randn(count, router.logits.width), torch.arange(count)
        kernel = experts._routes[id(router)].at(count)
        choice = experts._route_native(router, holding(logits), positions, kernel).choice
        assert (choice is not None) == (is_inside and count == 1)
        assert len(routed) == (choice is None) and not routed.clear()
    logits, positions = torch.randn(1, router.logits.width), torch.arange(1)
    experts.watch(lambda: experts._route_native(router, holding(logits), positions, INSIDE))
    assert routed  # whoever watches is to see which they are


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [{}, {"experts_ff1_3": "bfp8", "experts_ff2": "bfp4"}])
def test_a_hybrid_on_cuda_c_is_what_triton_makes_of_it(
    formats: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode steps behind a prompt, some rows at a time; and a row alone has the same bits"""
    precision, found = precision_of("bf16", **formats), []
    for gpu in (HOPPER, ADA):
        monkeypatch.setattr(nvrtc, "gpu_of", lambda device, gpu=gpu: gpu)
        executable = compiled(model_of(**LARGER), "cuda", precision=precision, compute="fast")
        assert isinstance(executable, CudaExecutable)
        assert ("in Triton" in executable._steps.kernels()) == (gpu is ADA)
        handles = [take_slot(executable, 40) for _ in range(3)]
        for index, handle in enumerate(handles):
            step(executable, [(handle, random_tokens(5 + 7 * index, seed=index), 0)])
        alone = copy_slot(executable, handles[1], 12)
        rows = [(handle, [7 + i], 5 + 7 * i) for i, handle in enumerate(handles)]
        together = step(executable, rows).clone()
        assert torch.equal(step(executable, [(alone, [8], 12)])[0], together[1])
        leave_slot(executable, alone)
        found += [together, prefill(executable, random_tokens(30), [20, *[1] * 10])[20:].clone()]
        executable.close()
    for ours, theirs in zip(found[:2], found[2:], strict=True):
        assert noise(ours, theirs) < BF16_NOISE


@pytest.mark.gpu
def test_a_hundred_rows_of_a_hybrid_are_near_each_alone() -> None:
    options = {"compute": "fast", "max_context": 64, "max_batch": 104}
    executable = compiled(model_of(**LARGER), "cuda", precision=BF16, **options)
    work = []
    for index in range(100):
        slot, length = take_slot(executable, 40), 5 + index % 7
        step(executable, [(slot, random_tokens(length, seed=index), 0)])
        work.append((slot, [7 + index % 30], length))
    copied = [(copy_slot(executable, slot, at), token, at) for slot, token, at in work[::25]]
    together = step(executable, work)
    alone = torch.cat([step(executable, [each]) for each in copied])
    assert noise(together[::25], alone) < BF16_NOISE
    executable.close()


@pytest.mark.gpu
@pytest.mark.parametrize("chunks", [(600,), (600, 130)])
def test_a_captured_prompt_is_one_that_is_not(chunks: tuple[int, ...]) -> None:
    """In buckets with padding, from the start and from further on: the last row's logits"""
    options = {"compute": "fast", "max_context": 1024, "max_batch": 2}
    model = model_of(**LARGER, max_positions=1024)
    executable = compiled(model, "cuda", precision=BF16, **options)
    handles = [take_slot(executable, 800) for _ in range(2)]
    tokens, first = random_tokens(sum(chunks)), 0
    for length in chunks:
        part = tokens[first : first + length]
        captured = step(executable, [(handles[0], part, first)])
        eager = step(executable, [(handles[1], part, first)], rows=range(length))
        assert noise(captured, eager[-1:]) < BF16_NOISE
        first += length
    executable.close()
