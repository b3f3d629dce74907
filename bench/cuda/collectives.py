"""``bench bench-collectives``: exchanges between two GPUs, ours beside NCCL's and torch's.

Two processes, one a GPU. Every figure is microseconds an exchange of a chain captured in a CUDA
graph, the slower rank, the median of seven replays.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path

from bench.in_turn import median_and_range
from tilewright.cli.terminal.console import err, note
from tilewright.distributed.world import forbid_multicast
from tilewright.errors import TilewrightError
from tilewright.evaluate.report.table import Table
from tilewright.options.arguments import integer, option, parse
from tilewright.utils.json_lines import append_lines

_SECONDS = 140.0
PING = "ping"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    results: Path | None = option("write figures, as JSON lines", metavar="FILE", type=Path)
    chain: int = option("exchanges of a graph (100)", default=100, type=integer(2, 10_000))
    sweep: bool = option("try other launch shapes of our kernels too", default=False)
    only: str = option("methods whose name begins so", default="", metavar="NAME")


@dataclass(frozen=True, slots=True)
class Figure:
    """Microseconds an exchange: of one method and so many bytes, of each replay the slower rank."""

    method: str
    num_bytes: int
    times: tuple[float, ...]
    is_right: bool

    @property
    def median(self) -> float:
        return statistics.median(self.times)


def main(argv: Sequence[str]) -> int:
    """Run and print; exit code 1 where a sum was wrong or a process did not come to its end."""
    asked = parse(
        _Asked, argv, prog="python -m bench bench-collectives", description=(__doc__ or "")
    )
    import torch

    if torch.cuda.device_count() < 2:
        raise TilewrightError("bench-collectives: this machine has fewer than two GPUs")
    forbid_multicast()
    figures = list(_measured(asked))
    print(_table(figures).markdown())
    wrong = [each for each in figures if not each.is_right]
    for each in wrong:
        note(err(), f"{each.method}, {each.num_bytes} bytes: the sum is wrong")
    return int(bool(wrong) or not figures)


def _measured(asked: _Asked) -> Iterable[Figure]:
    """The figures of both processes, as they come; none later than the time given."""
    from bench.cuda.collectives_rank import run_rank

    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        ends, children = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            what = (rank, theirs, f"{folder}/store", asked.chain, asked.sweep, asked.only)
            children.append(context.Process(target=run_rank, args=what, daemon=True))
            children[-1].start()
            theirs.close()
            ends.append(ours)
        try:
            yield from _serve(ends, asked)
        finally:
            for child in children:
                child.join(5.0)
                child.kill()


def _serve(ends: list[Connection], asked: _Asked) -> Iterable[Figure]:
    """Hand bytes round between the ranks, and pass rank 0's figures on."""
    limit, waiting, done = time.monotonic() + _SECONDS, dict[int, bytes](), set[int]()
    while time.monotonic() < limit:
        ready = wait(ends, timeout=1.0)
        for rank, end in enumerate(ends):
            if end not in ready:
                continue
            try:
                kind, content = end.recv()
            except EOFError:
                return
            if kind == "swap":
                waiting[rank] = content
            elif kind == "figure":
                yield _kept(Figure(*content), asked)
            elif kind == "note":
                note(err(), f"rank {rank}: {content}")
                return
            else:
                done.add(rank)
        if len(done) == len(ends):
            return
        if len(waiting) == len(ends):
            for end in ends:
                end.send([waiting[rank] for rank in range(len(ends))])
            waiting.clear()
    note(err(), f"stopped after {_SECONDS:.0f} s")


def _kept(figure: Figure, asked: _Asked) -> Figure:
    if asked.results is not None:
        line = json.dumps({**asdict(figure), "median": figure.median})
        append_lines(asked.results, line.encode() + b"\n")
    return figure


def _table(figures: Sequence[Figure]) -> Table:
    sizes = sorted({each.num_bytes for each in figures if each.method != PING})
    rows: dict[str, dict[int, list[float]]] = {}
    for each in figures:
        rows.setdefault(each.method, {}).setdefault(each.num_bytes, []).extend(each.times)
    names = (f"{size // 1024} KB" if size >= 1024 else f"{size} bytes" for size in sizes)
    titles = ("us an exchange", *names)
    cells = [
        (method, *(median_and_range(found.get(size, ()), 2) for size in sizes))
        for method, found in rows.items()
        if method != PING
    ]
    crossing = [statistics.median(each) for each in rows.get(PING, {}).values()]
    notes = [f"one crossing: {each:.2f} us" for each in crossing]
    return Table.of(titles, cells, *notes)
