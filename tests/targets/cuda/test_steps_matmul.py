"""Matmuls in steps: kernels by row count."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models import test_qwen3_5_moe
from tests.targets.cuda.kernels.test_gemv import shaped
from tests.tiny import (
    compiled,
    lowered,
    precision_of,
    step,
    take_slot,
    tiny_model,
)
from tilewright.compiler.driver import weight_source
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.cuda import memory_budget as device_module
from tilewright.compiler.targets.cuda.graphs import capture
from tilewright.compiler.targets.cuda.graphs.capture import decode_buckets
from tilewright.compiler.targets.cuda.kernels.common.table import ADA, FAST, HOPPER, STRICT, Gpu
from tilewright.compiler.targets.cuda.kernels.experts import experts as native_experts
from tilewright.compiler.targets.cuda.kernels.experts.table import CPP, TRITON
from tilewright.compiler.targets.cuda.kernels.matmul import (
    e4m3,
    gemm_bf16,
    gemm_block,
    gemm_block_e4m3,
    gemm_block_triton,
    gemv,
)
from tilewright.compiler.targets.cuda.kernels.matmul import table as matmul_table
from tilewright.compiler.targets.cuda.kernels.matmul.table import (
    GEMV,
    MatmulSite,
    bind_matmul,
)
from tilewright.compiler.targets.cuda.lowering import lower_to_program
from tilewright.compiler.targets.cuda.memory_budget import work_bytes
from tilewright.compiler.targets.cuda.steps import matmul as steps_products
from tilewright.compiler.targets.cuda.steps.matmul import LEAST_STRICT, MatmulOps
from tilewright.compiler.targets.cuda.tuning import tuning
from tilewright.compiler.targets.cuda.weights.copies import NO_COPIES, DequantizedCopies, Kinds
from tilewright.compiler.targets.cuda.weights.stream import Weights, load_weights, product_of
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.program.instructions import (
    AttentionOp,
    DeltaRuleOp,
    KernelProgram,
    LinearOp,
)

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {"num_layers": 1, "hidden_size": 16, "num_heads": 1, "num_kv_heads": 1}


def test_buckets_reach_the_slots_or_the_most_rows() -> None:
    assert decode_buckets(1) == (1,)
    assert decode_buckets(33) == (1, 2, 4, 8, 16, 32, 64)
    assert decode_buckets(65)[-2:] == (64, 128)
    assert decode_buckets(129)[-2:] == (128, 192)
    assert decode_buckets(193) == decode_buckets(1000) == (*decode_buckets(192), 256)


def test_rows_take_room_for_their_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "_WORKSPACE", 0)
    plan = lower_to_program(lowered(tiny_model(), target="cuda", precision=precision_of("bf16"))[0])
    options = CompileOptions(max_batch=300, max_context=130)
    monkeypatch.setattr(capture, "MAX_DECODE_ROWS", 64)
    few = work_bytes(plan, options)
    monkeypatch.setattr(capture, "MAX_DECODE_ROWS", 256)
    width = plan.vocab_size + sum(each.width for each in plan.buffers)
    assert work_bytes(plan, options) - few == 4 * (256 - 64) * width
    assert work_bytes(plan, dataclasses.replace(options, max_batch=64)) == few


def test_rows_above_the_few_are_those_of_smaller_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare three sequences in a step with single steps. Kernels take two rows at most."""
    model, found = tiny_model(std=0.2, **SMALL), []
    for most in (2, 64):
        monkeypatch.setattr(gemv, "MAX_TOKENS", most)
        options = {"compute": "fast", "max_batch": 3, "max_context": 64}
        executable = compiled(model, "cuda", precision=precision_of("bf16"), **options)
        work = [(take_slot(executable, 8), [7 * index], 0) for index in range(3)]
        found.append(step(executable, work))
    torch.testing.assert_close(*found, rtol=2e-2, atol=2e-2)


def products_of(
    name: str,
    *,
    gpu: Gpu,
    max_rows: int = 256,
    fidelity: str = "hifi4",
    make: Callable[[], Any] = lambda: tiny_model(**SMALL),
    **changes: Any,
) -> tuple[KernelProgram, Weights, MatmulOps]:
    model = make()
    is_named = name.startswith("all-")
    precision = load_precision(name) if is_named else precision_of(name, fidelity)
    plan = lower_to_program(lowered(model, target="cuda", precision=precision)[0])
    weights = load_weights(plan, weight_source(model), CPU, lambda what, done, total: None)
    kept: dict[str, Any] = {"max_rows": max_rows, "gpu": gpu, "arithmetic": FAST}
    kept |= {"copies": NO_COPIES, **changes}
    kept["copies"] = DequantizedCopies(plan, weights, kept["copies"])
    return plan, weights, MatmulOps(plan, weights, CPU, **kept)


