"""Which captured step takes so many rows, and where captures keep what they make."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.compiler.targets.cuda import buckets as buckets_module
from tilewright.compiler.targets.cuda.buckets import Buckets


def test_what_is_captured_anew_has_memory_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Results of old captures may still be read, and their pool goes with the last of them."""
    handles = iter(range(9))
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(handles))
    for name in ("DecodeBucket", "PromptBucket"):
        monkeypatch.setattr(buckets_module, name, lambda steps, *made: made)
    steps: Any = SimpleNamespace(device=torch.device("cuda"))
    ends = [3]
    made: Any = Buckets(
        steps, rows=(1, 2, 4), tokens=(16, 64), num_choosable=lambda: 61, num_ends=lambda: ends[0]
    )
    assert made.decode(3) == (4, 61, 3, 0) and made.prompt(17) == (64, 61, 3, 0)
    ends[0] = 40
    made.renew()
    assert made.decode(3) == (4, 61, 40, 1) and made.decode(1) == (1, 61, 40, 1)
