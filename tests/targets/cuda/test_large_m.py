"""Products of many rows: which of them take the library's place."""

from __future__ import annotations

import pytest
import torch

from tests.targets.cuda.test_steps_matmul import products_of, take_no_rows
from tilewright.compiler.targets.cuda.kernels.common.table import FAST, HOPPER, STRICT
from tilewright.compiler.targets.cuda.kernels.matmul import gemm_block, gemm_swiglu_bf16
from tilewright.compiler.targets.cuda.weights.copies import NO_COPIES, Kinds


@pytest.mark.parametrize(
    ("name", "copies", "strict", "expected"),
    [
        ("bf16", NO_COPIES, False, [128, 129, 256]),
        ("bf16", NO_COPIES, True, []),
        ("bfp8", Kinds(values=True), False, [128, 129, 256]),
        ("bfp8", NO_COPIES, False, []),  # dequantised by the kernel right before
    ],
)
def test_gate_and_up_of_many_rows_take_the_librarys_place(
    name: str,
    copies: Kinds,
    strict: bool,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of many rows whose blocks fill the device, where no bits are promised and the weight's values
    are held; no other product.
    """
    monkeypatch.setattr(gemm_swiglu_bf16, "rows_of", lambda rows, processors: (range(101, 300),))
    seen: list[int] = []
    take_no_rows(monkeypatch, gemm_block)
    monkeypatch.setattr(gemm_swiglu_bf16, "swiglu", lambda out, x, *_, **__: seen.append(len(x)))
    plan, _, products = products_of(
        name, gpu=HOPPER, arithmetic=STRICT if strict else FAST, copies=copies, max_rows=64
    )
    for each in (one for one in plan.products if one.swiglu or one.residual):
        rows, columns = each.weight.shape
        for count in (100, 128, 129, 256, 300):
            x = torch.zeros(count, columns, dtype=torch.bfloat16)
            kind = torch.bfloat16 if each.swiglu else torch.float32
            out = torch.zeros(count, rows // (2 if each.swiglu else 1), dtype=kind)
            monkeypatch.setattr(products, "_norm", lambda x, norm, decodes: x)
            products.run(each, out, x, decodes=False)
    assert seen == expected * sum(each.swiglu for each in plan.products)