def take_no_rows(monkeypatch: pytest.MonkeyPatch, *modules: Any) -> None:
    """Remove kernels without rows from the table."""
    for module in modules:
        monkeypatch.setattr(module, "rows_of", lambda held, **_: range(0))


def watched(products: MatmulOps, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record kernels and row counts without computation."""
    seen: list[str] = []

    def ran(kernel: str) -> Callable[..., None]:
        return lambda out, x, *_, **__: seen.append(f"{kernel} {len(x)}")

    for module, kernel in ((gemv, "native"), (gemm_block, "gemm_block"), (gemm_bf16, "dense")):
        monkeypatch.setattr(module, "linear", ran(kernel))
    monkeypatch.setattr(products, "_library_product", lambda each, *rest: ran("library")(*rest))
    return seen


@pytest.mark.parametrize(
    ("name", "decodes", "num_rows", "expected"),
    [
        ("bf16", True, 16, ["native 16"]),
        ("bf16", True, 130, ["library 130"]),
        ("bfp8", True, 130, ["library 130"]),
        ("bfp8", True, 64, ["native 64"]),
        ("bfp4", False, 130, ["library 130"]),
        ("bfp4", False, 64, ["native 64"]),
    ],
)
def test_which_product_takes_so_many_rows(
    name: str, decodes: bool, num_rows: int, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    take_no_rows(monkeypatch, gemm_bf16, gemm_block)
    plan, _, products = products_of(name, gpu=HOPPER)
    each = next(one for one in plan.instructions if isinstance(one, LinearOp) and one.residual)
    seen: list[str] = []

    def product(out: torch.Tensor, x: torch.Tensor, *_: Any, num_tokens: int, **__: Any) -> None:
        assert len(out) == len(x) == num_tokens
        seen.append(f"native {num_tokens}")

    monkeypatch.setattr(gemv, "linear", product)
    rows = f"library {num_rows}"
    monkeypatch.setattr(MatmulOps, "_library_product", lambda *_: seen.append(rows))
    x = torch.zeros(num_rows, each.weight.shape[1], dtype=torch.bfloat16)
    products.run(each, torch.zeros(num_rows, each.weight.shape[0]), x, decodes=decodes)
    assert seen == expected


@pytest.mark.parametrize(
    ("name", "max_rows", "is_wide", "expected"),
    [
        ("bf16", 16, True, {1: "native 1", 16: "native 16"}),
        ("bf16", 32, True, {1: "native 1", 17: "native 17", 32: "native 32"}),
        ("bf16", 64, True, {1: "library 16", 16: "library 16", 17: "library 17"}),
        ("bf16", 256, True, {1: "library 16", 64: "library 64", 256: "library 256"}),
        (
            "bfp8",
            256,
            True,
            {1: "native 1", 16: "native 16", 17: "gemm_block 17", 256: "gemm_block 256"},
        ),
        ("bfp4", 256, False, {1: "native 1", 64: "native 64", 65: "native 64, native 1"}),
    ],
)
def test_strict_steps_take_a_weight_by_one_order_of_sums(
    name: str,
    max_rows: int,
    is_wide: bool,
    expected: dict[int, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Either our kernels with equal bits, or cuBLAS, for all rows.

    Copies for cuBLAS do not change this. Prompts always use cuBLAS.
    """
    take_no_rows(monkeypatch, gemm_block)
    if is_wide:
        monkeypatch.setattr(gemm_block, "rows_of", lambda held, same_bits: range(17, 513))
    plan, _, products = products_of(
        name, gpu=HOPPER, max_rows=max_rows, arithmetic=STRICT, copies=Kinds(values=True)
    )
    each = next(one for one in plan.instructions if isinstance(one, LinearOp) and one.residual)
    seen = watched(products, monkeypatch)
    rows, columns = each.weight.shape
    x = torch.zeros(max_rows, columns, dtype=torch.bfloat16)
    out = torch.zeros(max_rows, rows)
    for count, kernels in expected.items():
        seen.clear()
        products.run(each, out[:count], x[:count], decodes=True)
        assert ", ".join(seen) == kernels
        seen.clear()
        products.run(each, out[:count], x[:count], decodes=False)
        assert seen == [f"library {max(count, LEAST_STRICT)}"]


@pytest.mark.parametrize(
    ("strict", "expected"),
    [
        (False, {4: "native 4", 5: "dense 5", 64: "dense 64", 65: "library 65"}),
        (True, {5: "library 16", 64: "library 64"}),
    ],
)
def test_rows_of_bfloat16_go_through_our_own_kernels_where_no_bits_are_promised(
    strict: bool, expected: dict[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, _, products = products_of("bf16", gpu=HOPPER, arithmetic=STRICT if strict else FAST)
    each = next(one for one in plan.instructions if isinstance(one, LinearOp) and one.residual)
    seen = watched(products, monkeypatch)
    rows, columns = each.weight.shape
    x = torch.zeros(max(expected), columns, dtype=torch.bfloat16)
    out = torch.zeros(max(expected), rows)
    for count in expected:
        products.run(each, out[:count], x[:count], decodes=True)
    assert seen == list(expected.values())
    apart = torch.zeros(16, columns + 4, dtype=torch.bfloat16)[:8, :columns]
    products.run(each, out[:8], apart, decodes=True)
    assert "dense" not in seen[-1], "rows that the copy engine does not find"
    monkeypatch.setattr(products, "_norm", lambda x, norm, decodes: x.bfloat16())
    first = plan.products[0]
    x = torch.zeros(16, first.weight.shape[1] + 4)[:8, : first.weight.shape[1]]
    products.run(first, torch.zeros(16, first.weight.shape[0])[:8], x, decodes=True)
    assert ("dense" in seen[-1]) == (not strict), "a norm lies in whole tiles"


def test_codes_of_large_weights_go_through_our_own_kernels_up_to_64_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gemm_bf16, "num_processors", lambda device: 132)
    plan, _, products = products_of(
        "bfp4",
        gpu=HOPPER,
        copies=Kinds(codes=True),
        fidelity="lofi",
        make=lambda: tiny_model(num_layers=1, hidden_size=64),
    )
    each = next(one for one in plan.instructions if isinstance(one, LinearOp) and one.residual)
    seen: list[str] = []
    given: list[torch.Tensor] = []
    weights_seen: list[Any] = []

    def run_codes(
        _: torch.Tensor, x: tuple[torch.Tensor, torch.Tensor], *args: Any, **__: Any
    ) -> None:
        seen.append(f"codes {len(x[0])}")
        given.extend((*x, args[1]))
        weights_seen.append(args[0])

    monkeypatch.setattr(gemm_block_e4m3, "linear", run_codes)
    monkeypatch.setattr(gemv, "linear", lambda *_, num_tokens, **__: seen.append(f"{num_tokens}"))
    monkeypatch.setattr(
        gemm_block, "linear", lambda _, x, *__, **___: seen.append(f"block {len(x)}")
    )
    monkeypatch.setattr(
        steps_products, "codes_product", lambda x, *_: seen.append("library") or given.append(x)
    )
    monkeypatch.setattr(steps_products, "scale_rows", lambda *_, **__: None)
    rows, columns = each.weight.shape
    x = torch.randn(65, columns).bfloat16()

    def kernels_of(*counts: int) -> list[str]:
        seen.clear()
        for count in counts:
            products.run(each, torch.zeros(65, rows)[:count], x[:count], decodes=True)
        return list(seen)

    assert kernels_of(16, 17, 32, 33) == ["16", "block 17", "block 32", "library"]
    monkeypatch.setattr(gemm_bf16, "_MIN_LARGE_TURNS", 0)  # as if the weight were large
    products._matmuls.clear()
    assert kernels_of(33, 64, 65) == ["codes 33", "codes 64", "library"]
    given.clear()
    kernels_of(64, 65)
    bound = products._bound(each, True)
    copy = bound.codes
    assert weights_seen[-1] is bound.packed
    assert copy is not None and given[2] is copy.scales
    for found, count in ((given[0], 64), (given[3], 65)):
        wanted, scales = e4m3.round_rows(x[:count], is_arranged=count == 64)
        assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8))
        assert count == 65 or torch.equal(given[1], scales)
    normed = next(one for one in plan.instructions if isinstance(one, LinearOp) and one.norm)
    monkeypatch.setattr(
        gemm_block_e4m3,
        "norm_codes",
        lambda x, *_, is_arranged: seen.append(f"norm {is_arranged}") or (x, x),
    )
    rows, columns = normed.weight.shape
    seen.clear()
    for count in (64, 65):
        out = torch.zeros(count, rows)
        products.run(normed, out, torch.randn(count, columns), decodes=True)
    assert seen == ["norm True", "codes 64", "norm False", "library"]


