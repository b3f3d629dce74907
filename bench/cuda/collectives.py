"""``python -m bench bench-collectives``: all-reduce of two GPUs, by our kernels and by NCCL.

Two processes have a GPU each. A figure is microseconds of an all-reduce in a captured chain: the
slower rank, and the median of seven replays. Sums of our kernels are compared bit for bit.
"""

from __future__ import annotations

import multiprocessing
import statistics
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.common import keeper
from tilewright.distributed.world import forbid_multicast
from tilewright.errors import TilewrightError
from tilewright.evaluate.report.comparisons import median_and_range
from tilewright.evaluate.report.table import Table
from tilewright.options.arguments import integer, option, parse

if TYPE_CHECKING:
    from torch import Tensor

    from tilewright.compiler.targets.cuda.collectives.exchange import Exchange

SIZES = tuple(1024 * kilobytes for kilobytes in (4, 8, 16, 32, 64, 128, 512, 1024))
ROWS, WIDTH, REPEATS = (1, 2, 4, 8, 16, 32, 64), 4096, 7
_PART_BYTES, _SECONDS, _SMALL = 4 << 20, 140.0, 2.0**-70


@dataclass(frozen=True, slots=True)
class Figure:
    """Microseconds of a method for a message size, one of each replay."""

    method: str
    num_bytes: int
    times: tuple[float, ...]
    is_right: bool


@dataclass(frozen=True, slots=True)
class _Case:
    """A chain of all-reduces, and the expected result of our kernels."""

    method: str
    num_bytes: int
    chain: Callable[[], Tensor]
    wanted: Tensor | None = None


