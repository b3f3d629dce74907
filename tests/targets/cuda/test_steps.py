"""What steps ask of their kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.compiler.targets.cuda import steps as steps_module
from tilewright.compiler.targets.cuda.kernels import native_attention
from tilewright.compiler.targets.cuda.kernels.native_dense import FEW_TOKENS
from tilewright.compiler.targets.cuda.steps import Steps


class _AskedError(Exception):
    pass


def steps_over(
    *,
    head_dim: int,
    num_pages: int,
    strict: bool = False,
    is_bfp8: bool = False,
    spreads: tuple[bool, bool] = (True, False),
) -> Any:
    """Steps that have but what attention of decode steps asks for; two key/value heads."""
    exponents = torch.zeros(1) if is_bfp8 else None
    pages = SimpleNamespace(num_kv_heads=2, head_dim=head_dim, exponents=exponents)
    steps: Any = object.__new__(Steps)
    steps._strict, steps._attention, steps._spreads = strict, object(), spreads
    steps._state = SimpleNamespace(pages={"cache": pages}, tables=torch.zeros(3, num_pages))
    steps._why_no_native_attention = lambda each: ""
    steps._weights = SimpleNamespace(vector=lambda recipe: None)
    return steps


def attend(steps: Any, num_rows: int) -> None:
    """Until what was replaced is asked."""
    each: Any = SimpleNamespace(state=SimpleNamespace(name="cache"), qkv="qkv", out="out")
    for name in ("inv_freq", "num_heads", "scale", "window", "interleaved"):
        setattr(each, name, None)
    buffers: Any = SimpleNamespace(view=lambda place: torch.zeros(num_rows, 4))
    rows: Any = SimpleNamespace(positions=None, slots=None)
    with pytest.raises(_AskedError):
        steps._attend_decode(each, buffers, rows, captured=True)


@pytest.mark.parametrize(
    ("strict", "rows", "same_bits"),
    [(True, 64, True), (False, FEW_TOKENS, True), (False, FEW_TOKENS + 1, False)],
)
def test_attention_keeps_bits_where_they_are_promised_or_rows_are_few(
    strict: bool, rows: int, same_bits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def choose_share(*sizes: int, same_bits: bool) -> None:
        asked.append((*sizes, same_bits))
        raise _AskedError

    monkeypatch.setattr(native_attention, "choose_share", choose_share)
    steps = steps_over(head_dim=64, num_pages=8, strict=strict)
    attend(steps, rows)
    assert asked == [(rows, 2, 8, 64, same_bits)]


@pytest.mark.parametrize(
    ("is_bfp8", "spreads", "is_spread"),
    [
        (False, (True, False), True),
        (True, (True, False), False),
        (True, (True, True), True),
        (False, (False, False), False),
    ],
)
def test_a_row_over_a_long_table_is_spread_where_that_was_faster(
    is_bfp8: bool, spreads: tuple[bool, bool], is_spread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def ask(*_: Any, share: Any, **__: Any) -> None:
        asked.append(share)
        raise _AskedError

    monkeypatch.setattr(native_attention, "attend_decode", ask)
    monkeypatch.setattr(steps_module, "vector_of", lambda recipe: None)
    steps = steps_over(head_dim=256, num_pages=20, is_bfp8=is_bfp8, spreads=spreads)
    attend(steps, 1)
    assert isinstance(asked[0], native_attention.Spread) == is_spread