@pytest.mark.parametrize(
    ("make", "precision", "least"),
    [
        (lambda: tiny_model(**SMALL), "bfp8", 5),
        (lambda: tiny_model(**SMALL), "bf16", 33),
        (test_qwen3_5_moe.make, "bf16", 5),
    ],
    ids=["blocks", "bf16", "linear attention"],
)
def test_only_attention_and_the_delta_rule_wait_for_a_product_to_end(
    make: Callable[[], Any], precision: str, least: int
) -> None:
    """Only the previous matmul."""
    plan, weights, products = products_of(precision, gpu=HOPPER, make=make)
    mixers = [one for one in plan.instructions if isinstance(one, AttentionOp | DeltaRuleOp)]
    held = [weights.packed(product_of(one)) for one in plan.products]

    def alone(num_rows: int) -> list[bool]:
        pairs = zip(plan.products, held, strict=True)
        return [products._is_alone(one, kept, num_rows) for one, kept in pairs]

    before = [products._before_mixers.get(id(one)) for one in plan.products]
    assert [one for one in before if one is not None] == mixers
    assert not any(alone(least - 1))
    first = next(at for at, one in enumerate(before) if one is mixers[0])
    assert alone(least)[first] and alone(33) == [one is not None for one in before]


def take_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make all block-format weights large."""
    matmul = {**tuning()["matmul"]}
    matmul["gemv_parts"] = {**matmul["gemv_parts"], "max_dequantized_out_features": 0}
    monkeypatch.setattr(matmul_table, "tuning", lambda: {"matmul": matmul})


def test_of_a_product_in_parts_the_last_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    take_parts(monkeypatch)
    take_no_rows(monkeypatch, gemm_block)
    plan, _, products = products_of("bfp8", gpu=HOPPER)
    first, seen = plan.products[0], []
    monkeypatch.setattr(gemv, "linear", lambda *_, alone, **__: seen.append(alone))
    monkeypatch.setattr(products, "_norm", lambda x, norm, decodes: x)
    rows, columns = first.weight.shape
    x = torch.zeros(100, columns, dtype=torch.bfloat16)
    products.run(first, torch.zeros(100, rows), x, decodes=True)
    assert seen == [False, True]


@pytest.mark.parametrize("strict", [False, True])
def test_only_strict_steps_keep_the_bits_of_few_rows(
    strict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a weight with a split K. Other weights are not dequantized for prompts up to 512 rows."""
    monkeypatch.setattr(gemm_block, "_LEAST_WHOLE", 1)
    plan, _, products = products_of("bfp8", gpu=HOPPER, arithmetic=STRICT if strict else FAST)
    each = next(one for one in plan.instructions if isinstance(one, LinearOp) and one.residual)
    ways: list[Any] = []

    def choose(held: Any, num_tokens: int, *, same_bits: bool) -> Any:
        return gemm_block.BlockTileConfig(8, 4, is_whole=not same_bits)

    monkeypatch.setattr(gemm_block, "choose_way", choose)
    monkeypatch.setattr(gemm_block, "linear", lambda *_, way, **__: ways.append(way.is_whole))
    monkeypatch.setattr(products, "_library_product", lambda *_: ways.append("library"))
    rows, columns = each.weight.shape
    x = torch.zeros(300, columns, dtype=torch.bfloat16)
    for count in (128, 300):
        products.run(each, torch.zeros(count, rows), x[:count], decodes=not strict or count == 128)
    assert ways == ([False, "library"] if strict else [True, True])


