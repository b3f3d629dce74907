"""What the runtime's own work takes: steps of the null target, which computes nothing.

Prints steps a second by the clock, and microseconds of CPU time a step, which other work on the
machine does not stretch.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.null import NullExecutable
from tilewright.evaluate.report.table import Table
from tilewright.options.arguments import Parser
from tilewright.runtime.loop import EngineLoop
from tilewright.runtime.messages import Submit
from tilewright.runtime.request import Request
from tilewright.runtime.sampling import SamplingParams
from tilewright.runtime.scheduling.request_state import Policy
from tilewright.runtime.service import EngineService, QueueTransport

_VOCAB, _PROMPT = 49_152, 8
_MAX_CONTEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class Figure:
    """One way of stepping: what it is, and what a step took."""

    what: str
    num_seats: int
    steps_per_second: float
    cpu_us: float


def unchanged(num_seats: int, num_steps: int) -> Figure:
    """Everybody decodes, and nobody comes or goes."""
    loop = _loop(num_seats)
    for number in range(num_seats):
        loop.add(_request(number, num_steps * 4 + num_seats + 200))
    return _measure("unchanged", num_seats, num_steps, loop.step)


def changing(num_seats: int, num_steps: int) -> Figure:
    """Time steps with each of which one request ends and another begins."""
    loop, number = _loop(num_seats), num_seats
    for at in range(num_seats):
        loop.add(_request(at, 2 + at))

    def step() -> None:
        nonlocal number
        if len(loop.scheduler.line) < 2:
            number += 1
            loop.add(_request(number, num_seats))
        loop.step()

    return _measure("one comes, one goes", num_seats, num_steps, step)


def served(num_seats: int, num_steps: int) -> Figure:
    """Unchanged steps of the engine's service, its messages packed as for the socket."""
    transport = QueueTransport()
    service = EngineService(_executable(num_seats), transport, policy=Policy())
    sampling = SamplingParams(max_tokens=num_steps * 4 + num_seats + 200)
    for number in range(num_seats):
        transport.inbox.append(Submit(number, (1,) * _PROMPT, sampling))
    encoder = msgspec.msgpack.Encoder()

    def step() -> None:
        service.turn()
        encoder.encode(list(transport.outbox))
        transport.outbox.clear()

    return _measure("unchanged, served", num_seats, num_steps, step)


def _executable(num_seats: int) -> NullExecutable:
    options = CompileOptions(max_batch=num_seats, max_context=_MAX_CONTEXT)
    return NullExecutable(_VOCAB, options, NumericContract((), ()))


def _loop(num_seats: int) -> EngineLoop:
    return EngineLoop(_executable(num_seats))


def _request(number: int, wanted: int) -> Request:
    prompt = tuple((number + at) % _VOCAB for at in range(_PROMPT))
    return Request(number, prompt, SamplingParams(max_tokens=wanted))


def _measure(what: str, num_seats: int, num_steps: int, step: Callable[[], object]) -> Figure:
    for _ in range(num_seats + 100):
        step()
    gc.collect()
    rounds = []
    for _ in range(3):
        cpu, wall = time.thread_time(), time.perf_counter()
        for _ in range(num_steps):
            step()
        rounds.append((time.thread_time() - cpu, time.perf_counter() - wall))
    cpu_s, wall_s = (sorted(each)[1] for each in zip(*rounds, strict=True))
    return Figure(what, num_seats, num_steps / wall_s, 1e6 * cpu_s / num_steps)


def main(argv: list[str]) -> int:
    """Run ``python -m bench bench-loop``; returns the exit code."""
    parser = Parser(prog="python -m bench bench-loop", description=__doc__)
    parser.add_argument("--seats", type=int, nargs="+", default=[1, 64, 256], metavar="N")
    parser.add_argument("--steps", type=int, default=1000, help="of each of three rounds")
    given = parser.parse_args(argv)
    ways = (unchanged, changing, served)
    found = [way(count, given.steps) for count in given.seats for way in ways]
    rows = [
        (f"{f.num_seats}", f.what, f"{f.steps_per_second:,.0f}", f"{f.cpu_us:.0f}") for f in found
    ]
    print(Table.of(("seats", "steps", "steps/s", "CPU us a step"), rows).markdown(), end="")
    return 0
