"""exchange.cu on the device: sums over ranks, the best key of dealt logits, values side by side.

A rank's side of a group whose memories reach each other (`..peers`). Counts the exchanges of a
step, and knows nothing of what is exchanged.
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
"""The word that stands where nothing has come yet, in all of the memory that peers write to."""

WIRES = ("fp32", "bf16")
PROMPT_WIRE = "bf16"
"""In which sums of prompts travel where none is named: they are long, and bytes are their time."""
MOST_BLOCKS = 132
"""That poll at a time: all of them have a place, so none waits for one that has not begun."""

_ELEMENTS = {"fp32": 4, "bf16": 8}  # in the 16 bytes that a thread sends at a time
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


class _Ping(ctypes.Structure):
    _fields_ = (("group", _RankAddresses), ("turns", ctypes.c_int))


SOURCE = nvrtc.KernelSource(
    Path(__file__).with_name("exchange.cu"),
    (
        "choose_best",
        "deliver",
        "advance",
        "ping",
        *(
            f"reduce_{wire}_{kind}_{units}_{ranks}"
            for (wire, kind), each in _UNITS.items()
            for units in each
            for ranks in (2, 4, 8)
        ),
    ),
    headers=("exchange.cuh", "primitives.cuh"),
    structures=(
        ("Group", _RankAddresses),
        ("Reduce", _Reduce),
        ("Best", _Best),
        ("Deliver", _Deliver),
    ),
)


@dataclass(frozen=True, slots=True)
class AllReduceConfig:
    """How a row of a sum lies on the device: threads a block, words of 16 bytes a thread, blocks
    that share the row. It says in what order a norm's squares are added, so it never depends on
    how many rows there are.
    """

    num_threads: int
    units: int = 1
    num_blocks: int = 1


@dataclass(frozen=True, slots=True)
class Failure:
    """Who gave up waiting: the rank, for whom, and at which exchange of its step."""

    rank: int
    peer: int
    index: int


def shape_for(width: int, wire: str) -> AllReduceConfig:
    """The shape of rows with a norm: one block where it has room for them, which was measured
    faster than several with a barrier between them.
    """
    words = width // _ELEMENTS[wire]
    units = max(_UNITS[wire, "fp32"]) if wire == "fp32" or words > 512 else 1
    for num_blocks in (1, 2, 4, 8):
        num_threads = 32 * math.ceil(words / (32 * units * num_blocks))
        if num_threads <= _MOST_THREADS[wire, units]:
            return AllReduceConfig(num_threads, units, num_blocks)
    raise ValueError(f"rows of {width} columns are wider than a cluster takes")


class PeerAllReduce:
    """A rank's side of the exchanges of a group. All ranks call the same methods in the same order
    with the same sizes; every method can be captured in a CUDA graph; all run on one stream.
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
        """``addresses``: where each rank's memory begins as this process reaches it, ``SLOTS``
        times ``len(addresses)`` times ``part_bytes`` long, full of ``EMPTY`` before any exchange;
        ``most_blocks``: that wait at a time; ``kept``: what is to live as long.
        """
        self._kept, self._most_blocks = kept, most_blocks
        assert 1 <= len(addresses) <= MOST_RANKS and part_bytes % 16 == 0
        self.rank, self.count, self.part_bytes = rank, len(addresses), part_bytes
        self._ranks = 2 if self.count <= 2 else 4 if self.count <= 4 else 8
        self._state = torch.zeros(8, dtype=torch.int32, device=device)
        self._report = torch.zeros(8, dtype=torch.int32, pin_memory=device.type == "cuda")
        self._group = _RankAddresses(
            (ctypes.c_uint64 * MOST_RANKS)(*addresses), self._state.data_ptr(),
            self._report.data_ptr(), part_bytes, rank, self.count,
        )  # fmt: skip
        self._index = 0
        self._stream: int | None = None
        self._aside = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.set_limit(10.0)

    def set_limit(self, seconds: float) -> None:
        """How long a kernel waits for a peer before it gives up and stops all waiting."""
        self._state[_LIMIT] = min(2**31 - 1, math.ceil(seconds * 1e9 / 1024))

    def failure(self) -> Failure | None:
        """What a kernel reported when it gave up; None where none did. Reads host memory alone."""
        if not self._report[_FAILED]:
            return None
        rank, peer, index = (int(self._report[i]) for i in (_BY_RANK, _FOR_PEER, _AT_INDEX))
        return Failure(rank, peer, index)

    def stop(self) -> None:
        """End all waiting of this rank's kernels, now and later: what they give means nothing. From
        any thread, and without waiting: nothing is allocated. A device that is lost waits no more.
        """
        with contextlib.suppress(RuntimeError), torch.cuda.stream(self._aside):
            self._state[_STOPPED : _STOPPED + 1].fill_(1)

    def all_reduce(
        self, out: Tensor, x: Tensor, *, wire: str, num_threads: int = 256, units: int = 1
    ) -> None:
        """``out`` is the sum of all ranks' ``x``, of equal shapes: fp32 or bfloat16, ``x`` the
        latter for a wire of ``bf16`` alone. Of contiguous ones any shape; else ``[R, W]``.
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
                x=rows.data_ptr(), out=to.data_ptr(), num_rows=len(rows), width=x.shape[1],
                x_stride=rows.stride(0), out_stride=out.stride(0),
                is_bf16=out.dtype == torch.bfloat16,
            )  # fmt: skip
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
        """Add all ranks' ``x [R, W]`` to ``stream [R, W]``, both fp32; where there is ``norm [W]``,
        ``out [R, W]`` (bfloat16 or fp32) is the stream's RMSNorm, each row's in one order.
        """
        width = x.shape[1]
        assert stream.shape == x.shape and x.dtype == stream.dtype == torch.float32
        assert (out is None) == (norm is None) and x.stride(1) == stream.stride(1) == 1
        for part, rows in self._parts(x, wire):
            to = stream[part]
            arguments = _Reduce(
                x=rows.data_ptr(), residual=to.data_ptr(), sum=to.data_ptr(), num_rows=len(rows),
                width=width, x_stride=rows.stride(0), sum_stride=stream.stride(0), eps=eps,
            )  # fmt: skip
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
        """What :func:`.choose.choose` writes, of logits whose columns are dealt over the ranks:
        ``keys [B, N]`` are those of chunks of this rank's columns, which begin at ``first_column``.
        """
        num_rows = len(tokens)
        arguments = _Best(
            keys=keys.data_ptr(), ends=end_tokens.data_ptr(), tokens=tokens.data_ptr(),
            positions=0 if positions is None else positions.data_ptr(), why=why.data_ptr(),
            num_rows=num_rows, num_keys=keys.shape[1], keys_stride=keys.stride(0),
            num_ends=end_tokens.shape[1], ends_stride=end_tokens.stride(0), first=first_column,
        )  # fmt: skip
        assert 8 * num_rows <= self.part_bytes
        self._launch("choose_best", arguments, math.ceil(num_rows / 8), 256)

    def deliver(self, out: Tensor, x: Tensor, *, senders: int, receivers: int) -> None:
        """``out [n, ...]``, of the ranks whose bits are in ``receivers``, gets the ``x`` of each
        rank whose bit is in ``senders``. Whole words of 16 bytes, as many of every rank; a word of
        four bytes that is -0.0 in fp32 arrives as +0.0.
        """
        num_bytes = x.numel() * x.element_size()
        assert x.is_contiguous() and out.is_contiguous() and num_bytes % 16 == 0
        assert num_bytes <= self.part_bytes and out.numel() == self.count * x.numel()
        words = num_bytes // 16
        arguments = _Deliver(
            x=x.data_ptr(), out=out.data_ptr(), num_words=words, senders=senders,
            receivers=receivers,
        )  # fmt: skip
        self._launch("deliver", arguments, min(self._most_blocks, math.ceil(words / 512)), 512)

    def end_step(self) -> None:
        """Behind the last exchange of a step, on every rank."""
        if not self._index:
            return
        arguments = _Advance(self._state.data_ptr(), self._index)
        at = nvrtc.Launch((1, 1, 1), 1)
        nvrtc.launch(SOURCE, "advance", at=at, arguments=arguments, spread=True)
        self._index = 0

    def ping(self, turns: int) -> None:
        """A word between the first two ranks, so many times to and fro; outside any step, with a
        host's barrier before and behind it.
        """
        arguments = _Ping(self._group, turns)
        at = nvrtc.Launch((1, 1, 1), 1)
        nvrtc.launch(SOURCE, "ping", at=at, arguments=arguments, spread=True)

    def _check_stream(self) -> None:
        """On two streams at a time, two exchanges of one number would wait for each other."""
        if self._state.device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream().cuda_stream
        assert self._stream in (None, stream), "an exchange belongs to one stream"
        self._stream = stream

    def _parts(self, x: Tensor, wire: str) -> Iterator[tuple[slice, Tensor]]:
        """So many rows of ``x`` at a time as a slot holds, and the values that the kernels read as
        this rank's.
        """
        assert x.shape[1] % _ELEMENTS[wire] == 0 and x.stride(1) == 1, x.shape
        most = self.part_bytes // (x.shape[1] // _ELEMENTS[wire] * 16)
        for first in range(0, len(x), most):
            part = slice(first, first + most)
            yield part, x[part]

    def _reduce(
        self, arguments: _Reduce, wire: str, kind: torch.dtype, shape: AllReduceConfig
    ) -> None:
        held = "bf16" if kind == torch.bfloat16 else "fp32"
        assert shape.units in _UNITS[wire, held], f"{shape} of {held} sent as {wire}"
        name = f"reduce_{wire}_{held}_{shape.units}_{self._ranks}"
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
    """The largest divisor of ``size`` up to ``most`` that is a multiple of ``unit``."""
    assert size % unit == 0, f"{size} is no multiple of {unit}"
    return next(n for n in range(min(most, size) // unit * unit, 0, -unit) if size % n == 0)
