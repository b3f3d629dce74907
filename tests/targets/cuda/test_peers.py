"""GPUs that do not reach each other's memory are refused before any of it is taken."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from tilewright.compiler.errors import CompileError
from tilewright.compiler.targets.cuda.peers import check_access


def test_gpus_that_do_not_reach_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reached = {(0, 1), (1, 0), (0, 2), (2, 0), (1, 2)}
    bindings = ModuleType("cuda.bindings")
    bindings.driver = SimpleNamespace(  # type: ignore[attr-defined]
        cuInit=lambda flags: (0,),
        cuDeviceGet=lambda number: (0, number),
        cuDeviceCanAccessPeer=lambda one, other: (0, int((one, other) in reached)),
    )
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
    check_access([0, 1])
    check_access([1, 1])  # two numbers for one GPU, or one number for two: the memory itself tells
    with pytest.raises(CompileError) as caught:
        check_access([0, 1, 2])
    assert str(caught.value) == (
        "GPU 2 cannot reach the memory of GPU 1; allowed: GPUs of one machine that reach each "
        "other's (nvidia-smi topo -p2p r), or one rank"
    )
