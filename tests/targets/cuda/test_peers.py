"""GPUs that do not reach each other's memory are refused before any of it is taken."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from tilewright.compiler.targets.cuda.collectives.peer_memory import (
    UnreachedError,
    _agree,
    _why_unreached,
    check_access,
    check_no_multicast,
)
from tilewright.distributed.world import NO_MULTICAST, forbid_multicast
from tilewright.errors import CompileError


def reach(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three GPUs, of which 2 does not reach 1."""
    reached = {(0, 1), (1, 0), (0, 2), (2, 0), (1, 2)}
    bindings = ModuleType("cuda.bindings")
    bindings.driver = SimpleNamespace(  # type: ignore[attr-defined]
        cuInit=lambda flags: (0,),
        cuDeviceGet=lambda number: (0, number),
        cuDeviceCanAccessPeer=lambda one, other: (0, int((one, other) in reached)),
    )
    monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)


def test_gpus_that_do_not_reach_each_other_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reach(monkeypatch)
    check_access([0, 1])
    check_access([1, 1])  # two numbers for one GPU, or one number for two: the memory itself tells
    with pytest.raises(CompileError) as caught:
        check_access([0, 1, 2])
    assert str(caught.value) == (
        "GPU 2 cannot reach the memory of GPU 1; allowed: GPUs of one machine that reach each "
        "other's (nvidia-smi topo -p2p r), or one rank"
    )


def test_ranks_see_why_they_do_not_reach_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """By machine and by GPU, whatever numbers other processes have for theirs."""
    reach(monkeypatch)
    visible = {"a": 0, "b": 1, "c": 2}
    assert not _why_unreached("here", [("here", "b"), ("here", "a")], visible)
    found = [("here", "a"), ("there", "b")]
    assert _why_unreached("here", found, visible) == "rank 1 is on another machine"
    found = [("here", "a"), ("here", "d")]
    said = "the GPU of rank 1 is hidden from another rank's process"
    assert _why_unreached("here", found, visible) == said
    found = [("here", "c"), ("here", "b")]
    said = "GPU 2 cannot reach the memory of GPU 1"
    assert _why_unreached("here", found, visible) == said


def test_all_ranks_raise_what_one_of_them_finds() -> None:
    _agree(lambda own: [own, b""], "")
    with pytest.raises(UnreachedError, match="rank 1 cannot"):
        _agree(lambda own: [own, b"rank 1 cannot"], "")


def test_what_may_use_the_switches_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher sets the variables; where somebody has set another value, it stays, and says
    so.
    """
    for name in NO_MULTICAST:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(CompileError, match="NCCL_NVLS_ENABLE is None; allowed: 0, for proc"):
        check_no_multicast()
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "0")
    forbid_multicast()
    with pytest.raises(CompileError, match="NVSHMEM_DISABLE_NVLS is '0'; allowed: 1, for proc"):
        check_no_multicast()
    monkeypatch.setenv("NVSHMEM_DISABLE_NVLS", "1")
    check_no_multicast()
    for name in NO_MULTICAST:  # set past monkeypatch
        monkeypatch.delenv(name)
