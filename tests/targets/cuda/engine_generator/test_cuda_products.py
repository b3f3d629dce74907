"""Products in CUDA C++ of generated engines: their names without a GPU, their results on one."""

from __future__ import annotations

import re
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tilewright.compiler.targets.cuda.engine_generator.parts import products as cuda_products
from tilewright.compiler.targets.cuda.engine_generator.parts.cuda_source import PRODUCTS
from tilewright.compiler.targets.cuda.engine_generator.parts.self_test import error_of


def test_every_kernel_that_is_launched_is_in_the_source() -> None:
    made = re.findall(r"^SOME_ROWS\((\d), (\d), (\d)\)$", PRODUCTS, re.MULTILINE)
    asked = {cuda_products._shape_of(*each) for each in product(range(2, 33), (4, 300, 384, 1024))}
    assert {tuple(map(int, each)) for each in made} == {(e, t, d) for e, t, _, d in asked}
    assert all(warps * tiles * 16 <= 224 for _, tiles, warps, _ in asked)
    assert re.findall(r"^ONE_ROW\((\d)\)$", PRODUCTS, re.MULTILINE) == ["2", "3"]


def test_no_shape_asks_for_more_shared_memory_than_there_is() -> None:
    for rows, tiles in product((2, 8, 9, 16, 17, 32), (4, 300, 384, 1024)):
        eights, of_warp, warps, depth = cuda_products._shape_of(rows, tiles)
        shared = depth * (eights * 8 * 272 + warps * of_warp * 4096)
        partial = eights * 8 * (warps * of_warp * 16 + 8) * 4
        assert partial <= shared <= cuda_products.SHARED


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_are_torchs(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = (
        *((64, 128), (257, 2048), (2304, 768), (768, 3072)),
        *((4096, 4096), (28672, 4096), (4096, 14336)),
    )
    for rows, (outputs, columns) in product((1, 2, 7, 8, 13, 17, 32), shapes):
        x = torch.randn(rows, columns, device="cuda").to(dtype)
        rows_read = -(-outputs // 16) * 16
        weight = torch.randn(rows_read, columns, device="cuda") / columns**0.5
        weight = weight.to(dtype)[:outputs]
        norm = torch.rand(columns, device="cuda").to(dtype) + 0.5
        gate, up = F.linear(x, weight)[:, : outputs // 2 * 2].chunk(2, 1)
        before = torch.randn(rows, outputs, device="cuda").to(dtype)
        expected = F.linear(x, weight), before + F.linear(x, weight), F.silu(gate) * up
        for epilogue, there in enumerate(expected[: 3 - outputs % 2]):
            out = before.clone() if epilogue == 1 else torch.full_like(there, torch.nan)
            how = {"epilogue": epilogue, "chained": True}
            cuda_products.cuda_product(out, x, weight, None, 0.0, **how)
            assert error_of(out, there) < (1 if dtype == torch.float16 else 4)
        if rows == 1 and columns <= 8192:
            out = torch.full_like(expected[0], torch.nan)
            cuda_products.cuda_product(out, x, weight, norm, 1e-5, epilogue=0, chained=True)
            scale = torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-5)
            there = F.linear((x.float() * scale).to(dtype) * norm, weight)
            assert error_of(out, there) < (1 if dtype == torch.float16 else 4)
