"""The fused product against its parts, whichever of them it has."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tilewright.compiler import ops
from tilewright.compiler.ops import Cost, FusedArguments

T, C, WIDTH = 5, 24, 14  # tokens, channels, outputs of the weight
EPS = 1e-2  # large enough to be missed where it is left out

FORMS = [
    pytest.param(form, id="-".join(name for name, has in form.items() if has) or "plain")
    for form in (
        dict(zip(("bias", "norm", "residual", "swiglu"), chosen, strict=True))
        for chosen in product((False, True), repeat=4)
    )
]


def arguments(form: dict[str, bool]) -> FusedArguments:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    return FusedArguments(
        random(T, C),
        random(WIDTH, C),
        random(WIDTH) if form["bias"] else None,
        random(C) if form["norm"] else None,
        EPS if form["norm"] else 0.0,
        random(T, WIDTH // 2 if form["swiglu"] else WIDTH) if form["residual"] else None,
        form["swiglu"],
    )


def by_parts(args: FusedArguments) -> Tensor:
    x = args.x
    if args.norm_weight is not None:
        x = x / (x.pow(2).mean(-1, keepdim=True) + args.eps).sqrt() * args.norm_weight
    y: Tensor = x @ args.weight.T
    if args.bias is not None:
        y = y + args.bias
    if args.swiglu:
        gate, up = y[:, : WIDTH // 2], y[:, WIDTH // 2 :]
        y = gate * torch.sigmoid(gate) * up
    return y if args.residual is None else args.residual + y


@pytest.mark.parametrize("form", FORMS)
def test_it_is_its_parts(form: dict[str, bool]) -> None:
    args = arguments(form)
    torch.testing.assert_close(ops.fused_linear(*args), by_parts(args), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_the_fake_and_the_schema_tell_the_truth(form: dict[str, bool]) -> None:
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.fused_linear.overload, tuple(arguments(form)), test_utils=checks)


def test_without_neighbours_it_is_linear() -> None:
    x, weight, bias = torch.randn(T, C), torch.randn(WIDTH, C), torch.randn(WIDTH)
    assert torch.equal(ops.fused_linear(x, weight), ops.linear(x, weight))
    assert torch.equal(ops.fused_linear(x, weight, bias), ops.linear(x, weight, bias))


def test_the_norm_is_rms_norm_in_any_dtype() -> None:
    x = torch.full((1, C), 300.0, dtype=torch.float16)  # squares overflow float16
    weight, ones = torch.eye(C, dtype=torch.float16), torch.ones(C, dtype=torch.float16)
    got = ops.fused_linear(x, weight, None, ones, 1e-6)
    assert got.dtype == torch.float16
    torch.testing.assert_close(got, torch.ones_like(x))


def test_arguments_of_either_op_are_read() -> None:
    x, weight, bias = torch.randn(T, C), torch.randn(WIDTH, C), torch.randn(WIDTH)
    assert FusedArguments.of((x, weight)) == (x, weight, None, None, 0.0, None, False)
    assert FusedArguments.of([x, weight, bias]).bias is bias
    whole = arguments({"bias": True, "norm": True, "residual": True, "swiglu": True})
    assert FusedArguments.of(tuple(whole)) == whole


@pytest.mark.parametrize("form", FORMS)
def test_the_cost_is_the_products_and_no_result_moves_twice(form: dict[str, bool]) -> None:
    args = arguments(form)
    read = T * C + WIDTH * C
    read += C if form["norm"] else 0
    written = T * WIDTH // 2 if form["swiglu"] else T * WIDTH
    read += written if form["residual"] else 0
    assert ops.fused_linear.cost(*args) == Cost(2.0 * T * WIDTH * C, read, written)
    fakes = [a.to("meta") if isinstance(a, Tensor) else a for a in args]
    assert ops.fused_linear.cost(*fakes) == ops.fused_linear.cost(*args)


class _Namespaces(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        self.seen.add(func.namespace)
        return func(*args, **(kwargs or {}))


def test_the_reference_is_plain_torch() -> None:
    """What is exported by calling references must meet no operator of ours inside them."""
    args = arguments({"bias": True, "norm": True, "residual": True, "swiglu": True})
    with _Namespaces() as mode:
        ops.fused_linear.reference(*args)
    assert mode.seen == {"aten"}
