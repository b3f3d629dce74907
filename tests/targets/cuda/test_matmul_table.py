"""Kernel of each matmul by weight format, shape, arithmetic and rows: a golden text.

The kernels are recorded, not run. The device has 132 multiprocessors and all kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.tiny import check_golden
from tilewright.compiler.ir.info import Compute
from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.targets.cuda.kernels.common.table import (
    ADA,
    EXACT,
    FAST,
    HOPPER,
    STRICT,
)
from tilewright.compiler.targets.cuda.kernels.matmul import (
    gemm_bf16,
    gemm_block,
    gemm_block_e4m3,
    gemm_block_triton,
    gemm_swiglu_bf16,
    gemv,
)
from tilewright.compiler.targets.cuda.kernels.matmul import table as matmul_table
from tilewright.compiler.targets.cuda.steps import matmul
from tilewright.compiler.targets.cuda.steps.matmul import MatmulOps
from tilewright.compiler.targets.cuda.weights.copies import DequantizedCopies, DequantizedCopy
from tilewright.compiler.targets.cuda.weights.packed_weight import PackedWeight
from tilewright.compiler.targets.cuda.weights.stream import product_of
from tilewright.compiler.targets.program.instructions import BufferView, LinearOp

META = torch.device("meta")
SHAPES = {
    "8b gate up": (28672, 4096, "swiglu"),
    "8b down": (4096, 14336, "residual"),
    "8b qkv": (6144, 4096, ""),
    "8b head": (128256, 4096, ""),
    "1b gate up": (16384, 2048, "swiglu"),
    "1b qkv": (3072, 2048, ""),
    "odd": (300, 102, "residual"),
}
COUNTS = (*range(1, 66), 96, 127, 128, 129, 192, 256, 257, 300, 512, 513, 1024, 4096, 4097)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that run from now on."""
    seen: list[str] = []

    def recorded(name: str, *, shows: tuple[str, ...] = ()) -> Callable[..., Any]:
        def run(*operands: Any, **options: Any) -> Any:
            shown = [f"{key} {_short(options[key])}" for key in shows if options.get(key)]
            seen.append(" ".join((name, *shown)))
            return operands[0] if name.startswith("cublas e4m3") else None

        return run

    for module in (gemm_bf16, gemm_block, matmul_table):
        monkeypatch.setattr(module, "num_processors", lambda device: 132)
    monkeypatch.setattr(gemv, "linear", recorded("gemv", shows=("alone",)))
    monkeypatch.setattr(gemm_block, "linear", recorded("block", shows=("way", "alone", "feeds")))
    monkeypatch.setattr(gemm_block_triton, "linear", recorded("block triton"))
    monkeypatch.setattr(gemm_block_e4m3, "linear", recorded("block e4m3", shows=("alone", "feeds")))
    monkeypatch.setattr(gemm_bf16, "linear", recorded("dense", shows=("alone", "feeds")))
    monkeypatch.setattr(gemm_swiglu_bf16, "swiglu", recorded("swiglu", shows=("alone",)))
    names = {"store_product": "cublas", "add_product": "cublas", "triton_linear": "triton"}
    names |= {"coded_linear": "coded", "codes_product": "cublas e4m3"}
    for function, name in names.items():
        monkeypatch.setattr(matmul, function, recorded(name))
    monkeypatch.setattr(torch, "mm", recorded("cublas"))
    for function in ("swiglu", "scale_rows"):
        monkeypatch.setattr(matmul, function, lambda *_, **__: None)
    monkeypatch.setattr(matmul, "dequantise", recorded("dequantize"))
    monkeypatch.setattr(MatmulOps, "_norm", lambda self, x, norm, decodes: x)
    monkeypatch.setattr(MatmulOps, "_codes", lambda self, x, *_, **__: (x, x))
    return seen


