"""What steps ask of their kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.compiler.targets.cuda.kernels import native_attention
from tilewright.compiler.targets.cuda.kernels.native_dense import FEW_TOKENS
from tilewright.compiler.targets.cuda.steps import Steps


class _AskedError(Exception):
    pass


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
    pages = SimpleNamespace(num_kv_heads=2, head_dim=64)
    steps: Any = object.__new__(Steps)
    steps._strict, steps._attention = strict, object()
    steps._state = SimpleNamespace(pages={"cache": pages}, tables=torch.zeros(3, 8))
    steps._why_no_native_attention = lambda each: ""
    each: Any = SimpleNamespace(state=SimpleNamespace(name="cache"), qkv="qkv")
    buffers: Any = SimpleNamespace(view=lambda place: torch.zeros(rows, 4))
    with pytest.raises(_AskedError):
        steps._attend_decode(each, buffers, SimpleNamespace(), captured=True)
    assert asked == [(rows, 2, 8, 64, same_bits)]
