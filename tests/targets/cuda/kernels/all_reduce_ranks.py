"""Sums of two processes with a GPU each: chains of all-reduces, compared bit for bit."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from tilewright.compiler.targets.cuda.collectives.all_reduce import PeerAllReduce

SIZES = tuple(1024 * kilobytes for kilobytes in (4, 8, 16, 32, 64, 128, 512, 1024))
ROWS, WIDTH = (1, 2, 4, 8, 16, 32, 64), 4096
_PART_BYTES, _SECONDS, _SMALL = 4 << 20, 100.0, 2.0**-70


@dataclass(frozen=True, slots=True)
class _Case:
    """A chain of all-reduces and its expected result."""

    method: str
    num_bytes: int
    chain: Callable[[], Tensor]
    wanted: Tensor


def run_rank(rank: int, pipe: Connection, results: Any, length: int) -> None:
    """Run all cases as one of two ranks. Rank 0 puts results into the queue, and None last."""
    import torch

    def swap(own: bytes) -> list[bytes]:
        pipe.send_bytes(own)
        other = pipe.recv_bytes()
        return [own, other] if rank == 0 else [other, own]

    try:
        torch.cuda.set_device(rank)
        for case in _cases(rank, swap, length):
            graph = torch.cuda.CUDAGraph()
            case.chain()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                found = case.chain()
            graph.replay()
            torch.cuda.synchronize()
            both = swap(b"\1" if torch.equal(found, case.wanted) else b"\0")
            if rank == 0:
                results.put((case.method, case.num_bytes, both == [b"\1", b"\1"]))
    except Exception as error:
        results.put(f"rank {rank}: {type(error).__name__}: {error}")
    if rank == 0:
        results.put(None)


def _cases(rank: int, swap: Callable[[bytes], list[bytes]], length: int) -> Iterator[_Case]:
    import torch

    from tilewright.compiler.targets.cuda.collectives.all_reduce import EMPTY, SLOTS, PeerAllReduce
    from tilewright.compiler.targets.cuda.collectives.peer_memory import PeerMemory

    device = torch.device("cuda", rank)
    peers = PeerMemory(rank, SLOTS * 2 * _PART_BYTES, device, swap, fill=EMPTY)
    exchange = PeerAllReduce(peers.addresses, rank, part_bytes=_PART_BYTES, device=device)
    yield from _plain(rank, exchange, length)
    for wire in ("fp32", "bf16"):
        yield from _fused(rank, exchange, length, wire)


def _random(rank: int, *sizes: int) -> tuple[Tensor, Tensor]:
    """Return the values of this rank, and the sum of both ranks."""
    import torch

    device = torch.device("cuda", rank)
    seeded = [torch.Generator(device).manual_seed(each) for each in range(2)]
    made = [torch.randn(*sizes, generator=each, device=device) for each in seeded]
    values = [(_SMALL * each).bfloat16() for each in made]
    return values[rank], values[0].float() + values[1].float()


def _plain(rank: int, exchange: PeerAllReduce, length: int) -> Iterator[_Case]:
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
        yield _Case("plain", num_bytes, chain, total.bfloat16() * 2.0 ** (length - 1))


def _fused(rank: int, exchange: PeerAllReduce, length: int, wire: str) -> Iterator[_Case]:
    import torch

    from tilewright.compiler.targets.cuda.collectives.all_reduce import shape_for

    norm, shape = torch.ones(WIDTH, device="cuda"), shape_for(WIDTH, wire)
    how: dict[str, Any] = {"wire": wire, "norm": norm, "eps": 1e-6, "shape": shape}
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
        yield _Case(
            f"with norm, {wire}", rows * WIDTH * (4 if wire == "fp32" else 2), chain, wanted
        )


def sums_of_two_processes(length: int) -> dict[tuple[str, int], bool]:
    """Return whether both ranks have the expected sum, by method and message size.

    Raises:
        RuntimeError: if a rank fails.
    """
    context = multiprocessing.get_context("spawn")
    results, ends = context.Queue(), context.Pipe()
    given = [(rank, ends[rank], results, length) for rank in (0, 1)]
    children = [context.Process(target=run_rank, args=each, daemon=True) for each in given]
    for child in children:
        child.start()
    found: dict[tuple[str, int], bool] = {}
    try:
        while (each := results.get(timeout=_SECONDS)) is not None:
            if isinstance(each, str):
                raise RuntimeError(each)
            method, num_bytes, is_right = each
            found[method, num_bytes] = is_right
    finally:
        for child in children:
            child.join(5.0)
            child.kill()
    return found
