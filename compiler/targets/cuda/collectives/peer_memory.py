"""Memory that GPUs on a host share: an allocation for every rank, outside torch's pool.

Captured graphs contain its addresses, and the allocation lives until the group closes. Excludes the
contents.
"""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from tilewright.compiler.targets.cuda.kernels.common.nvrtc import check
from tilewright.distributed.world import NO_MULTICAST
from tilewright.errors import CompileError, allowed

Swap = Callable[[bytes], list[bytes]]
"""Exchange bytes between all ranks. Returns the bytes by rank, after a call on every rank."""

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_HANDLE_BYTES = 64
_PATTERN = 0x5EED0000


class UnreachedError(CompileError):
    """GPUs in a group cannot access their peers' memory. All ranks raise the same error."""


def check_no_multicast() -> None:
    """Raise an error if a communication library might use NVLink multicast.

    Raises:
        CompileError: An environment variable in ``NO_MULTICAST`` has a different value.
    """
    for name, value in NO_MULTICAST.items():
        if os.environ.get(name) != value:
            raise CompileError(
                f"{name} is {os.environ.get(name)!r}; {allowed([value])}, for processes with "
                "several GPUs"
            )


def check_access(devices: Sequence[int]) -> None:
    """Raise an error if GPUs of this machine cannot access their peers' memory.

    Raises:
        CompileError: Names the first pair.
    """
    from cuda.bindings import driver

    check(driver.cuInit(0))
    handles = [check(driver.cuDeviceGet(each)) for each in devices]
    for one, first in zip(devices, handles, strict=True):
        for other, second in zip(devices, handles, strict=True):
            if one != other and not check(driver.cuDeviceCanAccessPeer(first, second)):
                raise CompileError(
                    f"GPU {one} cannot reach the memory of GPU {other}; allowed: GPUs of one "
                    "machine that reach each other's (nvidia-smi topo -p2p r), or one rank"
                )


def check_reached(device: torch.device, swap: Swap, why_not: str = "") -> None:
    """Raise an error if the ranks' GPUs cannot access their peers' memory.

    Runs before any allocation. All ranks must call this function together.

    Args:
        why_not: This rank's reason against peer memory. Empty: none.

    Raises:
        UnreachedError: Has the first rank's reason, or names the first pair.
    """
    _agree(swap, why_not)
    visible = {_uuid(index): index for index in range(torch.cuda.device_count())}
    own = (_machine(), _uuid(torch.cuda.current_device() if device.index is None else device.index))
    gathered = swap(msgspec.json.encode(own))
    found = [msgspec.json.decode(each, type=tuple[str, str]) for each in gathered]
    _agree(swap, _why_unreached(own[0], found, visible))


def _why_unreached(machine: str, found: Sequence[tuple[str, str]], visible: dict[str, int]) -> str:
    """Return the reason why GPUs cannot access their peers' memory. Empty: they can.

    Args:
        found: Machine and GPU by rank.
        visible: Device index by GPU, in this process.
    """
    for rank, (other, uuid) in enumerate(found):
        if other != machine:
            return f"rank {rank} is on another machine"
        if uuid not in visible:
            return f"the GPU of rank {rank} is hidden from another rank's process"
    try:
        check_access([visible[uuid] for _, uuid in found])
    except CompileError as error:
        return str(error).partition(";")[0]
    return ""


def _agree(swap: Swap, problem: str) -> None:
    """Raise the first problem reported by a rank, on all ranks."""
    for said in swap(problem.encode()):
        if said:
            raise UnreachedError(said.decode())


def _uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _machine() -> str:
    """Return an id that all processes on a machine share, also in containers."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()


class PeerMemory:
    """A rank's memory, and its peers' memory as mapped in this process.

    Attributes:
        addresses: Start address of every rank's memory, by rank.
        num_bytes: Size of a rank's memory in bytes.
    """

    def __init__(
        self, rank: int, num_bytes: int, device: torch.device, swap: Swap, *, fill: int
    ) -> None:
        """Allocate and map the memory. All ranks must call this constructor together.

        On return, every rank's memory contains the 32-bit word ``fill`` only.

        Raises:
            UnreachedError: A peer's memory cannot be mapped, or its contents are wrong.
        """
        from cuda.bindings import driver

        assert num_bytes % 4 == 0
        self.rank, self.num_bytes, self._swap = rank, num_bytes, swap
        self._device, self._opened = device, list[int]()
        with torch.cuda.device(device):
            torch.zeros(1, device=device)  # creates the context
            self._own: int | None = int(check(driver.cuMemAlloc(num_bytes)))
            check(driver.cuMemsetD32(self._own, fill, num_bytes // 4))
            torch.cuda.synchronize(device)
            handle = check(driver.cuIpcGetMemHandle(self._own))
            found = swap(ctypes.string_at(handle.getPtr(), _HANDLE_BYTES))
            self.count = len(found)
            try:
                self.addresses = self._open_all(found)
                self._check(fill)
            except UnreachedError:
                self.close()
                raise

    def _open_all(self, found: Sequence[bytes]) -> list[int]:
        assert self._own is not None
        addresses, problem = [], ""
        for rank, data in enumerate(found):
            try:
                addresses.append(self._own if rank == self.rank else self._open(data))
            except RuntimeError as error:
                problem = f"rank {self.rank} cannot open the memory of rank {rank}'s GPU ({error})"
                break
        _agree(self._swap, problem)
        return addresses

    def _open(self, data: bytes) -> int:
        from cuda.bindings import driver

        handle = driver.CUipcMemHandle()
        ctypes.memmove(handle.getPtr(), data, _HANDLE_BYTES)
        lazily = driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        address = int(check(driver.cuIpcOpenMemHandle(handle, int(lazily))))
        self._opened.append(address)
        return address

    def _check(self, fill: int) -> None:
        """Write a word from every rank to every peer, and read the peers' words."""
        for rank, address in enumerate(self.addresses):
            _write(address + 4 * self.rank, _word(self.rank, rank))
        self._swap(b"")
        own, problem = self.addresses[self.rank], ""
        for rank in range(self.count):
            if (found := _read(own + 4 * rank)) != _word(rank, self.rank):
                problem = (
                    f"rank {rank} wrote {_word(rank, self.rank):#x} into the memory of rank "
                    f"{self.rank}, which reads {found:#x}"
                )
            _write(own + 4 * rank, fill)
        _agree(self._swap, problem)

    def close(self) -> None:
        """Free the memory. No rank may start another collective."""
        from cuda.bindings import driver

        if self._own is None:
            return
        own, self._own = self._own, None
        with torch.cuda.device(self._device):
            torch.cuda.synchronize(self._device)
            for address in self._opened:
                check(driver.cuIpcCloseMemHandle(address))
            self._opened.clear()
            check(driver.cuMemFree(own))


def _word(writer: int, reader: int) -> int:
    return _PATTERN + 256 * writer + reader


def _write(address: int, word: int) -> None:
    from cuda.bindings import driver

    check(driver.cuMemsetD32(address, word, 1))
    torch.cuda.synchronize()


def _read(address: int) -> int:
    from cuda.bindings import driver

    word: Any = ctypes.c_uint32()
    check(driver.cuMemcpyDtoH(ctypes.addressof(word), address, 4))
    return int(word.value)
