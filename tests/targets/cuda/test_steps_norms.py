"""Norms that no product asks for: which are made inside of the product behind, and that they are
left where the others look for them.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.targets.cuda.test_steps_experts import BF16, model_of
from tests.tiny import lowered
from tilewright.compiler.driver import weight_source
from tilewright.compiler.targets.cuda.buffers import Buffers, padded
from tilewright.compiler.targets.cuda.held import HeldWeight
from tilewright.compiler.targets.cuda.kernels import native
from tilewright.compiler.targets.cuda.plan import make_plan
from tilewright.compiler.targets.cuda.readers import norms_before
from tilewright.compiler.targets.cuda.steps_norms import Norms
from tilewright.compiler.targets.cuda.trials import Trials
from tilewright.compiler.targets.cuda.weights import load_weights, vector_of
from tilewright.compiler.targets.program.instructions import OPERAND, Linear, Norm, Route

CPU = torch.device("cpu")


class Few:
    """Products that are all of few rows'."""

    def takes_few(self, each: Linear) -> bool:
        return True


@pytest.mark.parametrize("norms_are", ["apart", "inside"])
@pytest.mark.parametrize("num_rows", [1, 2])
def test_one_row_s_norm_is_made_by_the_router(
    num_rows: int, norms_are: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    plan = make_plan(lowered(model, target="cuda", precision=BF16)[0])
    weights = load_weights(plan, weight_source(model), CPU, lambda what, done, total: None)
    launched = []

    def rms_norm(out: Tensor, x: Tensor, weight: Tensor, *, eps: float, num_tokens: int) -> None:
        launched.append("norm")
        assert num_tokens == len(x)
        out.copy_(x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps) * weight)

    def linear(out: Tensor, x: Tensor, held: HeldWeight, **given: Any) -> None:
        weight, eps = given["norm"]
        rms_norm(given["normed"], x, weight, eps=eps, num_tokens=given["num_tokens"])
        launched[-1] = "product"
        y = given["normed"].float() @ held.data[: held.num_rows, : x.shape[1]].float().T
        out.copy_(y)

    monkeypatch.setattr(native, "rms_norm", rms_norm)
    monkeypatch.setattr(native, "linear", linear)
    products: Any = Few()
    norms = Norms(plan, weights, products, is_native=True, trials=Trials(norms=norms_are))
    flat = [
        torch.randn(num_rows * padded(each.width)).to(
            torch.bfloat16 if each.role == OPERAND else torch.float32
        )
        for each in plan.buffers
    ]
    step = Buffers(plan, flat, num_rows)
    found = [index for index, each in enumerate(plan.instructions) if isinstance(each, Norm)]
    assert len(found) == sum(isinstance(each, Route) for each in plan.instructions)
    is_inside = num_rows == 1 and norms_are == "inside"
    for index in found:
        norm, router = plan.instructions[index : index + 2]
        assert isinstance(norm, Norm) and isinstance(router, Linear)
        step.view(norm.out).fill_(float("nan"))
        norms.run(norm, step, decodes=True)
        assert bool(step.view(norm.out).isnan().all()) == is_inside
        assert norms.run_product(router, step, num_rows) == is_inside
        x = step.view(norm.x)
        weight = weights.vector(vector_of(norm.weight))
        want = x * torch.rsqrt(x.square().mean(1, keepdim=True) + norm.eps) * weight
        assert torch.equal(step.view(norm.out), want.bfloat16())
    assert launched == ["product" if is_inside else "norm"] * len(found)


def test_a_norm_is_left_alone_where_its_product_adds_to_what_it_reads() -> None:
    plan = make_plan(lowered(model_of(), target="cuda", precision=BF16)[0])
    before = norms_before(plan)
    routers = [
        each for each in plan.instructions if isinstance(each, Linear) and id(each) in before
    ]
    assert routers and all("gate" in each.fqn for each in routers)
    assert all(before[id(each)].out == each.x for each in routers)
