"""Mixed batches on any device, or on none."""

from __future__ import annotations

import pytest
import torch

from tilewright.compiler.targets.cuda import memory_budget
from tilewright.compiler.targets.cuda.graphs import mixed_graphs


def set_sharing(monkeypatch: pytest.MonkeyPatch, is_on: bool = True) -> None:
    """Let executables share passes, whose device is a CPU too, or share none.

    Plans with mixers have additional sizes in the interpreter, where padding takes most of the
    time: two short chunks, and four of which one has two blocks.
    """
    monkeypatch.setattr(memory_budget, "shares_passes_on", lambda device: is_on)
    if not torch.cuda.is_available():
        sizes = (64, 128, 256, 320, 1024, 2048)
        monkeypatch.setattr(mixed_graphs, "_TOTALS_OF_MIXERS", sizes)