def selections(kernels: list[str]) -> Iterator[str]:
    """Yield a line a case: ranges of rows with the kernels that run."""
    arithmetics: tuple[dict[str, Any], ...] = (
        {"arithmetic": EXACT},
        {"gpu": ADA},
        {},
        {"arithmetic": STRICT},
    )
    for kind, name, copies, how in product(
        ("bf16", "bfp8", "bfp4", *gemv.CODED), SHAPES, ("", "values", "codes"), arithmetics
    ):
        is_strict = how == {"arithmetic": STRICT}
        has_variants = name == "8b gate up" or (
            name == "8b down" and how.get("arithmetic") == STRICT
        )
        if (copies == "values" and kind == "bf16") or (copies == "codes" and kind != "bfp4"):
            continue
        if how and not is_strict and not has_variants:
            continue
        products, each = matmul_of(kind, *SHAPES[name], copies=copies, **how)
        for decodes in (True, False):
            ranges: list[tuple[int, str]] = []
            for count in COUNTS:
                if decodes and count > 512:
                    break
                kernels.clear()
                run(products, each, count, decodes=decodes)
                ran = ", ".join(dict.fromkeys(kernels)) + " ..." * (len(kernels) > 2)
                if not ranges or ranges[-1][1] != ran:
                    ranges.append((count, ran))
            words = [kind, name, copies, _shown(how), "decode" if decodes else "prefill"]
            yield " | ".join((" ".join(filter(None, words)), *(f"{n}: {ran}" for n, ran in ranges)))


def _shown(how: dict[str, Any]) -> str:
    return "is_native" if "gpu" in how else str(how.get("arithmetic", ""))


def _short(value: Any) -> str:
    if isinstance(value, gemm_block.SplitTileConfig):
        return f"split {value.eights}x{value.groups}/{value.tiles}/{value.joined}"
    if not isinstance(value, gemm_block.BlockTileConfig):
        return str(value)
    size = f"{value.eights}x{value.groups}/{value.resident}/{value.joined}"
    return size + " whole" * value.is_whole


def matmul_of(
    kind: str, rows: int, columns: int, epilogue: str, *, copies: str, **how: Any
) -> tuple[MatmulOps, LinearOp]:
    recipe = WeightRecipe((Segment("w", rows),), (rows, columns), kind)
    each = LinearOp(
        "w",
        BufferView(1, rows),
        BufferView(0, columns),
        recipe,
        residual=epilogue == "residual",
        swiglu=epilogue == "swiglu",
        compute=Compute("lofi", "lofi"),
    )
    held = PackedWeight(kind, rows, columns, torch.empty(1, device=META), each.swiglu)
    data = torch.empty(held.data_shape, dtype=held.data_type, device=META)
    held = PackedWeight(kind, rows, columns, data, each.swiglu)
    weights: Any = SimpleNamespace(weight_of=lambda each: held, bias_of=lambda each: None)
    made = DequantizedCopies.__new__(DequantizedCopies)
    made.num_lofi = 0
    values = torch.empty(rows, columns, device=META, dtype=torch.bfloat16)
    scales = torch.empty(rows, 1, device=META) if copies == "codes" else None
    made._copies = {product_of(each): DequantizedCopy(values, scales)} if copies else {}
    plan: Any = SimpleNamespace(products=[each], instructions=[each])
    given: dict[str, Any] = {"max_rows": 256, "gpu": HOPPER, "arithmetic": FAST, **how}
    if given["arithmetic"] == STRICT:
        given["max_rows"] = 16 if epilogue == "residual" else 256
    return MatmulOps(plan, weights, META, copies=made, **given), each


def run(products: MatmulOps, each: LinearOp, count: int, *, decodes: bool) -> None:
    rows, columns = each.weight.shape
    width = rows // 2 if each.swiglu else rows
    kind = torch.bfloat16 if each.swiglu else torch.float32
    stride = -(-columns // 128) * 128
    x = torch.empty(max(count, 16), stride, dtype=torch.bfloat16, device=META)
    out = torch.empty(max(count, 16), width, dtype=kind, device=META)
    products.run(each, out[:count], x[:count, :columns], decodes=decodes)


def test_matmul_selects_the_kernels_of_the_golden_text(kernels: list[str]) -> None:
    check_golden("cuda/matmul_kernels.txt", "\n".join(selections(kernels)) + "\n")
