"""Pages of the key/value cache: their bytes, their layout, and who has which."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilewright.compiler.errors import RequestError
from tilewright.compiler.ir.state import PER_TOKEN, StateSpec
from tilewright.compiler.targets.cuda.pages import (
    PAGE,
    PagePool,
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


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 5)), max_size=40))
def test_no_page_is_had_twice_and_none_is_lost(calls: list[tuple[bool, int]]) -> None:
    pool, taken = PagePool(12), []
    for gives, count in calls:
        if gives and taken:
            pool.give(taken.pop(count % len(taken)))
        elif count <= pool.num_free():
            taken.append(pool.take(count))
            assert len(taken[-1]) == count
        else:
            free = pool.num_free()
            with pytest.raises(RequestError, match=rf"{count} pages .* the {free} free ones"):
                pool.take(count)
            assert pool.num_free() == free
        had = [page for pages in taken for page in pages]
        assert len(set(had)) == len(had) == 12 - pool.num_free()
        assert set(had) <= set(range(12))


def test_pages_given_back_are_taken_first() -> None:
    """What was used last is what the caches of the device still know."""
    pool = PagePool(6)
    first, second = pool.take(2), pool.take(3)
    assert (first, second) == ([0, 1], [2, 3, 4])
    pool.give(first)
    assert pool.take(2) == first
