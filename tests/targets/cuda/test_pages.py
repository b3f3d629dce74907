"""Pages of the key/value cache: their bytes and their layout."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.ir.state import PER_TOKEN, StateSpec
from tilewright.compiler.targets.cuda.state.pages import (
    PAGE,
    allocate_pages,
    page_bytes,
    pages_of,
)

CPU = torch.device("cpu")


@pytest.mark.parametrize("head_dim", [16, 64, 80, 100, 256])
@pytest.mark.parametrize("kind", ["bf16", "fp32", "bfp8"])
def test_pages_are_as_many_bytes_as_is_said(kind: str, head_dim: int) -> None:
    pages = allocate_pages(3, 2, head_dim, kind=kind, device=CPU)
    assert pages.values.shape == (3, 2, 2, PAGE, head_dim)
    assert (pages.num_kv_heads, pages.head_dim) == (2, head_dim)
    state = StateSpec("kv", PER_TOKEN, (2, 2, head_dim), "bf16")
    assert 3 * page_bytes(state, kind) == pages.num_bytes
    if kind == "bfp8":
        assert pages.exponents is not None and pages.values.dtype == torch.int8
        assert pages.exponents.shape == (3, 2, 2, PAGE, -(-head_dim // 16))
    else:
        assert pages.exponents is None


@pytest.mark.parametrize(("positions", "pages"), [(0, 0), (1, 1), (64, 1), (65, 2), (128, 2)])
def test_a_page_is_64_positions(positions: int, pages: int) -> None:
    assert pages_of(positions) == pages


def test_an_unknown_kind_is_our_own_mistake() -> None:
    with pytest.raises(KeyError):
        allocate_pages(1, 1, 16, kind="fp8", device=CPU)
