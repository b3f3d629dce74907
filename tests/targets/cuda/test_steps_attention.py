"""What attention of a step asks of its kernels."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.compiler.ir.recipe import Segment, WeightRecipe
from tilewright.compiler.ir.state import PER_TOKEN, StateSpec
from tilewright.compiler.targets.cuda.kernels.attention import split as attention_shares
from tilewright.compiler.targets.cuda.kernels.attention.split import Spread
from tilewright.compiler.targets.cuda.kernels.common.table import (
    ADA,
    FAST,
    HOPPER,
    MADE_FOR,
    STRICT,
)
from tilewright.compiler.targets.cuda.kernels.matmul.gemm_bf16 import MAX_SMALL_M
from tilewright.compiler.targets.cuda.state.pages import allocate_pages
from tilewright.compiler.targets.cuda.steps.attention import AttentionRunner
from tilewright.compiler.targets.program.instructions import AttentionOp, BufferView

LAYER = AttentionOp(
    BufferView(0, 4),
    BufferView(1, 4),
    StateSpec("cache", PER_TOKEN, (2, 2, 64), "bf16"),
    WeightRecipe((Segment("inv_freq", 8),), (8,), "fp32"),
    num_heads=2,
    scale=1.0,
    window=0,
    interleaved=False,
)


def attention_over(
    *,
    head_dim: int,
    num_pages: int,
    strict: bool = False,
    is_bfp8: bool = False,
) -> Any:
    """Attention of a layer on a GPU of compute capability 9.0; two key/value heads."""
    kind = "bfp8" if is_bfp8 else "bf16"
    pages = allocate_pages(1, 2, head_dim, kind=kind, device=torch.device("cpu"))
    state: Any = SimpleNamespace(pages={"cache": pages}, tables=torch.zeros(3, num_pages))
    weights: Any = SimpleNamespace(constant=lambda recipe: None)
    plan: Any = SimpleNamespace(instructions=[LAYER])
    how: dict[str, Any] = {"gpu": HOPPER, "arithmetic": STRICT if strict else FAST}
    return AttentionRunner(plan, weights, state, max_rows=64, **how)


def attend(attention: Any, num_rows: int, reach: int | None = None) -> Any:
    """Return the splits of a decode step."""
    found: list[Any] = []
    bound = attention._bound[id(LAYER)]
    attend = lambda *_, share, **__: found.append(share)  # noqa: E731
    attention._bound[id(LAYER)] = dataclasses.replace(bound, attend=attend)
    buffers: Any = SimpleNamespace(view=lambda place: torch.zeros(num_rows, 4))
    rows: Any = SimpleNamespace(positions=None, slots=None, offsets=None)
    attention.decode(LAYER, buffers, rows, reach=reach, captured=True)
    return found.pop()


@pytest.mark.parametrize(
    ("strict", "rows", "same_bits", "reach", "num_pages"),
    [
        (True, 64, True, None, 40),
        (False, MAX_SMALL_M, True, 40, 40),
        (False, MAX_SMALL_M + 1, False, 32, 32),
        (True, 64, True, 8, 8),
    ],
)
def test_attention_keeps_bits_where_they_are_promised_or_rows_are_few(
    strict: bool,
    rows: int,
    same_bits: bool,
    reach: int | None,
    num_pages: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As launches over no more pages than its rows reach."""
    asked: list[tuple[Any, ...]] = []

    def recorded(*sizes: int, same_bits: bool) -> Any:
        asked.append((*sizes, same_bits))
        return asked[-1]

    monkeypatch.setattr(attention_shares, "choose_share", recorded)
    monkeypatch.setattr(attention_shares, "choose_spread", lambda *sizes: None)
    attention = attention_over(head_dim=64, num_pages=40, strict=strict)
    asked.clear()
    assert attend(attention, rows, reach) == (rows, 2, num_pages, 64, same_bits)
    assert not asked, "splits are chosen at load"


@pytest.mark.parametrize(("is_bfp8", "is_spread"), [(False, True), (True, False)])
def test_a_row_over_a_long_table_is_spread_where_that_was_faster(
    is_bfp8: bool, is_spread: bool
) -> None:
    attention = attention_over(head_dim=256, num_pages=20, is_bfp8=is_bfp8)
    assert isinstance(attend(attention, 1), Spread) == is_spread


def test_a_gpu_of_another_capability_attends_in_triton() -> None:
    attention = attention_over(head_dim=64, num_pages=40)
    assert attention._bound[id(LAYER)].splits and not attention.why_not_native
    pages, tables = attention._state.pages, attention._state.tables
    state: Any = SimpleNamespace(pages=pages, tables=tables)
    plan: Any = SimpleNamespace(instructions=[LAYER])
    weights: Any = SimpleNamespace(constant=lambda recipe: None)
    other: Any = AttentionRunner(plan, weights, state, gpu=ADA, arithmetic=FAST, max_rows=64)
    assert not other._bound[id(LAYER)].splits and other.why_not_native == MADE_FOR
