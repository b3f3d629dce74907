"""Machines of network namespaces, where they cannot be made."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.nodes.links import machines
from tilewright.compiler.errors import ConfigError


def test_a_machine_without_the_programs_is_said_to_be_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="allowed: root, with ip and tc"), machines(2, 1.0):
        pass
