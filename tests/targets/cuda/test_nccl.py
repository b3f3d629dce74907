"""When ranks exchange through NCCL, and how it is called and ended, without a GPU: a library made
up stands for NCCL's.
"""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tilewright.compiler.targets.cuda.collectives import group, nccl
from tilewright.compiler.targets.cuda.collectives import peer_memory as peers
from tilewright.compiler.targets.cuda.collectives.gathered import GatheredExchange
from tilewright.compiler.targets.cuda.collectives.nccl import Nccl
from tilewright.distributed.world import NO_MULTICAST
from tilewright.errors import CompileError, ExchangeError, RankError

CPU = torch.device("cpu")
NUMBER = bytes(range(1, 128)) + b"\0"


class Function:
    """A function of a C library."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __call__(self, *arguments: Any) -> Any:
        return self._run(*arguments)


class Made:
    """A library of two ranks, of which this is the second; ``refuses`` what it then does not do."""

    def __init__(self) -> None:
        self.refuses = ""
        self.calls: list[tuple[Any, ...]] = []
        self.may_end, self.may_join = threading.Event(), threading.Event()
        self.may_join.set()
        self.ncclGetUniqueId = Function(lambda number: self._note("id"))
        self.ncclCommInitRank = Function(self._join)
        self.ncclAllGather = Function(lambda *given: self._note("gather", *given))
        self.ncclCommAbort = Function(self._abort)
        self.ncclGetErrorString = Function(lambda code: b"unhandled system error")

    def _note(self, what: str, *given: Any) -> int:
        self.calls.append((what, *given))
        return 2 * (self.refuses == what)

    def _join(self, found: Any, count: int, number: Any, rank: int) -> int:
        self.may_join.wait(20)
        return self._note("join", count, ctypes.string_at(ctypes.byref(number), 128), rank)

    def _abort(self, communicator: Any) -> int:
        self.may_end.wait(20)
        return self._note("abort")


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    for name, value in NO_MULTICAST.items():
        monkeypatch.setenv(name, value)
    library = Made()
    monkeypatch.setattr(nccl.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(torch.cuda, "device", contextlib.nullcontext)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    yield library
    library.may_end.set()


def opened(check: Any = lambda: None) -> Nccl:
    return Nccl(1, CPU, lambda own: [NUMBER, own], check=check)


def test_ranks_join_by_rank_0_s_number_and_gather_in_place(made: Made) -> None:
    library = opened()
    library.warm_up()
    made.calls.clear()
    parts = torch.zeros(2, 3, 5)
    library.all_gather(parts)
    what, own, to, num_bytes, kind, _, stream = made.calls.pop()
    assert (what, num_bytes, kind, stream) == ("gather", 60, 0, 7)
    assert to == parts.data_ptr() and own == parts[1].data_ptr()
    found = Nccl(0, CPU, lambda own: [own, own], check=lambda: None)
    assert [each[0] for each in made.calls] == ["id", "join"] and found.count == 2


def test_its_number_is_rank_0_s(made: Made) -> None:
    opened()
    assert made.calls == [("join", 2, NUMBER, 1)]


def test_an_abort_is_not_waited_for_and_ends_all_gathering(made: Made) -> None:
    """It comes back only once no captured graph has the communicator."""
    library = opened()
    exchange = GatheredExchange(library, part_bytes=64, device=CPU)
    assert exchange.failure() is None
    library.abort()
    library.abort()
    assert exchange.failure() is not None
    with pytest.raises(ExchangeError) as caught:
        library.all_gather(torch.zeros(2, 4))
    assert caught.value.of_step(5) == "took no part in an exchange of step 5"
    made.may_end.set()
    library.close()
    assert [each[0] for each in made.calls] == ["join", "abort"]
    with pytest.raises(ExchangeError):
        library.warm_up()


def test_what_nccl_refuses_is_said_in_one_line(made: Made) -> None:
    library = opened()
    made.refuses = "gather"
    with pytest.raises(ExchangeError, match=r"failed in an exchange by NCCL \(unhandled system e"):
        library.all_gather(torch.zeros(2, 4))
    made.refuses = "join"
    said = r"NCCL does not join rank 1 to the others \(unhandled system error; .*\); allowed: a GPU"
    with pytest.raises(CompileError, match=said):
        opened()


def test_a_rank_that_never_joins_has_a_limit(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    made.may_join.clear()
    monkeypatch.setattr(nccl, "LOADING_SECONDS", 0.1)
    with pytest.raises(RankError, match=r"NCCL did not join all ranks within 0\.1 s"):
        opened()

    def check() -> None:
        raise RankError("rank 0 left")

    with pytest.raises(RankError, match="rank 0 left"):
        opened(check)
    made.may_join.set()


def test_without_nccl_or_with_its_switches_it_is_refused(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise OSError(name)

    with monkeypatch.context() as changed:
        changed.setattr(nccl.ctypes, "CDLL", missing)
        with pytest.raises(CompileError, match=r"NCCL is not found \(libnccl\.so\.2\); allowed: a"):
            opened()
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    with pytest.raises(CompileError, match="NCCL_NVLS_ENABLE is '1'; allowed: 0"):
        opened()
    assert not made.calls


class Met:
    """The second of so many ranks, which all say what it says."""

    rank, limit_s = 1, 3.0

    def __init__(self, size: int = 2) -> None:
        self.size, self.aborts = size, list[Any]()

    def all_gather(self, data: bytes) -> list[bytes]:
        return [NUMBER] + [data] * (self.size - 1)

    def check(self) -> None: ...

    def abort_with(self, abort: Any, *, has_limit: bool = False) -> None:
        self.aborts.append((abort, has_limit))


@pytest.mark.parametrize(
    ("asked", "size", "is_reached", "why"),
    [
        (None, 2, True, None),
        ("peers", 2, True, None),
        (None, 2, False, "rank 1 is on another machine"),
        ("nccl", 2, True, "--collective-backend nccl"),
        (None, 9, True, "9 ranks are more than 8"),
    ],
)
def test_the_way_is_chosen_by_what_gpus_reach(
    made: Made,
    monkeypatch: pytest.MonkeyPatch,
    asked: str | None,
    size: int,
    is_reached: bool,
    why: str | None,
) -> None:
    def check_reached(device: object, swap: object, why_not: str) -> None:
        if not is_reached:
            raise peers.UnreachedError("rank 1 is on another machine")

    own = SimpleNamespace(addresses=[0] * size)
    monkeypatch.setattr(peers, "check_reached", check_reached)
    monkeypatch.setattr(peers, "PeerMemory", lambda *given, **more: own)
    met: Any = Met(size)
    found = group.meet(met, (), CPU, requested=asked)
    assert isinstance(found.exchange, GatheredExchange) is (why is not None)
    assert (found.rank, found.count, found.limit_s) == (1, size, 3.0)
    ((abort, has_limit),) = met.aborts
    abort()
    if why is None:
        assert not found.notes and has_limit and found.exchange._state[5] == 1
        return
    assert found.notes[0].startswith(f"ranks exchange through NCCL ({why}): a sum takes some 16 us")
    assert found.exchange.failure() is not None and not has_limit


def test_peers_that_were_asked_for_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_reached(device: object, swap: object, why_not: str) -> None:
        raise peers.UnreachedError("rank 1 is on another machine")

    monkeypatch.setattr(peers, "check_reached", check_reached)
    met: Any = Met()
    with pytest.raises(CompileError, match="rank 1 is on another machine"):
        group.meet(met, (), CPU, requested="peers")


class Excuse(Met):
    """Ranks of which the first has no CUDA C++ kernels."""

    def all_gather(self, data: bytes) -> list[bytes]:
        is_reason = not data or data.startswith(b"all_reduce.cu")
        return [b"all_reduce.cu: no NVRTC", data] if is_reason else super().all_gather(data)


@pytest.mark.parametrize("own", ["", "no NVRTC"])
def test_peers_need_cpp_kernels_on_all_ranks(made: Made, own: str) -> None:
    met: Any = Excuse()
    found = group.meet(met, (), CPU, why_no_peers=own)
    assert isinstance(found.exchange, GatheredExchange) and "no NVRTC" in found.notes[0]
    with pytest.raises(CompileError, match="no NVRTC"):
        group.meet(met, (), CPU, requested="peers", why_no_peers=own)
