"""Which routers are one launch with what chooses among their results, and what that is handed."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.targets.cuda.test_conformance_cuda import BF16_NOISE, noise
from tests.targets.cuda.test_steps_experts import BF16, CPU, LARGER, holding, model_of
from tests.tiny import compiled, lowered, random_tokens, step, take_slot, tiny_model
from tilewright.compiler.driver import weight_source
from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.compiler.targets.cuda.kernels.common.table import ADA, FAST, HOPPER, STRICT
from tilewright.compiler.targets.cuda.kernels.experts import experts as native_experts
from tilewright.compiler.targets.cuda.kernels.experts import route as native_route
from tilewright.compiler.targets.cuda.kernels.experts import router as native_router
from tilewright.compiler.targets.cuda.kernels.experts.table import CPP, JOINED
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.cuda.steps import experts as steps_experts
from tilewright.compiler.targets.cuda.steps.experts import ExpertsRunner
from tilewright.compiler.targets.cuda.steps.routes import joined_routers
from tilewright.compiler.targets.cuda.weights.stream import load_weights, product_of
from tilewright.compiler.targets.program.instructions import KernelProgram, LinearOp, TopKRouteOp


def experts_of(
    monkeypatch: pytest.MonkeyPatch, **given: Any
) -> tuple[KernelProgram, ExpertsRunner]:
    """As on a GPU that takes them."""
    monkeypatch.setattr(native_experts, "takes", lambda *_, **__: True)
    model = model_of()
    plan = lower_to_program(lowered(model, target="cuda", precision=BF16)[0])
    weights = load_weights(plan, weight_source(model), CPU, lambda what, done, total: None)
    given = {"gpu": HOPPER, "arithmetic": FAST, **given}
    return plan, ExpertsRunner(plan, weights, CPU, max_rows=64, **given)


def routers_that_run_along(plan: KernelProgram, experts: ExpertsRunner, num_rows: int) -> int:
    """Products that are part of another launch: those of routers."""
    return sum(
        isinstance(each, LinearOp) and experts.runs_along(each, num_rows)
        for each in plan.instructions
        if id(each) not in experts._along
    )


@pytest.mark.parametrize(
    ("given", "most_experts", "is_joined"),
    [
        ({}, 4, True),
        ({}, 3, False),
        ({"arithmetic": STRICT}, 4, False),
        ({"gpu": ADA}, 4, False),
    ],
)
def test_routers_of_some_rows_are_one_launch(
    given: dict[str, Any], most_experts: int, is_joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_router, "MAX_EXPERTS", most_experts)
    plan, experts = experts_of(monkeypatch, **given)
    routes = [each for each in plan.instructions if isinstance(each, TopKRouteOp)]
    found = [len(experts._routers), *(routers_that_run_along(plan, experts, n) for n in (5, 32))]
    assert found == [len(routes) if is_joined else 0] * 3
    assert not any(routers_that_run_along(plan, experts, count) for count in (1, 4, 33, 64))


def test_nothing_is_compiled_where_there_is_no_router(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be compiled for every model."""
    loaded: list[Any] = []
    monkeypatch.setattr(nvrtc, "load", lambda device, *sources: loaded.extend(sources))
    model = tiny_model()
    plan = lower_to_program(lowered(model, target="cuda", precision=BF16)[0])
    weights = load_weights(plan, weight_source(model), CPU, lambda what, done, total: None)
    assert joined_routers(plan, weights) == {}
    ExpertsRunner(plan, weights, CPU, gpu=HOPPER, arithmetic=FAST, max_rows=64)
    assert not loaded


def test_what_the_launch_is_handed(monkeypatch: pytest.MonkeyPatch) -> None:
    """x, where all logits go, and how some of them are chosen among; fewer rows go by route.cu."""
    plan, experts = experts_of(monkeypatch)
    each = next(one for one in plan.instructions if isinstance(one, TopKRouteOp))
    product = experts._routers[id(each)]
    each = dataclasses.replace(each, first=1, count=2)
    experts._routers[id(each)] = product
    views = {place: torch.randn(6, place.width) for place in (each.logits, product.out, product.x)}
    assert len(views) == 3 - (each.logits == product.out)
    seen: list[Any] = []
    monkeypatch.setattr(native_router, "router", lambda *what, **how: seen.append((what, how)))
    monkeypatch.setattr(native_route, "route", lambda *what, **how: seen.append("route"))
    positions = torch.arange(6)
    buffers: Any = SimpleNamespace(view=views.__getitem__)
    routing = experts._route_native(each, buffers, positions, JOINED)
    (what, how) = seen.pop()
    held = experts._weights.packed(product_of(product))
    wanted = routing.weights, routing.experts, views[product.out], views[product.x], held, positions
    assert all(one is other for one, other in zip(what[:-1], wanted, strict=True))
    assert what[-1] is routing.tiles[0]
    assert how == {
        "renormalise": each.renormalise,
        "num_experts": each.logits.width,
        "first": 1,
        "count": 2,
    }
    logits = torch.randn(4, each.logits.width)
    experts._route_native(each, holding(logits), positions[:4], CPP)
    assert seen == ["route"]


@pytest.mark.gpu
def test_rows_of_a_hybrid_are_what_two_launches_make_of_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = []
    for is_joined in (False, True):
        if not is_joined:
            monkeypatch.setattr(steps_experts, "joined_routers", lambda *_: {})
        options = {"compute": "fast", "max_context": 64, "max_batch": 12}
        executable = compiled(model_of(**LARGER), "cuda", precision=BF16, **options)
        assert len(executable._steps._mixers.experts._routers) == (2 if is_joined else 0)
        work = []
        for index in range(9):
            slot, length = take_slot(executable, 40), 5 + index % 7
            step(executable, [(slot, random_tokens(length, seed=index), 0)])
            work.append((slot, [7 + index], length))
        found.append(step(executable, work).clone())
        executable.close()
        monkeypatch.undo()
    assert noise(*found) < BF16_NOISE
