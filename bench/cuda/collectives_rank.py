"""One of the two processes of ``python -m bench bench-collectives``: captures and times chains."""

from __future__ import annotations

import struct
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.collectives.exchange import (
    EMPTY,
    SLOTS,
    Exchange,
    Shape,
    shape_for,
)
from tilewright.compiler.targets.cuda.collectives.peer_memory import Peers, check_no_multicast

SIZES = tuple(1024 * each for each in (4, 8, 16, 32, 64, 128, 512, 1024))
REPEATS, TURNS, ROW = 7, 1000, 4096
_PART_BYTES = 4 << 20
_SMALL = 2.0**-70
"""What a sum that doubles in each exchange of a chain begins near."""

THREADS = (64, 128, 256, 512)
SHAPES = (
    Shape(1024), Shape(512, 2), Shape(256, 4), Shape(512, 1, 2), Shape(256, 2, 2), Shape(256, 1, 4),
    Shape(128, 2, 4), Shape(128, 1, 8),
)  # fmt: skip
WIRE_SHAPES = (Shape(512), Shape(256, 2), Shape(256, 1, 2), Shape(128, 1, 4))

Chain = Callable[[], Tensor | None]


@dataclass(slots=True)
class Rank:
    """This process's side: its exchange, and what it tells the process that started it."""

    rank: int
    pipe: Connection
    length: int
    only: str
    exchange: Exchange = field(init=False)
    peers: Peers = field(init=False)

    def swap(self, own: bytes) -> list[bytes]:
        self.pipe.send(("swap", own))
        found: list[bytes] = self.pipe.recv()
        return found

    def open(self) -> None:
        device = torch.device("cuda", self.rank)
        torch.cuda.set_device(device)
        num_bytes = SLOTS * 2 * _PART_BYTES
        self.peers = Peers(self.rank, num_bytes, device, self.swap, fill=EMPTY)
        self.exchange = Exchange(
            self.peers.addresses, self.rank, part_bytes=_PART_BYTES, device=device
        )

    def measure(
        self, method: str, num_bytes: int, chain: Chain, wanted: Tensor | None = None
    ) -> None:
        """Time a chain of ``length`` exchanges; what it gives is to be ``wanted``, where known."""
        if not method.startswith(self.only):
            return
        graph, given = self._capture(chain)
        graph.replay()
        torch.cuda.synchronize()
        is_right = wanted is None or given is None or torch.equal(given, wanted)
        times = []
        for _ in range(REPEATS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self.swap(b"")
            graph.replay()  # the ranks meet
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(1e3 * begin.elapsed_time(end) / self.length)
        if self.exchange.failure() is not None:
            raise RuntimeError(f"{method}: {self.exchange.failure()}")
        self.report(method, num_bytes, times, is_right)

    def report(self, method: str, num_bytes: int, times: list[float], is_right: bool) -> None:
        """The slower rank's times go to the process that started us."""
        found = self.swap(struct.pack(f"{len(times)}d?", *times, is_right))
        both = [struct.unpack(f"{len(times)}d?", each) for each in found]
        slower = tuple(max(each) for each in zip(*(one[:-1] for one in both), strict=True))
        if not self.rank:
            self.pipe.send(("figure", (method, num_bytes, slower, all(one[-1] for one in both))))

    def _capture(self, chain: Chain) -> tuple[torch.cuda.CUDAGraph, Tensor | None]:
        chain()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            given = chain()
        return graph, given


def run_rank(rank: int, pipe: Connection, store: str, length: int, sweep: bool, only: str) -> None:
    """Measure everything, in the same order on both ranks; what fails is said and left out."""
    side = Rank(rank, pipe, length, only)
    try:
        side.open()
        _ping(side)
        for part in _parts(side, store, sweep):
            part()
    except Exception:
        pipe.send(("note", traceback.format_exc(limit=6)))
    with suppress(OSError):
        pipe.send(("done", None))


def _parts(side: Rank, store: str, sweep: bool) -> Iterator[Callable[[], None]]:
    yield lambda: _ours(side, (256,))
    yield lambda: _fused(side, "fp32", (Shape(256, 4), Shape(512, 2)))
    yield lambda: _fused(side, "bf16", (Shape(512), Shape(256, 2)))
    yield lambda: _best(side)
    if sweep:
        for _ in range(2):  # A B A B
            yield lambda: _ours(side, THREADS)
            yield lambda: _fused(side, "fp32", SHAPES)
            yield lambda: _fused(side, "bf16", WIRE_SHAPES)
    yield lambda: _library(side, store)
    yield lambda: _ours(side, (256,))
    yield lambda: _gathered(side)


def _ping(side: Rank) -> None:
    times = []
    for _ in range(REPEATS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        side.swap(b"")
        begin.record()
        side.exchange.ping(TURNS)
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end) / (2 * TURNS))
    side.swap(b"")
    side.report("ping", 8, times[1:], side.exchange.failure() is None)


