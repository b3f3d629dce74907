"""Launcher for ``all_reduce.cu``: collectives between GPUs whose memories reach each other.

Implements sums over ranks, the largest key in sharded logits, and gathers. Counts the collectives
in a step. Excludes the meaning of the data.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.common import nvrtc
from tilewright.distributed.parallel import MOST_GPUS

MOST_RANKS = MOST_GPUS
SLOTS = 3
EMPTY = 0x80000000
"""The word for missing data. All memory written by peers contains this word initially."""

WIRES = ("fp32", "bf16")
PROMPT_WIRE = "bf16"
"""Default message format for sums in prefill. These messages are long, and their size sets the
time.
"""
MOST_BLOCKS = 132
"""Maximum number of polling blocks. All must be resident: a polling block must not wait for a block
that has not started.
"""

_ELEMENTS = {"fp32": 4, "bf16": 8}  # elements in the 16 bytes sent by a thread at a time
_UNITS = {("fp32", "fp32"): (1, 2, 4), ("bf16", "fp32"): (1, 2), ("bf16", "bf16"): (1, 2)}
_MOST_THREADS = {("fp32", 4): 512, ("bf16", 1): 512, ("bf16", 2): 512}
_LIMIT, _STOPPED = 4, 5
_FAILED, _BY_RANK, _FOR_PEER, _AT_INDEX = range(4)


class _RankAddresses(ctypes.Structure):
    _fields_ = (
        ("peers", ctypes.c_uint64 * MOST_RANKS),
        ("state", ctypes.c_void_p),
        ("report", ctypes.c_void_p),
        ("part_bytes", ctypes.c_uint64),
        *((name, ctypes.c_int) for name in ("rank", "count", "index", "padding")),
    )


class _Reduce(ctypes.Structure):
    _fields_ = (
        ("group", _RankAddresses),
        *((name, ctypes.c_void_p) for name in ("x", "residual", "norm", "sum", "out")),
        *((name, ctypes.c_int) for name in ("num_rows", "width", "x_stride", "sum_stride")),
        *((name, ctypes.c_int) for name in ("out_stride", "is_bf16")),
        ("eps", ctypes.c_float),
        ("padding", ctypes.c_int),
    )


class _Best(ctypes.Structure):
    _fields_ = (
        ("group", _RankAddresses),
        *((name, ctypes.c_void_p) for name in ("keys", "ends", "tokens", "positions", "why")),
        *((name, ctypes.c_int) for name in ("num_rows", "num_keys", "keys_stride")),
        *((name, ctypes.c_int) for name in ("num_ends", "ends_stride", "first")),
    )


class _Deliver(ctypes.Structure):
    _fields_ = (
        ("group", _RankAddresses),
        *((name, ctypes.c_void_p) for name in ("x", "out")),
        *((name, ctypes.c_int) for name in ("num_words", "senders", "receivers", "padding")),
    )


class _Advance(ctypes.Structure):
    _fields_ = (("state", ctypes.c_void_p), ("count", ctypes.c_int))


SOURCE = nvrtc.KernelSource(
    Path(__file__).with_name("all_reduce.cu"),
    (
        "choose_best",
        "deliver",
        "advance",
        *(
            f"reduce_{wire}_{kind}_{units}_{ranks}"
            for (wire, kind), each in _UNITS.items()
            for units in each
            for ranks in (2, 4, 8)
        ),
    ),
    headers=("all_reduce.cuh", "primitives.cuh"),
    structures=(
        ("Group", _RankAddresses),
        ("Reduce", _Reduce),
        ("Best", _Best),
        ("Deliver", _Deliver),
    ),
)


@dataclass(frozen=True, slots=True)
class AllReduceConfig:
    """Launch configuration for a row of a sum.

    The configuration sets the addition order in a norm. It must not depend on the row count.

    Attributes:
        num_threads: Threads in a block.
        units: 16-byte words for each thread.
        num_blocks: Blocks that share a row.
    """

    num_threads: int
    units: int = 1
    num_blocks: int = 1


@dataclass(frozen=True, slots=True)
class Failure:
    """A timeout: ``rank`` waited for ``peer`` at collective ``index`` of its step."""

    rank: int
    peer: int
    index: int


def shape_for(width: int, wire: str) -> AllReduceConfig:
    """Return the launch configuration for rows with a norm.

    A single block is faster than several blocks with a barrier, so the result has the fewest
    blocks.

    Args:
        width: Columns.
        wire: Message format, an entry of ``WIRES``.

    Raises:
        ValueError: A row is wider than a cluster supports.
    """
    words = width // _ELEMENTS[wire]
    units = max(_UNITS[wire, "fp32"]) if wire == "fp32" or words > 512 else 1
    for num_blocks in (1, 2, 4, 8):
        num_threads = 32 * math.ceil(words / (32 * units * num_blocks))
        if num_threads <= _MOST_THREADS[wire, units]:
            return AllReduceConfig(num_threads, units, num_blocks)
    raise ValueError(f"rows of {width} columns are wider than a cluster takes")


class PeerAllReduce:
    """A rank's side of the collectives in a group.

    All ranks must call the same methods in the same order with the same sizes, on one stream. CUDA
    graphs can capture every method.
    """

    def __init__(
        self,
        addresses: Sequence[int],
        rank: int,
        *,
        part_bytes: int,
        device: torch.device,
        most_blocks: int = MOST_BLOCKS,
        kept: object = None,
    ) -> None:
        """Connect to the memory of all ranks.

        Args:
            addresses: The ranks' memory addresses in this process. Each memory has ``SLOTS`` times
                ``len(addresses)`` times ``part_bytes`` bytes and contains ``EMPTY`` only.
            part_bytes: Maximum message size in bytes, divisible by 16.
            most_blocks: Maximum polling block count.
            kept: An object that must live as long as this instance, for example the memory.
        """
        self._kept, self._most_blocks = kept, most_blocks
        assert 1 <= len(addresses) <= MOST_RANKS and part_bytes % 16 == 0
        self.rank, self.count, self.part_bytes = rank, len(addresses), part_bytes
        self._ranks = 2 if self.count <= 2 else 4 if self.count <= 4 else 8
        self._state = torch.zeros(8, dtype=torch.int32, device=device)
        self._report = torch.zeros(8, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._group = _RankAddresses(
            (ctypes.c_uint64 * MOST_RANKS)(*addresses),
            self._state.data_ptr(),
            self._report.data_ptr(),
            part_bytes,
            rank,
            self.count,
        )
        self._index = 0
        self._stream: int | None = None
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.set_limit(10.0)

    def set_limit(self, seconds: float) -> None:
        """Set the timeout in seconds. After it, a kernel reports a failure and all polling ends."""
        self._state[_LIMIT] = min(2**31 - 1, math.ceil(seconds * 1e9 / 1024))

    def failure(self) -> Failure | None:
        """Return the failure reported by a kernel, or None. Reads host memory only."""
        if not self._report[_FAILED]:
            return None
        rank, peer, index = (int(self._report[i]) for i in (_BY_RANK, _FOR_PEER, _AT_INDEX))
        return Failure(rank, peer, index)

    def stop(self) -> None:
        """End all current and later polling in this rank's kernels. Their results become invalid.

        Callable from any thread. Does not wait or allocate. A lost device is ignored.
        """
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self._aside):
            self._state[_STOPPED : _STOPPED + 1].fill_(1)

    def all_reduce(
        self, out: Tensor, x: Tensor, *, wire: str, num_threads: int = 256, units: int = 1
    ) -> None:
        """Write the sum over all ranks' ``x`` to ``out``.

        Args:
            out: fp32 or bfloat16, in the same shape as ``x``.
            x: fp32, or bfloat16 if ``wire`` is ``bf16``. If ``x`` or ``out`` is not contiguous, the
                shape must be ``[R, W]``.
            wire: Message format from ``WIRES``.
            num_threads, units: Launch configuration; see `AllReduceConfig`.
        """
        assert out.shape == x.shape
        if x.is_contiguous() and out.is_contiguous():
            width = _piece(x.numel(), num_threads * units * _ELEMENTS[wire], _ELEMENTS[wire])
            x, out, shape = (
                x.view(-1, width),
                out.view(-1, width),
                AllReduceConfig(num_threads, units),
            )
        else:
            shape = shape_for(x.shape[1], wire)
        for part, rows in self._parts(x, wire):
            to = out[part]
            arguments = _Reduce(
                x=rows.data_ptr(),
                out=to.data_ptr(),
                num_rows=len(rows),
                width=x.shape[1],
                x_stride=rows.stride(0),
                out_stride=out.stride(0),
                is_bf16=out.dtype == torch.bfloat16,
            )
            self._reduce(arguments, wire, rows.dtype, shape)

    def all_reduce_add(
        self,
        x: Tensor,
        stream: Tensor,
        *,
        wire: str,
        out: Tensor | None = None,
        norm: Tensor | None = None,
        eps: float = 0.0,
        shape: AllReduceConfig | None = None,
    ) -> None:
        """Add all ranks' ``x [R, W]`` to ``stream [R, W]``, both fp32.

        Args:
            wire: Message format from ``WIRES``.
            out: RMSNorm of the new stream, ``[R, W]`` bfloat16 or fp32. Requires ``norm``.
            norm: Norm weights ``[W]``. None: no norm.
            shape: Launch configuration. None: `shape_for`. It sets the addition order in the norm.
        """
        width = x.shape[1]
        assert stream.shape == x.shape and x.dtype == stream.dtype == torch.float32
        assert (out is None) == (norm is None) and x.stride(1) == stream.stride(1) == 1
        for part, rows in self._parts(x, wire):
            to = stream[part]
            arguments = _Reduce(
                x=rows.data_ptr(),
                residual=to.data_ptr(),
                sum=to.data_ptr(),
                num_rows=len(rows),
                width=width,
                x_stride=rows.stride(0),
                sum_stride=stream.stride(0),
                eps=eps,
            )
            if out is not None and norm is not None:
                assert out.shape == x.shape and norm.shape == (width,) and out.stride(1) == 1
                arguments.norm, arguments.out = norm.data_ptr(), out[part].data_ptr()
                arguments.out_stride = out.stride(0)
                arguments.is_bf16 = out.dtype == torch.bfloat16
            self._reduce(arguments, wire, rows.dtype, shape or shape_for(width, wire))

    def choose_best(
        self,
        tokens: Tensor,
        why: Tensor,
        keys: Tensor,
        *,
        end_tokens: Tensor,
        first_column: int,
        positions: Tensor | None = None,
    ) -> None:
        """Select the likeliest tokens from logits whose columns are sharded over ranks.

        Writes the same outputs as :func:`.argmax.choose`.

        Args:
            keys: Maximum keys ``[B, N]`` over column ranges on this rank.
            first_column: Index of this rank's first column.
        """
        num_rows = len(tokens)
        arguments = _Best(
            keys=keys.data_ptr(),
            ends=end_tokens.data_ptr(),
            tokens=tokens.data_ptr(),
            positions=0 if positions is None else positions.data_ptr(),
            why=why.data_ptr(),
            num_rows=num_rows,
            num_keys=keys.shape[1],
            keys_stride=keys.stride(0),
            num_ends=end_tokens.shape[1],
            ends_stride=end_tokens.stride(0),
            first=first_column,
        )
        assert 8 * num_rows <= self.part_bytes
        self._launch("choose_best", arguments, math.ceil(num_rows / 8), 256)

    def deliver(self, out: Tensor, x: Tensor, *, senders: int, receivers: int) -> None:
        """Copy ``x`` from each rank in ``senders`` to ``out [n, ...]`` on each rank in
        ``receivers``.

        The size is divisible by 16 bytes and equal on all ranks. A four-byte word that equals fp32
        -0.0 arrives as +0.0.

        Args:
            senders, receivers: Rank bit masks.
        """
        num_bytes = x.numel() * x.element_size()
        assert x.is_contiguous() and out.is_contiguous() and num_bytes % 16 == 0
        assert num_bytes <= self.part_bytes and out.numel() == self.count * x.numel()
        words = num_bytes // 16
        arguments = _Deliver(
            x=x.data_ptr(),
            out=out.data_ptr(),
            num_words=words,
            senders=senders,
            receivers=receivers,
        )
        self._launch("deliver", arguments, min(self._most_blocks, math.ceil(words / 512)), 512)

    def end_step(self) -> None:
        """Advance the counter after a step's last collective. Every rank must call this
        method.
        """
        if not self._index:
            return
        arguments = _Advance(self._state.data_ptr(), self._index)
        at = nvrtc.Launch((1, 1, 1), 1)
        nvrtc.launch(SOURCE, "advance", at=at, arguments=arguments, spread=True)
        self._index = 0

    def _check_stream(self) -> None:
        """Check that all collectives use one stream. Concurrent collectives with one number would
        deadlock.
        """
        if self._state.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream().cuda_stream
        assert self._stream in (None, stream), "an exchange belongs to one stream"
        self._stream = stream

    def _parts(self, x: Tensor, wire: str) -> Iterator[tuple[slice, Tensor]]:
        """Yield row ranges of ``x`` that fit a slot, and this rank's values for the kernels."""
        assert x.shape[1] % _ELEMENTS[wire] == 0 and x.stride(1) == 1, x.shape
        most = self.part_bytes // (x.shape[1] // _ELEMENTS[wire] * 16)
        for first in range(0, len(x), most):
            part = slice(first, first + most)
            yield part, x[part]

    def _reduce(
        self, arguments: _Reduce, wire: str, kind: torch.dtype, shape: AllReduceConfig
    ) -> None:
        values = "bf16" if kind == torch.bfloat16 else "fp32"
        assert shape.units in _UNITS[wire, values], f"{shape} of {values} sent as {wire}"
        name = f"reduce_{wire}_{values}_{shape.units}_{self._ranks}"
        most = self._most_blocks // shape.num_blocks * shape.num_blocks
        num_blocks = min(most, arguments.num_rows * shape.num_blocks)
        self._launch(name, arguments, num_blocks, shape.num_threads, shape.num_blocks)

    def _launch(
        self, name: str, arguments: ctypes.Structure, blocks: int, threads: int, cluster: int = 1
    ) -> None:
        self._check_stream()
        self._group.index = self._index
        arguments.group = self._group  # type: ignore[attr-defined]
        self._index += 1
        at = nvrtc.Launch((blocks, 1, 1), threads, cluster=(cluster, 1, 1))
        nvrtc.launch(SOURCE, name, at=at, arguments=arguments)


def _piece(size: int, most: int, unit: int) -> int:
    """Return the largest divisor of ``size`` that is a multiple of ``unit`` and at most
    ``most``.
    """
    assert size % unit == 0, f"{size} is no multiple of {unit}"
    return next(n for n in range(min(most, size) // unit * unit, 0, -unit) if size % n == 0)
