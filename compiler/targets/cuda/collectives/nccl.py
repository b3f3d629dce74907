"""NCCL all-gather, for ranks that cannot access their peers' memory.

The library is called directly instead of through torch.distributed. The ranks' authenticated
channel transfers its id, and no library thread watches captured steps or exits the process.
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
        has_ended: The communicator was aborted. Later results are invalid.
    """

    def __init__(
        self, rank: int, device: torch.device, swap: Swap, *, check: Callable[[], None]
    ) -> None:
        """Connect to all ranks, which must call it together.

        Args:
            swap: Exchanges bytes between all ranks.
            check: Raises an error if a rank has failed.

        Raises:
            CompileError: NCCL is missing, might use NVLink multicast, or cannot reach the peers.
            RankError: A rank does not connect in time.
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
        """Gather once, to open the connections for captured steps."""
        self.all_gather(torch.zeros(self.count, 16, dtype=torch.uint8, device=self.device))
        torch.cuda.synchronize(self.device)
        if self.has_ended:
            raise RankError("the group has ended")

    def all_gather(self, parts: Tensor) -> None:
        """Fill ``parts [n, ...]`` (contiguous) with the parts of all ranks.

        Every rank provides ``parts[rank]``. Runs on the current stream and inside CUDA graphs.

        Raises:
            ExchangeError: NCCL failed or was aborted.
        """
        assert len(parts) == self.count and parts.is_contiguous()
        if self.has_ended:
            raise ExchangeError("took no part in an exchange", self.rank)
        own = parts[self.rank]
        stream = torch.cuda.current_stream(self.device).cuda_stream
        num_bytes = own.numel() * own.element_size()
        try:
            self._call(
                "ncclAllGather",
                own.data_ptr(),
                parts.data_ptr(),
                num_bytes,
                _BYTES,
                self._communicator,
                stream,
            )
        except _RefusedError as error:
            raise ExchangeError(f"failed in an exchange by NCCL ({error})", self.rank) from None

    def abort(self) -> None:
        """End all current and later communication. Callable from any thread, without waiting.

        NCCL returns only after all captured graphs have released the communicator.
        """
        if self._ending is None:
            self.has_ended = True
            abort = self._library.ncclCommAbort
            self._ending = threading.Thread(
                target=abort, args=(self._communicator,), daemon=True, name="nccl"
            )
            self._ending.start()

    def close(self) -> None:
        """Free the communicator after pending work. Graphs must not use the communicator."""
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
        """Return the communicator for an id. A separate thread calls NCCL, which waits without a
        timeout.
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
    """NCCL's message for a failed call."""


def _load() -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(_LIBRARY)  # loaded by torch
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
