"""Lofi matmuls on e4m3 operands, and dequantized copies: values, selection and bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.targets.cuda.kernels.test_gemv import swiglu_of
from tests.targets.cuda.lofi_bounds import check_sums
from tests.tiny import compiled, lowered, precision_of, step, take_slot, tiny_model
from tilewright.compiler.driver import weight_source
from tilewright.compiler.formats import get_format
from tilewright.compiler.targets.contract.record import EMULATED, HONOURED
from tilewright.compiler.targets.cuda import memory_budget as device_module
from tilewright.compiler.targets.cuda.kernels.common.table import ADA, FAST, STRICT
from tilewright.compiler.targets.cuda.kernels.matmul import e4m3 as kernels
from tilewright.compiler.targets.cuda.kernels.matmul.table import CUBLAS
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.cuda.memory_budget import state_bytes, weight_bytes, work_bytes
from tilewright.compiler.targets.cuda.steps.cublas import codes_product
from tilewright.compiler.targets.cuda.steps.matmul import LEAST_STRICT, MatmulOps
from tilewright.compiler.targets.cuda.weights import copies as copies_module
from tilewright.compiler.targets.cuda.weights.coded import unpack_coded
from tilewright.compiler.targets.cuda.weights.copies import (
    NO_COPIES,
    DequantizedCopies,
    Kinds,
    copy_bytes,
)
from tilewright.compiler.targets.cuda.weights.e4m3 import CODES, exact_rows, round_rows, values
from tilewright.compiler.targets.cuda.weights.packing import unpack
from tilewright.compiler.targets.cuda.weights.stream import (
    Weights,
    load_weights,
    product_of,
    vector_of,
)
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.program.instructions import KernelProgram, LinearOp
from tilewright.compiler.targets.table import get_target

HERE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
SIZES: dict[str, Any] = {"num_layers": 1, "hidden_size": 64, "num_heads": 2, "num_kv_heads": 1}
BOTH, CODES_ALONE, VALUES = Kinds(values=True, codes=True), Kinds(codes=True), Kinds(values=True)
ROUNDED = Kinds(rounded=True)


def made(
    name: str, fidelity: str, kinds: Kinds
) -> tuple[KernelProgram, Weights, DequantizedCopies]:
    model = tiny_model(**SIZES, std=0.2)
    precision = precision_of(name, fidelity, kv_cache="bf16", embedding="bf16")
    graph_module, _ = lowered(model, target="cuda", precision=precision)
    plan = lower_to_program(graph_module)
    weights = load_weights(plan, weight_source(model), HERE, lambda what, done, total: None)
    return plan, weights, DequantizedCopies(plan, weights, kinds)


def products_of(
    plan: KernelProgram, weights: Weights, kinds: Kinds, *, strict: bool = False
) -> MatmulOps:
    return MatmulOps(
        plan,
        weights,
        HERE,
        max_rows=256,
        gpu=ADA,
        arithmetic=STRICT if strict else FAST,
        copies=DequantizedCopies(plan, weights, kinds),
    )


def bfp4(dense: Tensor) -> Tensor:
    return get_format("bfp4").round_trip(dense)


@given(span=st.integers(0, 15), low=st.integers(-60, 0), seed=st.integers(0, 2**20))
def test_rows_of_bfp4_are_exact_within_15_octaves(span: int, low: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    powers = torch.randint(low, low + span + 1, (8, 6, 1), generator=generator)
    powers[:, 0], powers[:, 1] = low, low + span
    blocks = torch.rand(8, 6, 16, generator=generator) * 2 - 1
    blocks[..., 0] = 1.0  # the block's exponent is that power
    dense = get_format("bfp4").round_trip((blocks * torch.exp2(powers)).view(8, 96))
    exact = exact_rows(dense)
    assert exact is not None and torch.equal(values(*exact), dense)
    assert exact[0].float().abs().max() <= 448


def test_smaller_blocks_are_exact_only_where_their_values_are_codes() -> None:
    dense = torch.zeros(1, 32)
    dense[0, 0], dense[0, 16:18] = 1.75, torch.tensor([2.0**-16, 2.0**-17])
    assert exact_rows(dense) is not None  # 4 and 2 of their block, 17 octaves above its last bit
    dense[0, 18] = 2.0**-18
    assert exact_rows(dense) is None
    assert exact_rows(torch.tensor([[1.0, 1.0625]])) is None
    nothing = exact_rows(torch.zeros(2, 16))
    assert nothing is not None and torch.equal(nothing[1], torch.ones(2, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [1, 96, 576])
def test_the_kernel_rounds_as_torch_does(
    dtype: torch.dtype, width: int, device: torch.device
) -> None:
    """All codes, ties, underflow, zeros and NaN."""
    x = torch.randn(7, width + 3) * torch.exp2(torch.randint(-9, 3, (width + 3,)))
    x[1] = 0.0
    x[2] *= 2.0**-120
    x[3] *= 2.0**100
    x[4] = torch.linspace(0.9, 1.1, width + 3) * 2.0**-9
    x[4, 0], x[5, 0], x[6, -4] = 1.0, -1.0, float("nan")
    x = x.to(device, dtype)[:, :width]
    for found, wanted in zip(kernels.round_rows(x), round_rows(x), strict=True):
        rows = slice(0, 6)  # the scale of a NaN row has no meaning
        assert torch.equal(found.view(torch.uint8)[rows], wanted.view(torch.uint8)[rows])
    assert bool(kernels.round_rows(x)[0][6].float().isnan()[width - 1])


def test_every_code_of_every_octave(device: torch.device) -> None:
    x = torch.arange(0, 1 << 16, 1 << 4, dtype=torch.int32).to(torch.int32) << 16
    x = x.view(torch.float32)
    x = torch.cat((torch.tensor([255.9]), x[(x.abs() < 256) & x.isfinite()]))[None]
    x = torch.cat((x, x * 1.0078125)).to(device)
    x[1, 0] = 255.0
    codes, scales = kernels.round_rows(x)
    assert torch.equal(scales, torch.ones_like(scales))
    assert torch.equal(codes.view(torch.uint8), x.to(torch.float8_e4m3fn).view(torch.uint8))


def test_a_row_does_not_depend_on_others(device: torch.device) -> None:
    x = torch.randn(5, 96, device=device)
    x[1] *= 1000
    codes, scales = kernels.round_rows(x)
    alone = kernels.round_rows(x[:1])
    assert torch.equal(codes[:1].view(torch.uint8), alone[0].view(torch.uint8))
    assert torch.equal(scales[:1], alone[1])


@pytest.mark.parametrize("columns", [96, 1040])
def test_scaled_products(columns: int) -> None:
    """Weight rows differ by 47 octaves. The matrix unit's sums are not float32."""
    dense = torch.randn(48, columns, device=HERE)
    dense *= torch.exp2(torch.arange(48.0, device=HERE))[:, None]
    x, exact = round_rows(torch.randn(70, columns, device=HERE)), exact_rows(bfp4(dense))
    assert exact is not None
    found = torch.full((70, 50), float("nan"), device=HERE)[:, :48]
    product = codes_product(x[0], exact[0], torch.ones((), device=HERE))
    kernels.scale_rows(found, product, x[1], exact[1])
    check_sums(found, values(*x), values(*exact))
    one = torch.ones((), device=HERE)
    rounded = codes_product(x[0], exact[0], one, dtype=torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    rounded = rounded.float() * x[1] * exact[1].T
    assert bool(((rounded - found).abs() <= 2**-8 * found.abs().amax(0)).all())
    bias, out = torch.randn(48, device=HERE), torch.ones(70, 48, device=HERE).bfloat16()
    kernels.scale_rows(out, product, x[1], exact[1], bias=bias, adds=True)
    torch.testing.assert_close(out, (found + bias + 1).bfloat16(), rtol=2**-7, atol=0.0)


def test_a_wrong_sign_is_more_than_the_matrix_unit_loses() -> None:
    x, weight = torch.randn(16, 1024), torch.randn(64, 1024)
    right = x.double() @ weight.double().T
    check_sums(right, x, weight)
    weight[5, 7] *= -1
    with pytest.raises(AssertionError, match="units of 32 instructions"):
        check_sums(right, x, weight)


@pytest.mark.parametrize(
    ("name", "fidelity", "kinds", "types"),
    [
        ("bfp4", "lofi", CODES_ALONE, {CODES}),
        ("bfp4", "hifi2", CODES_ALONE, set()),
        ("bfp4", "hifi2", BOTH, {torch.bfloat16}),
        ("bfp8", "lofi", BOTH, {torch.bfloat16}),
        ("bfp4", "lofi", NO_COPIES, set()),
        ("bfp4", "lofi", VALUES, {torch.bfloat16}),
        ("bfp4", "lofi", BOTH, {CODES, torch.bfloat16}),  # the head's rows are not a multiple of 16
        ("bf16", "lofi", BOTH, set()),
        ("q40", "lofi", BOTH, set()),
        ("q40", "lofi", ROUNDED, {torch.bfloat16}),
        ("q80", "hifi4", ROUNDED, {torch.bfloat16}),
        ("nvfp4", "lofi", ROUNDED, {torch.bfloat16}),
    ],
)
def test_what_is_held_twice(
    name: str, fidelity: str, kinds: Kinds, types: set[torch.dtype]
) -> None:
    """Copies equal the dequantized values, of codes rounded once, and the planned bytes."""
    plan, weights, copies = made(name, fidelity, kinds)
    assert {copy.values.dtype for copy in copies._copies.values()} == types
    for wanted, copy in copies._copies.items():
        packed = weights.packed(wanted)
        held = unpack_coded(packed).bfloat16().float() if kinds.rounded else unpack(packed)
        found = copy.values.float() * (1.0 if copy.scales is None else copy.scales)
        assert torch.equal(found, held)
    assert copies.num_bytes == copy_bytes(plan, kinds)
    assert copies.num_inexact == 0 and bool(copies.said()) == bool(types)
    asked = [" ".join(copies.said(each)) for each in ("none", "codes", "all")]
    nothing = [f"--weight-copies {each}: no weight is copied; " for each in ("fp8", "all")]
    assert types or (not asked[0] and all(map(str.startswith, asked[1:], nothing)))
    assert not types or asked == [*copies.said() * 3]


def test_a_weight_that_is_not_exact_keeps_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, _, copies = made("bfp4", "lofi", CODES_ALONE)
    assert f"{copies.num_lofi} of {copies.num_lofi} lofi weights, exact" in copies.said()[0]
    monkeypatch.setattr(copies_module, "exact_rows", lambda dense: None)
    plan, _, copies = made("bfp4", "lofi", CODES_ALONE)
    assert copies.num_inexact == copies.num_lofi > 0 == copies.num_bytes
    assert f"0 of {copies.num_lofi} lofi weights, exact in e4m3" in copies.said()[0]
    each = next(one for one in plan.instructions if isinstance(one, LinearOp))
    assert copies.codes_for(each, 128, decodes=True) is None


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize(("num_rows", "is_lofi"), [(64, False), (65, True), (130, True)])
def test_products_of_many_rows_have_the_bits_of_rounded_operands(
    num_rows: int, is_lofi: bool, decodes: bool
) -> None:
    """Compare all matmuls with norms and epilogues with float64."""
    plan, weights, copies = made("bfp4", "lofi", CODES_ALONE)
    products = products_of(plan, weights, CODES_ALONE)
    count = 0
    for each in (one for one in plan.instructions if isinstance(one, LinearOp)):
        columns, rows = each.weight.shape[1], each.weight.shape[0]
        x = torch.randn(num_rows, columns, device=HERE)
        x = x if each.norm is not None else x.bfloat16()
        out = torch.ones(num_rows, rows // 2 if each.swiglu else rows, device=HERE)
        out = out.bfloat16() if each.swiglu else out
        products.run(each, out, x, decodes=decodes)
        held = weights.packed(product_of(each))
        norm = None if each.norm is None else (weights.vector(vector_of(each.norm)), each.eps)
        read = products._norm(x, norm, decodes)
        read = (
            values(*round_rows(read))
            if is_lofi and copies.codes_for(each, num_rows, decodes=decodes)
            else read.float()
        )
        count += 1
        dense = unpack(held)
        if not each.swiglu:
            check_sums(
                out, read, dense, bias=torch.full((rows,), float(each.residual), device=HERE)
            )
            continue
        torch.testing.assert_close(out.double(), swiglu_of(read, dense), rtol=2e-2, atol=2e-2)
        bound, bias = products._bound(each, decodes), torch.randn(rows, device=HERE)
        if bound.codes is not None and is_lofi:
            biased = replace(bound, bias=bias)
            products._lofi_product(biased, out, x, decodes, is_ours=False)
            wanted = swiglu_of(read, dense, bias)
            torch.testing.assert_close(out.double(), wanted, rtol=2e-2, atol=2e-2)
    assert count > 2


@pytest.mark.parametrize(
    ("name", "kinds"), [("bfp8", VALUES), ("q40", ROUNDED), ("q80", ROUNDED), ("nvfp4", ROUNDED)]
)
@pytest.mark.parametrize(("rows", "expected"), [(64, False), (65, True), (128, True)])
def test_copies_of_values_are_the_librarys(
    name: str, kinds: Kinds, rows: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, weights, copies = made(name, "hifi2", kinds)
    each = next(one for one in plan.instructions if isinstance(one, LinearOp) and one.residual)
    products, copied = products_of(plan, weights, kinds), copies.values_of(each)
    assert copied is not None
    assert (products._bound(each, True).aligned.at(rows) == CUBLAS) == expected
    monkeypatch.setattr(products, "_dense", lambda *_: pytest.fail("it is held already"))
    if expected:
        x = torch.randn(rows, each.weight.shape[1], device=HERE).bfloat16()
        out = torch.zeros(rows, each.weight.shape[0], device=HERE)
        products.run(each, out, x, decodes=True)
        wanted = x.double() @ copied.double().T
        torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rows", [3, 70])
def test_strict_prompts_have_the_librarys_bits_with_copies_and_without(rows: int) -> None:
    """Values are dequantized for any row count."""
    plan, weights, _ = made("bfp8", "hifi2", VALUES)
    each = next(one for one in plan.instructions if isinstance(one, LinearOp) and one.residual)
    room = max(rows, LEAST_STRICT)
    x = torch.randn(room, each.weight.shape[1], device=HERE).bfloat16()[:rows]
    found = []
    for kinds in (NO_COPIES, VALUES):
        products = products_of(plan, weights, kinds, strict=True)
        held = weights.packed(product_of(each))
        copied = products.copies.values_of(each)
        lies = products._dense(held, held.num_rows) if copied is None else copied
        out = torch.zeros(room, each.weight.shape[0], device=HERE)[:rows]
        products.run(each, out, x, decodes=False)
        found.append((lies.stride(), out))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_the_contract_says_honoured_only_where_it_is_on() -> None:
    graph_module, _ = lowered(
        tiny_model(**SIZES), target="cuda", precision=precision_of("bfp4", "lofi")
    )

    def said(**options: Any) -> set[tuple[str, str]]:
        asked = CompileOptions(**({"compute": "fast"} | options))
        contract = get_target("cuda").contract(graph_module, asked)
        named = [each for each in contract.entries if each.field.startswith("li_")]
        return {(each.meaning.status, each.meaning.effective[:11]) for each in named}

    assert said() == {(HONOURED, "e4m3 x e4m3")}
    assert said(copies="none") == said(is_strict=True) == {(EMULATED, "bf16 x bf16")}
    assert "e4m3 x e4m3" not in {text for _, text in said(compute="exact")}


def test_a_program_holds_and_counts_its_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt in e4m3 is near the plain program, with other bits.

    Without memory, the contract reports it.
    """
    model, found, made_of = tiny_model(std=0.2, **SIZES), [], []
    plan, _, copies = made("bfp4", "lofi", BOTH)
    asked: dict[str, Any] = {"compute": "fast", "max_batch": 1, "max_context": 128}
    options = CompileOptions(**asked)
    full = weight_bytes(plan) + state_bytes(plan, options) + work_bytes(plan, options)
    for how, free in (("none", 1 << 62), ("auto", 1 << 62), ("auto", full)):
        monkeypatch.setattr(device_module, "free_bytes", lambda *_, free=free: free)
        precision = precision_of("bfp4", "lofi")
        executable = compiled(model, "cuda", precision=precision, copies=how, **asked)
        prompt = [(7 * index) % 50 for index in range(70)]
        found.append(step(executable, [(take_slot(executable, 80), prompt, 0)]))
        made_of.append(executable)
    memory = [each.memory() for each in made_of]
    assert [each.copies for each in memory] == [0, copies.num_bytes, 0]
    assert memory[1].weights - memory[0].weights == copies.num_bytes
    assert [each.notes for each in made_of] == [(), copies.said(), ()]
    is_fp8 = ["e4m3 x e4m3" in str(each.contract.entries) for each in made_of]
    assert is_fp8 == [False, True, False]
    assert torch.equal(found[0], found[2]) and not torch.equal(found[0], found[1])
    spread = float(found[0].std())
    assert float((found[0] - found[1]).pow(2).mean().sqrt()) < 0.2 * spread


@pytest.mark.parametrize("name", ["q40", "nvfp4"])
@pytest.mark.parametrize("is_strict", [False, True])
def test_program_with_rounded_copies_is_near_the_plain_program(name: str, is_strict: bool) -> None:
    """A batch-invariant program has no copies, so the bits are equal."""
    model, prompt = tiny_model(std=0.2, **SIZES), [(7 * index) % 50 for index in range(70)]
    precision, found = precision_of(name, kv_cache="bf16", embedding="bf16"), []
    for copies in ("none", "all"):
        options: dict[str, Any] = {"compute": "fast", "max_batch": 1, "max_context": 128}
        options |= {"copies": copies, "is_strict": is_strict}
        executable = compiled(model, "cuda", precision=precision, **options)
        assert ("in codes, rounded" in str(executable.notes)) == (copies == "all" and not is_strict)
        reason = "without a promise of rows' bits also of weights in codes"
        assert (reason in "".join(executable.notes)) == (copies == "all" and is_strict)
        found.append(step(executable, [(take_slot(executable, 80), prompt, 0)]))
    plain, copied = found
    assert torch.equal(plain, copied) == is_strict or name == "nvfp4"  # exact but for second scales
    assert float((plain - copied).pow(2).mean().sqrt()) < 0.02 * float(plain.std())
