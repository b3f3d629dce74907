"""Rounding to a format: ggml's own bytes, row by row."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from tilewright.compiler import ops
from tilewright.compiler.ops import OPERATORS


@pytest.mark.parametrize("shape", [(32,), (5, 64), (3, 2, 96)])
def test_q80_is_what_ggml_has(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape) * torch.logspace(-3, 3, shape[-1])
    kind = gguf.GGMLQuantizationType.Q8_0
    stored = gguf.quants.quantize(x.numpy(), kind)
    expected = gguf.quants.dequantize(stored, kind).reshape(shape)
    assert np.array_equal(ops.round_q80(x).numpy(), expected)


def test_a_row_does_not_depend_on_the_others() -> None:
    """Rows of 40 end inside a block."""
    x = torch.randn(7, 40)
    whole = ops.round_q80(x)
    rows = [ops.round_q80(row[None]) for row in x]
    assert torch.equal(torch.cat(rows), whole)
    assert not torch.equal(whole, x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_comes_back_is_of_the_same_type(dtype: torch.dtype) -> None:
    x = torch.randn(4, 32).to(dtype)
    assert ops.round_q80(x).dtype == dtype
    torch.library.opcheck(ops.round_q80.overload, (x,))
    assert OPERATORS[ops.round_q80.overload].cost(x).elements_read == 128
