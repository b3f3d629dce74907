"""The table of fidelities, as the matrix unit's settings define them."""

from __future__ import annotations

import pytest

from tilewright.compiler.formats import FIDELITIES
from tilewright.errors import ConfigError


def test_names_and_phases() -> None:
    phases = {name: fidelity.num_phases for name, fidelity in FIDELITIES.items()}
    assert phases == {
        "lofi": 1,
        "hifi2": 2,
        "hifi2na": 2,
        "hifi2fp16": 2,
        "hifi3": 3,
        "hifi4": 4,
        "hifi4fp32": 4,
    }
    assert all(fidelity.name == name for name, fidelity in FIDELITIES.items())


def test_accumulators() -> None:
    assert {name for name, f in FIDELITIES.items() if not f.fp32_dest} == {
        "lofi",
        "hifi2na",
        "hifi2fp16",
    }
    assert [name for name, f in FIDELITIES.items() if not f.packer_l1_acc] == ["hifi2na"]
    assert [name for name, f in FIDELITIES.items() if f.approx] == ["hifi2"]
    assert [name for name, f in FIDELITIES.items() if f.fp32_outputs] == ["hifi4fp32"]


def test_unknown_fidelity() -> None:
    with pytest.raises(ConfigError, match="unknown fidelity 'hifi5'; allowed: lofi, hifi2"):
        FIDELITIES["hifi5"]