@pytest.mark.parametrize("decodes", [True, False])
def test_few_rows_of_a_strict_step_are_the_library_s_of_more(decodes: bool) -> None:
    """cuBLAS also gets the padding rows, whose results are not read."""
    plan, _, products = products_of("bf16", gpu=ADA, max_rows=64, arithmetic=STRICT)
    for each in (one for one in plan.instructions if isinstance(one, LinearOp)):
        rows, columns = each.weight.shape
        x = torch.randn(64, columns)
        x = x if each.norm is not None else x.bfloat16()
        width = rows // 2 if each.swiglu else rows
        out = torch.ones(64, width, dtype=torch.bfloat16 if each.swiglu else torch.float32)
        alone, many = out.clone(), out.clone()
        products.run(each, alone[:3], x[:3], decodes=decodes)
        products.run(each, many, x, decodes=decodes)
        torch.testing.assert_close(alone[:3], many[:3], rtol=2e-2, atol=1e-4)
        assert torch.equal(alone[LEAST_STRICT:], out[LEAST_STRICT:])
        assert not torch.equal(alone[:3], out[:3])


@pytest.mark.parametrize("decodes", [True, False])
@pytest.mark.parametrize("name", ["bf16", "bfp8", "all-q40"])
@pytest.mark.parametrize("gpu", [ADA, HOPPER])
def test_float32_rows_without_a_norm_are_rounded(
    gpu: Gpu, name: str, decodes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with its norms after its layers has such rows."""

    def make() -> Any:
        return tiny_model(**SMALL | {"hidden_size": 64, "intermediate_size": 64})

    seen: list[torch.Tensor] = []
    modules = (gemv, gemm_block, gemm_block_triton, gemm_bf16)
    ours = [(module, "linear") for module in modules]
    others = [(steps_products, f"{one}_linear") for one in ("triton", "coded")]
    for module, kernel in (*ours, *others, (steps_products, "add_product")):
        monkeypatch.setattr(module, kernel, lambda out, x, *_, **__: seen.append(x.clone()))
    plan, _, products = products_of(name, gpu=gpu, make=make)
    each = next(one for one in plan.products if one.norm is None)
    rows, columns = each.weight.shape
    for count in (1, 20, 200):
        x = torch.randn(count, columns)
        products.run(each, torch.zeros(count, rows), x, decodes=decodes)
        assert torch.equal(torch.cat(seen), x.bfloat16())
        seen.clear()


def test_strict_prompts_of_codes_run_the_kernels_of_decode_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def make() -> Any:
        return tiny_model(**SMALL | {"hidden_size": 64, "intermediate_size": 64})

    plan, _, matmuls = products_of("all-q40", gpu=HOPPER, max_rows=16, arithmetic=STRICT, make=make)
    seen = watched(matmuls, monkeypatch)
    op = next(op for op in plan.products if op.residual)
    x, out = torch.zeros(1100, 64).bfloat16(), torch.zeros(1100, 64)
    for count in (1, 32, 33, 512, 1100):
        matmuls.run(op, out[:count], x[:count], decodes=False)
    assert seen[:4] == ["native 1", "native 32", "gemm_block 33", "gemm_block 512"]
    assert seen[4:] == [f"gemm_block {count}" for count in (384, 384, 332)]


def test_large_weights_in_blocks_are_products_of_64_rows_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Measured as faster for shapes of an 8B model."""
    take_no_rows(monkeypatch, gemm_block)

    def in_parts(kind: str, rows: int, columns: int) -> list[bool]:
        site = MatmulSite(shaped(kind, rows, columns), True, FAST, HOPPER)
        return [bind_matmul(site).at(count) == GEMV for count in (65, 128, 129)]

    shapes = ((28672, 4096), (4096, 14336), (6144, 4096), (128256, 4096))
    found = [in_parts("bfp8", *shape) for shape in shapes]
    assert found == [[True, True, False]] * 2 + [[False] * 3, [True] * 3]
    assert not any(in_parts("bf16", 128256, 4096))
    take_parts(monkeypatch)
    plan, _, products = products_of("bfp8", gpu=HOPPER)
    each = next(one for one in plan.instructions if isinstance(one, LinearOp) and one.residual)
    seen: list[int] = []
    monkeypatch.setattr(gemv, "linear", lambda out, *_, **__: seen.append(len(out)))
    x = torch.zeros(130, each.weight.shape[1], dtype=torch.bfloat16)
    products.run(each, torch.zeros(130, each.weight.shape[0]), x, decodes=True)
    assert seen == [64, 64, 2]


def test_experts_of_more_than_64_rows_take_the_kernels_of_prompts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tests.targets.cuda.test_steps_experts import model_of
    from tilewright.compiler.targets.cuda.steps.experts import ExpertsRunner

    monkeypatch.setattr(native_experts, "takes", lambda *_, **__: True)
    plan = lower_to_program(lowered(model_of(), target="cuda", precision=precision_of("bf16"))[0])
    weights = load_weights(plan, weight_source(model_of()), CPU, lambda what, done, total: None)
    experts = ExpertsRunner(plan, weights, CPU, gpu=HOPPER, arithmetic=FAST, max_rows=256)
    assert [{each.at(n) for each in experts._routes.values()} for n in (64, 65)] == [
        {CPP},
        {TRITON},
    ]


@pytest.mark.parametrize("make", [lambda: tiny_model(**SMALL), test_qwen3_5_moe.make])
def test_steps_hash_no_recipe(make: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are bound to instructions, because expert recipes have hundreds of segments."""
    options = {"compute": "fast", "max_batch": 2, "max_context": 64}
    executable = compiled(make(), "cuda", precision=precision_of("bf16"), **options)
    slot = take_slot(executable, 8)
    for at in (0, 1):
        step(executable, [(slot, [7], at)])
    monkeypatch.setattr(WeightRecipe, "__hash__", lambda self: pytest.fail("a recipe is hashed"))
    step(executable, [(slot, [8], 2)])