def _random(side: Rank, *sizes: int) -> tuple[Tensor, Tensor]:
    """This rank's values, and both ranks' sum of them."""
    device = torch.device("cuda", side.rank)
    seeded = [torch.Generator(device).manual_seed(rank) for rank in range(2)]
    made = [torch.randn(*sizes, generator=each, device=device) for each in seeded]
    values = [(_SMALL * each).bfloat16() for each in made]
    return values[side.rank], values[0].float() + values[1].float()


def _ours(side: Rank, threads: tuple[int, ...]) -> None:
    """A chain in which the sum doubles: its end is known to the bit."""
    for num_bytes in SIZES:
        x, total = _random(side, num_bytes // 2)
        wanted = total.bfloat16() * 2.0 ** (side.length - 1)
        buffers = [torch.empty_like(x), torch.empty_like(x)]
        for num_threads in threads:

            def chain(x: Tensor = x, buffers: Any = buffers, each: int = num_threads) -> Tensor:
                for at in range(side.length):
                    target = buffers[at % 2]
                    side.exchange.all_reduce(target, x, wire="bf16", num_threads=each)
                    x = target
                side.exchange.end_step()
                return x

            side.measure(f"ours, {num_threads} threads", num_bytes, chain, wanted)


def _gathered(side: Rank) -> None:
    """What ranks do whose GPUs do not reach each other: NCCL gathers, and our kernel adds."""
    from tilewright.compiler.targets.cuda.collectives.gathered import GatheredExchange
    from tilewright.compiler.targets.cuda.collectives.nccl import Nccl

    device = torch.device("cuda", side.rank)
    library = Nccl(side.rank, device, side.swap, check=lambda: None)
    library.warm_up()
    exchange = GatheredExchange(library, part_bytes=_PART_BYTES, device=device)
    shape = shape_for(ROW, "fp32")
    _fused(side, "fp32", (shape,), exchange, "NCCL's gather, ours with norm")


def _fused(
    side: Rank,
    wire: str,
    shapes: tuple[Shape, ...],
    exchange: Exchange | None = None,
    name: str = "ours with norm",
) -> None:
    """Rows of fp32, the residual and the norm; bytes are those that a rank sends."""
    exchange = exchange or side.exchange
    for rows in (1, 2, 4, 8, 16, 32, 64):
        x, total = _random(side, rows, ROW)
        own = x.float()
        norm = torch.ones(ROW, device="cuda")
        out = torch.empty_like(x)
        for shape in shapes:
            stream = torch.zeros(rows, ROW, device="cuda")

            def chain(shape: Shape = shape, stream: Tensor = stream, own: Tensor = own,
                      out: Tensor = out, norm: Tensor = norm) -> Tensor:  # fmt: skip
                stream.zero_()
                for _ in range(side.length):
                    exchange.all_reduce_add(
                        own, stream, wire=wire, out=out, norm=norm, eps=1e-6, shape=shape
                    )
                exchange.end_step()
                return stream

            wanted = torch.zeros_like(stream)
            for _ in range(side.length):
                wanted += total
            shaped = f"{shape.num_threads} x {shape.units} x {shape.num_blocks}"
            num_bytes = rows * ROW * (4 if wire == "fp32" else 2)
            side.measure(f"{name}, {wire}, {shaped}", num_bytes, chain, wanted)


def _best(side: Rank) -> None:
    """The exchange that ends a greedy step: 8 bytes a row."""
    for rows in (1, 64):
        keys = torch.randint(1, 2**30, (rows, 32), device="cuda") << 32 | 0xF0000000
        tokens = torch.zeros(rows, dtype=torch.int64, device="cuda")
        why = torch.zeros(rows, dtype=torch.uint8, device="cuda")
        ends = torch.full((rows, 16), -1, device="cuda")

        def chain(keys: Tensor = keys, tokens: Tensor = tokens, why: Tensor = why,
                  ends: Tensor = ends) -> None:  # fmt: skip
            for _ in range(side.length):
                side.exchange.choose_best(
                    tokens, why, keys, end_tokens=ends, first_column=64128 * side.rank
                )
            side.exchange.end_step()

        side.measure("best keys", 8 * rows, chain)


def _library(side: Rank, store: str) -> None:
    """NCCL's all-reduce, and torch's one-shot over symmetric memory."""
    import torch.distributed as dist

    check_no_multicast()
    device = torch.device("cuda", side.rank)
    dist.init_process_group(
        "nccl", init_method=f"file://{store}", rank=side.rank, world_size=2, device_id=device
    )
    for num_bytes in SIZES:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)

        def chain(x: Tensor = x) -> None:
            for _ in range(side.length):
                dist.all_reduce(x)

        side.measure("NCCL", num_bytes, chain)
    import torch.distributed._symmetric_memory as symmetric

    group = dist.group.WORLD
    assert group is not None
    for num_bytes in SIZES:
        x = symmetric.empty(num_bytes // 2, dtype=torch.bfloat16, device=device)
        symmetric.rendezvous(x, group)
        x.zero_()

        def once(x: Tensor = x) -> None:
            for _ in range(side.length):
                torch.ops.symm_mem.one_shot_all_reduce(x, "sum", group.group_name)

        side.measure("torch's one-shot", num_bytes, once)
