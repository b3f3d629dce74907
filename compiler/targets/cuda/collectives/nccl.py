"""NCCL, for ranks whose GPUs do not reach each other's memory: every rank's bytes go to all.

It is called by itself, and not through torch.distributed: its id then travels over the ranks' own
channel, which knows who they are; and no thread of a library watches captured steps, or ends the
process. Knows nothing of what is gathered.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.collectives.peer_memory import Swap, check_no_multicast
from tilewright.distributed.group import LOADING_SECONDS, PATIENCE_SECONDS
from tilewright.errors import CompileError, ExchangeError, RankError

_LIBRARY = "libnccl.so.2"
_BYTES = 0  # ncclInt8
_LOOK_SECONDS, _IDLE_SECONDS = 0.05, 1.0


class _Id(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * 128),)


_SIGNATURES = {
    "ncclGetUniqueId": (ctypes.POINTER(_Id),),
    "ncclCommInitRank": (ctypes.POINTER(ctypes.c_void_p), ctypes.c_int, _Id, ctypes.c_int),
    "ncclAllGather": (
        *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
        *(ctypes.c_void_p, ctypes.c_void_p),
    ),
    "ncclCommAbort": (ctypes.c_void_p,),
}


class Nccl:
    """A rank's communicator.

    Attributes:
        has_ended: whether it was aborted; what it gathered since means nothing.
    """

    def __init__(
        self, rank: int, device: torch.device, swap: Swap, *, check: Callable[[], None]
    ) -> None:
        """All ranks call it together, each with its own ``rank`` and ``device``; ``check`` raises
        where one of them has failed meanwhile.

        Raises:
            CompileError: where there is no NCCL, it might use the switches of NVLink, or does not
                reach the others.
            RankError: where others do not come.
        """
        check_no_multicast()
        self._library = _load()
        self.rank, self.device, self.has_ended = rank, device, False
        self._ending: threading.Thread | None = None
        own = _Id()
        if not rank:
            self._call("ncclGetUniqueId", ctypes.byref(own))
        found = swap(ctypes.string_at(ctypes.byref(own), ctypes.sizeof(own)))
        self.count = len(found)
        self._communicator = self._meet(_Id.from_buffer_copy(found[0]), check)

    def warm_up(self) -> None:
        """Gather once, which opens what captured steps use."""
        self.all_gather(torch.zeros(self.count, 16, dtype=torch.uint8, device=self.device))
        torch.cuda.synchronize(self.device)
        if self.has_ended:
            raise RankError("the group has ended")

    def all_gather(self, parts: Tensor) -> None:
        """Fill ``parts [n, ...]`` (contiguous) from all ranks, each of which has its own part at
        its place; in the order of the current stream, and capturable.

        Raises:
            ExchangeError: where NCCL refuses, or was aborted.
        """
        assert len(parts) == self.count and parts.is_contiguous()
        if self.has_ended:
            raise ExchangeError("took no part in an exchange", self.rank)
        own = parts[self.rank]
        stream = torch.cuda.current_stream(self.device).cuda_stream
        num_bytes = own.numel() * own.element_size()
        try:
            self._call(
                "ncclAllGather", own.data_ptr(), parts.data_ptr(), num_bytes, _BYTES,
                self._communicator, stream,
            )  # fmt: skip
        except _RefusedError as error:
            raise ExchangeError(f"failed in an exchange by NCCL ({error})", self.rank) from None

    def abort(self) -> None:
        """End all that waits, now and later; from any thread, and without waiting: NCCL comes back
        only once no captured graph has the communicator.
        """
        if self._ending is None:
            self.has_ended = True
            abort = self._library.ncclCommAbort
            self._ending = threading.Thread(
                target=abort, args=(self._communicator,), daemon=True, name="nccl"
            )
            self._ending.start()

    def close(self) -> None:
        """Free the communicator, which no graph may have any more, behind what is under way."""
        if self._ending is None:
            with torch.cuda.device(self.device):
                done = torch.cuda.Event()
                done.record()
            deadline = time.monotonic() + _IDLE_SECONDS
            while not (done.query() or self.has_ended) and time.monotonic() < deadline:
                time.sleep(_LOOK_SECONDS)
        self.abort()
        assert self._ending is not None
        self._ending.join(PATIENCE_SECONDS)

    def _meet(self, number: _Id, check: Callable[[], None]) -> ctypes.c_void_p:
        """The communicator of all ranks with this number; NCCL waits for them without a limit, so
        a thread of its own does.
        """
        found, refused = ctypes.c_void_p(), list[_RefusedError]()

        def run() -> None:
            try:
                with torch.cuda.device(self.device):
                    what = ctypes.byref(found), self.count, number, self.rank
                    self._call("ncclCommInitRank", *what)
            except _RefusedError as error:
                refused.append(error)

        thread = threading.Thread(target=run, daemon=True, name="nccl")
        thread.start()
        deadline = time.monotonic() + LOADING_SECONDS
        while thread.is_alive():
            thread.join(_LOOK_SECONDS)
            check()
            if time.monotonic() > deadline:
                raise RankError(f"NCCL did not join all ranks within {LOADING_SECONDS:g} s")
        if refused:
            raise CompileError(
                f"NCCL does not join rank {self.rank} to the others ({refused[0]}; NCCL_DEBUG=WARN "
                "says more); allowed: a GPU a rank, and machines that reach each other "
                "(NCCL_SOCKET_IFNAME)"
            )
        return found

    def _call(self, name: str, *arguments: object) -> None:
        result = getattr(self._library, name)(*arguments)
        if result:
            raise _RefusedError(self._library.ncclGetErrorString(result).decode())


class _RefusedError(Exception):
    """What NCCL says of a call that it refuses."""


def _load() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)  # that torch has loaded
    except OSError:
        raise CompileError(
            f"NCCL is not found ({_LIBRARY}); allowed: a build of torch that has it, or GPUs that "
            "reach each other's memory"
        ) from None
    for name, arguments in _SIGNATURES.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, ctypes.c_int
    library.ncclGetErrorString.argtypes = (ctypes.c_int,)
    library.ncclGetErrorString.restype = ctypes.c_char_p
    return library
