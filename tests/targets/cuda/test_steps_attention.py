"""What attention of a step asks of its kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.compiler.targets.cuda.kernels.attention import attention as native_attention
from tilewright.compiler.targets.cuda.kernels.attention import split as attention_shares
from tilewright.compiler.targets.cuda.kernels.matmul.dense import FEW_TOKENS
from tilewright.compiler.targets.cuda.steps.attention import Attention


class _AskedError(Exception):
    pass


def attention_over(
    *,
    head_dim: int,
    num_pages: int,
    strict: bool = False,
    is_bfp8: bool = False,
) -> Any:
    """Attention that has but what decode steps ask for; two key/value heads."""
    exponents = torch.zeros(1) if is_bfp8 else None
    pages = SimpleNamespace(num_kv_heads=2, head_dim=head_dim, exponents=exponents)
    found: Any = object.__new__(Attention)
    found._strict, found._decode_scratch = strict, object()
    found._state = SimpleNamespace(pages={"cache": pages}, tables=torch.zeros(3, num_pages))
    found._why_not_native = lambda each: ""
    found._weights = SimpleNamespace(constant=lambda recipe: None)
    return found


def attend(attention: Any, num_rows: int, reach: int | None = None) -> None:
    """Until what was replaced is asked."""
    each: Any = SimpleNamespace(state=SimpleNamespace(name="cache"), qkv="qkv", out="out")
    for name in ("inv_freq", "num_heads", "scale", "window", "interleaved"):
        setattr(each, name, None)
    buffers: Any = SimpleNamespace(view=lambda place: torch.zeros(num_rows, 4))
    rows: Any = SimpleNamespace(positions=None, slots=None)
    with pytest.raises(_AskedError):
        attention.decode(each, buffers, rows, reach=reach, captured=True)


@pytest.mark.parametrize(
    ("strict", "rows", "same_bits", "reach", "num_pages"),
    [
        (True, 64, True, None, 40),
        (False, FEW_TOKENS, True, 40, 40),
        (False, FEW_TOKENS + 1, False, 32, 32),
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

    def choose_share(*sizes: int, same_bits: bool) -> None:
        asked.append((*sizes, same_bits))
        raise _AskedError

    monkeypatch.setattr(attention_shares, "choose_share", choose_share)
    attend(attention_over(head_dim=64, num_pages=40, strict=strict), rows, reach)
    assert asked == [(rows, 2, num_pages, 64, same_bits)]


@pytest.mark.parametrize(("is_bfp8", "is_spread"), [(False, True), (True, False)])
def test_a_row_over_a_long_table_is_spread_where_that_was_faster(
    is_bfp8: bool, is_spread: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def ask(*_: Any, share: Any, **__: Any) -> None:
        asked.append(share)
        raise _AskedError

    monkeypatch.setattr(native_attention, "attend_decode", ask)
    attention = attention_over(head_dim=256, num_pages=20, is_bfp8=is_bfp8)
    attend(attention, 1)
    assert isinstance(asked[0], attention_shares.Spread) == is_spread
