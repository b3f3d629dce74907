"""Norms that no product asks for: which are made inside of the product behind, and that they are
left where the others look for them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.targets.cuda.test_steps_experts import BF16, model_of
from tests.targets.cuda.test_steps_matmul import products_of
from tests.tiny import lowered
from tilewright.compiler.driver import weight_source
from tilewright.compiler.targets.cuda.kernels.common.table import FAST, HOPPER, STRICT
from tilewright.compiler.targets.cuda.kernels.matmul import gemv
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.cuda.steps.buffers import Buffers, padded
from tilewright.compiler.targets.cuda.steps.matmul import LEAST_STRICT
from tilewright.compiler.targets.cuda.steps.norms import Norms
from tilewright.compiler.targets.cuda.steps.plan_readers import norms_before
from tilewright.compiler.targets.cuda.weights.copies import NO_COPIES, Kinds
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight
from tilewright.compiler.targets.cuda.weights.stream import load_weights, vector_of
from tilewright.compiler.targets.program.instructions import OPERAND, LinearOp, NormOp, TopKRouteOp

CPU = torch.device("cpu")


class SmallM:
    """Products that are all of few rows'."""

    def takes_small_m(self, each: LinearOp) -> bool:
        return True


@pytest.mark.parametrize("num_rows", [1, 2])
def test_one_row_s_norm_is_made_by_the_router(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = model_of()
    plan = lower_to_program(lowered(model, target="cuda", precision=BF16)[0])
    weights = load_weights(plan, weight_source(model), CPU, lambda what, done, total: None)
    launched = []

    def rms_norm(out: Tensor, x: Tensor, weight: Tensor, *, eps: float, num_tokens: int) -> None:
        launched.append("norm")
        assert num_tokens == len(x)
        out.copy_(x * torch.rsqrt(x.square().mean(1, keepdim=True) + eps) * weight)

    def linear(out: Tensor, x: Tensor, held: PackedWeight, **given: Any) -> None:
        weight, eps = given["norm"]
        rms_norm(given["normed"], x, weight, eps=eps, num_tokens=given["num_tokens"])
        launched[-1] = "product"
        y = given["normed"].float() @ held.data[: held.num_rows, : x.shape[1]].float().T
        out.copy_(y)

    monkeypatch.setattr(gemv, "rms_norm", rms_norm)
    monkeypatch.setattr(gemv, "linear", linear)
    products: Any = SmallM()
    norms = Norms(plan, weights, products, gpu=HOPPER, arithmetic=FAST)
    flat = [
        torch.randn(num_rows * padded(each.width)).to(
            torch.bfloat16 if each.role == OPERAND else torch.float32
        )
        for each in plan.buffers
    ]
    step = Buffers(plan, flat, num_rows)
    found = [index for index, each in enumerate(plan.instructions) if isinstance(each, NormOp)]
    assert len(found) == sum(isinstance(each, TopKRouteOp) for each in plan.instructions)
    is_inside = num_rows == 1
    for index in found:
        norm, router = plan.instructions[index : index + 2]
        assert isinstance(norm, NormOp) and isinstance(router, LinearOp)
        step.view(norm.out).fill_(float("nan"))
        norms.run(norm, step, decodes=True)
        assert bool(step.view(norm.out).isnan().all()) == is_inside
        assert norms.run_product(router, step, num_rows) == is_inside
        x = step.view(norm.x)
        weight = weights.vector(vector_of(norm.weight))
        want = x * torch.rsqrt(x.square().mean(1, keepdim=True) + norm.eps) * weight
        assert torch.equal(step.view(norm.out), want.bfloat16())
    assert launched == ["product" if is_inside else "norm"] * len(found)


def test_only_a_product_right_behind_that_reads_a_norm_makes_it() -> None:
    plan = lower_to_program(lowered(model_of(), target="cuda", precision=BF16)[0])
    at = next(i for i, each in enumerate(plan.instructions) if isinstance(each, NormOp))
    norm, router = plan.instructions[at : at + 2]
    assert isinstance(norm, NormOp) and isinstance(router, LinearOp)

    def makes(*instructions: Any) -> bool:
        return bool(norms_before(replace(plan, instructions=instructions)))

    assert makes(norm, router)
    assert not makes(norm, plan.instructions[at + 2], router)
    assert not makes(norm, replace(router, residual=True))
    assert not makes(norm, replace(router, norm=norm.weight))
    assert not makes(norm, replace(router, x=norm.x))
    assert not makes(norm, replace(router, out=replace(router.out, buffer=norm.x.buffer)))


@pytest.mark.parametrize(
    ("name", "copies"),
    [("bf16", NO_COPIES), ("bfp8", NO_COPIES), ("bfp8", Kinds(values=True))],
)
@pytest.mark.parametrize("strict", [False, True])
def test_takes_few_is_what_a_product_of_one_row_does(
    name: str, copies: Kinds, strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _, products = products_of(
        name, gpu=HOPPER, arithmetic=STRICT if strict else FAST, copies=copies, max_rows=64
    )
    ran: list[bool] = []
    monkeypatch.setattr(gemv, "linear", lambda *_, **__: ran.append(True))
    monkeypatch.setattr(products, "_norm", lambda x, norm, decodes: x)
    for each in plan.products:
        ran.clear()
        rows, columns = each.weight.shape
        kind = torch.bfloat16 if each.swiglu else torch.float32
        out = torch.zeros(LEAST_STRICT, rows // (2 if each.swiglu else 1), dtype=kind)
        x = torch.zeros(LEAST_STRICT, columns, dtype=torch.bfloat16)
        products.run(replace(each, norm=None), out[:1], x[:1], decodes=True)
        assert bool(ran) == products.takes_small_m(each)