def run_rank(rank: int, pipe: Connection, figures: Any, store: str, length: int) -> None:
    """Measure all cases as one of two ranks. Rank 0 puts figures into the queue, and None last."""
    import torch

    def swap(own: bytes) -> list[bytes]:
        pipe.send_bytes(own)
        other = pipe.recv_bytes()
        return [own, other] if rank == 0 else [other, own]

    try:
        torch.cuda.set_device(rank)
        for case in _cases(rank, swap, store, length):
            graph = torch.cuda.CUDAGraph()
            case.chain()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                found = case.chain()
            graph.replay()
            torch.cuda.synchronize()
            is_right = case.wanted is None or torch.equal(found, case.wanted)
            times = []
            for _ in range(REPEATS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                swap(b"meet")
                graph.replay()  # both ranks begin together after it
                begin.record()
                graph.replay()
                end.record()
                end.synchronize()
                times.append(1e3 * begin.elapsed_time(end) / length)
            both = [
                struct.unpack("7d?", each) for each in swap(struct.pack("7d?", *times, is_right))
            ]
            slower = tuple(map(max, both[0][:-1], both[1][:-1]))
            if rank == 0:
                figures.put(
                    Figure(case.method, case.num_bytes, slower, both[0][-1] and both[1][-1])
                )
    except Exception as error:
        figures.put(f"rank {rank}: {type(error).__name__}: {error}")
    if rank == 0:
        figures.put(None)


def _cases(
    rank: int, swap: Callable[[bytes], list[bytes]], store: str, length: int
) -> Iterator[_Case]:
    import torch

    from tilewright.compiler.targets.cuda.collectives.exchange import EMPTY, SLOTS, Exchange
    from tilewright.compiler.targets.cuda.collectives.peer_memory import Peers, check_no_multicast

    device = torch.device("cuda", rank)
    peers = Peers(rank, SLOTS * 2 * _PART_BYTES, device, swap, fill=EMPTY)
    exchange = Exchange(peers.addresses, rank, part_bytes=_PART_BYTES, device=device)
    yield from _plain(rank, exchange, length)
    yield from _fused(rank, exchange, length)
    check_no_multicast()
    yield from _library(rank, store, length)


def _random(rank: int, *sizes: int) -> tuple[Tensor, Tensor]:
    """Return the values of this rank, and the sum of both ranks."""
    import torch

    device = torch.device("cuda", rank)
    seeded = [torch.Generator(device).manual_seed(each) for each in range(2)]
    made = [torch.randn(*sizes, generator=each, device=device) for each in seeded]
    values = [(_SMALL * each).bfloat16() for each in made]
    return values[rank], values[0].float() + values[1].float()


def _plain(rank: int, exchange: Exchange, length: int) -> Iterator[_Case]:
    import torch

    for num_bytes in SIZES:
        x, total = _random(rank, num_bytes // 2)
        buffers = [torch.empty_like(x), torch.empty_like(x)]

        def chain(x: Tensor = x, buffers: list[Tensor] = buffers) -> Tensor:
            for at in range(length):
                exchange.all_reduce(buffers[at % 2], x, wire="bf16", num_threads=256)
                x = buffers[at % 2]
            exchange.end_step()
            return x

        # The sum doubles in each all-reduce of the chain.
        yield _Case("ours", num_bytes, chain, total.bfloat16() * 2.0 ** (length - 1))


def _fused(rank: int, exchange: Exchange, length: int) -> Iterator[_Case]:
    import torch

    from tilewright.compiler.targets.cuda.collectives.exchange import shape_for

    norm, shape = torch.ones(WIDTH, device="cuda"), shape_for(WIDTH, "fp32")
    how: dict[str, Any] = {"wire": "fp32", "norm": norm, "eps": 1e-6, "shape": shape}
    for rows in ROWS:
        x, total = _random(rank, rows, WIDTH)
        own, out, stream = x.float(), torch.empty_like(x), torch.zeros_like(total)

        def chain(own: Tensor = own, stream: Tensor = stream, out: Tensor = out) -> Tensor:
            stream.zero_()
            for _ in range(length):
                exchange.all_reduce_add(own, stream, out=out, **how)
            exchange.end_step()
            return stream

        wanted = torch.zeros_like(stream)
        for _ in range(length):
            wanted += total
        yield _Case("ours with norm, fp32", rows * WIDTH * 4, chain, wanted)


def _library(rank: int, store: str, length: int) -> Iterator[_Case]:
    import torch
    import torch.distributed as dist

    device = torch.device("cuda", rank)
    where: dict[str, Any] = {"rank": rank, "world_size": 2, "device_id": device}
    dist.init_process_group("nccl", init_method=f"file://{store}", **where)
    for num_bytes in SIZES:
        x = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)

        def chain(x: Tensor = x) -> Tensor:
            for _ in range(length):
                dist.all_reduce(x)
            return x

        yield _Case("NCCL", num_bytes, chain)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    results: Path | None = option("append figures, as JSON lines", metavar="FILE", type=Path)
    chain: int = option("all-reduces of a graph", default=100, type=integer(2, 10_000))


def main(argv: Sequence[str]) -> int:
    """Run ``python -m bench bench-collectives``. Return 1 for a wrong sum."""
    words = "Measure all-reduces of two GPUs."
    options = parse(_Options, argv, prog="python -m bench bench-collectives", description=words)
    import torch

    if torch.cuda.device_count() < 2:
        raise TilewrightError("bench-collectives: this machine has fewer than two GPUs")
    forbid_multicast()
    keep, found = keeper(options.results), list[Figure]()
    context = multiprocessing.get_context("spawn")
    figures, ends = context.Queue(), context.Pipe()
    with tempfile.TemporaryDirectory() as folder:
        given = [(rank, ends[rank], figures, f"{folder}/store", options.chain) for rank in (0, 1)]
        children = [context.Process(target=run_rank, args=each, daemon=True) for each in given]
        for child in children:
            child.start()
        try:
            while (figure := figures.get(timeout=_SECONDS)) is not None:
                if isinstance(figure, str):
                    raise TilewrightError(figure)
                found.append(figure)
                keep(asdict(figure))
        finally:
            for child in children:
                child.join(5.0)
                child.kill()
    print(_table(found).markdown())
    return int(not all(each.is_right for each in found))


def _table(figures: Sequence[Figure]) -> Table:
    sizes = sorted({each.num_bytes for each in figures})
    times = {(each.method, each.num_bytes): each.times for each in figures}
    lines = [
        (method, *(median_and_range(times.get((method, size), ()), 2) for size in sizes))
        for method in dict.fromkeys(each.method for each in figures)
    ]
    wrong = [
        f"{each.method}, {each.num_bytes} bytes: wrong sum" for each in figures if not each.is_right
    ]
    medians = [statistics.median(each.times) for each in figures]
    notes = [*wrong, f"fastest: {min(medians):.2f} us"] if medians else wrong
    return Table.of(("us", *(f"{size // 1024} KB" for size in sizes)), lines, *notes)
