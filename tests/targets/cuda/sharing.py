"""Mixed batches on any device, or on none."""

from __future__ import annotations

import pytest

from tilewright.compiler.targets.cuda import memory_budget


def set_sharing(monkeypatch: pytest.MonkeyPatch, is_on: bool = True) -> None:
    """Let executables share passes, whose device is a CPU too, or share none."""
    monkeypatch.setattr(memory_budget, "shares_passes_on", lambda device: is_on)
