"""What answers bound by a schema cost the free ones beside them, as far as the host decides it.

The device is pretended: a step takes it ``--step-ms``, and what is queued runs in order, as on a
GPU. Whoever keeps it waiting is the host, which is busy for ``--launch-us`` with each step and each
choice that it gives, as with a driver's calls.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np

from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.interface.base import Capabilities, Executable, MemoryUse
from tilewright.compiler.targets.interface.step import GOES_ON, Chosen, Part, Seat, Step, StepOutput
from tilewright.compiler.targets.interface.token_masks import Allowed
from tilewright.evaluate.load.schemas import SCHEMA
from tilewright.evaluate.report.table import Table
from tilewright.models.tokenizer.byte_tokenizer import byte_tokenizer
from tilewright.options.arguments import Parser, integer
from tilewright.runtime.grammar.matchers import grammars_of
from tilewright.runtime.grammar.spec import JSON_SCHEMA, GrammarSpec
from tilewright.runtime.messages import Failed, Finished, Submit
from tilewright.runtime.sampling import SamplingParams
from tilewright.runtime.service import EngineService, QueueTransport

_CONTEXT, _PROMPT = 1 << 16, 128
_ENDLESS = 4000
"""Tokens that a schema ends long before."""


@dataclass(slots=True)
class _Rows:
    """Rows that are there together: ``tokens`` once the device has chosen, at ``done_at``."""

    seats: tuple[Seat, ...]
    done_at: float
    tokens: list[int] = field(default_factory=list)

    def read(self) -> Chosen:
        """Wait for the device as long as it takes."""
        if (wait := self.done_at - time.perf_counter()) > 0:
            time.sleep(wait)
        tokens = self.tokens or [0] * len(self.seats)
        return Chosen(tokens, [GOES_ON] * len(tokens))


class PacedExecutable(Executable):
    """A device with one queue that chooses token 0, or any that is allowed. ``idle_s``: how long it
    had nothing to do before a step of rows that decode, or before a late choice.
    """

    def __init__(self, vocab_size: int, seats: int, *, step_s: float, launch_s: float) -> None:
        self.vocab_size, self._step_s, self._launch_s = vocab_size, step_s, launch_s
        self.capabilities = Capabilities(
            max_seats=seats, max_context=_CONTEXT, max_prompts=seats, runs_ahead=True
        )
        self.contract = NumericContract((), ())
        self.idle_s = self._free_at = 0.0
        self._waiting: list[_Rows] = []
        self._chooser = random.Random(7)

    def step(self, step: Step) -> StepOutput:
        assert not self._waiting, "the last step's choice is still waited for"
        if not (step.decode or step.prompts):
            return StepOutput()
        self._begin(time.perf_counter(), counts=bool(step.decode))
        self._free_at += self._step_s
        groups = [step.decode] if step.decode else []
        groups += [(chunk.seat, *chunk.also) for chunk in step.prompts if chunk.chooses]
        rows = [_Rows(seats, self._free_at) for seats in groups]
        if step.masked:
            self._waiting = rows
        return StepOutput(tuple(Part(each.seats, each.read) for each in rows))

    def choose(self, output: StepOutput, allowed: Allowed) -> None:
        began = time.perf_counter()
        chosen = dict(zip(allowed.seats, map(self._any_of, allowed.words), strict=True))
        self._begin(began, counts=True)
        for each in self._waiting:
            each.done_at = self._free_at
            each.tokens = [chosen.get(seat, 0) for seat in each.seats]
        self._waiting = []

    def _begin(self, began: float, *, counts: bool) -> None:
        """The driver's work keeps the processor busy; then the device begins, if it is free."""
        while (now := time.perf_counter()) < began + self._launch_s:
            pass
        self.idle_s += max(0.0, now - self._free_at) if counts else 0.0
        self._free_at = max(self._free_at, now)

    def _any_of(self, words: np.ndarray) -> int:
        """Some token of those whose bits are set."""
        at = int(self._chooser.choice(np.flatnonzero(words)))
        bits = int(words[at])
        return 32 * at + self._chooser.choice([bit for bit in range(32) if bits >> bit & 1])

    def reset(self) -> None:
        self._waiting = []

    def memory(self) -> MemoryUse:
        return MemoryUse(0, 0)

    def state_bytes(self, num_positions: int, num_sequences: int = 1) -> int:
        return 0


@dataclass(frozen=True, slots=True)
class Figure:
    """Free answers beside others: how many of each, the mean time of a free token, how much of the
    time the device was idle, and how many bound answers were whole meanwhile.
    """

    free: int
    bound: int
    per_token_s: float
    idle: float
    num_met: int


def measure(executable: PacedExecutable, folder: Path, *, bound: int, tokens: int) -> Figure:
    """As many answers of so many ``tokens`` as there are seats, but for ``bound`` that are held to
    a schema, and asked for again as they end.

    Raises:
        RuntimeError: where an answer fails.
    """
    grammars = grammars_of(folder, (), executable.vocab_size)
    grammars.prepare()
    transport, encoder = QueueTransport(), msgspec.msgpack.Encoder()
    service = EngineService(executable, transport, grammars=grammars)
    service.loop.warm_up()
    free = executable.capabilities.max_seats - bound
    plain, long = SamplingParams(max_tokens=tokens), SamplingParams(max_tokens=_ENDLESS)
    spec = GrammarSpec(kind=JSON_SCHEMA, text=msgspec.json.encode(SCHEMA).decode())
    for number in range(free):
        transport.inbox.append(Submit(number, (number,) * _PROMPT, plain))

    def begin(number: int) -> None:
        transport.inbox.append(Submit(number, (number % 256,) * _PROMPT, long, grammar=spec))

    for number in range(free, free + bound):
        begin(number)
    next_number, times, num_met = free + bound, list[float](), 0
    began, executable.idle_s = time.perf_counter(), 0.0
    while len(times) < free:
        service.turn()
        encoder.encode(list(transport.outbox))  # as a transport does, which takes the host's time
        for each in transport.outbox:
            if isinstance(each, Failed):
                raise RuntimeError(each.message)
            if isinstance(each, Finished) and each.request_id < free:
                times.append(each.decode_s / (tokens - 1))
            elif isinstance(each, Finished):
                begin(next_number)
                next_number, num_met = next_number + 1, num_met + 1
        transport.outbox.clear()
    idle = executable.idle_s / (time.perf_counter() - began)
    service.loop.masks.close()
    return Figure(free, bound, statistics.mean(times), idle, num_met)


def main(argv: list[str]) -> int:
    """Run ``python -m bench bench-masks``; returns the exit code."""
    parser = Parser(prog="python -m bench bench-masks", description=__doc__)
    parser.add_argument("--seats", type=integer(2), default=64, help="users")
    parser.add_argument("--bound", type=integer(1), default=32, help="of them, with a schema")
    parser.add_argument("--tokens", type=integer(2), default=256, help="of each free answer")
    parser.add_argument("--vocabulary", type=integer(512), default=128_256)
    parser.add_argument("--step-ms", type=float, default=6.0, help="that the device takes")
    parser.add_argument("--launch-us", type=float, default=250.0, help="of a step, and of a choice")
    parser.add_argument("--rounds", type=integer(1), default=3, help="of both, in turn")
    given = parser.parse_args(argv)
    if given.bound >= given.seats:
        parser.error(f"--bound {given.bound}; allowed: fewer than --seats, {given.seats}")
    found: dict[int, list[Figure]] = {0: [], given.bound: []}
    with tempfile.TemporaryDirectory() as folder:
        byte_tokenizer(given.vocabulary, "pretended").save(Path(folder))
        for bound in list(found) * given.rounds:
            executable = PacedExecutable(
                given.vocabulary,
                given.seats,
                step_s=1e-3 * given.step_ms,
                launch_s=1e-6 * given.launch_us,
            )
            found[bound].append(measure(executable, Path(folder), bound=bound, tokens=given.tokens))
    alone = statistics.median(each.per_token_s for each in found[0])
    rows = [_row(each, alone) for some in found.values() for each in some]
    head = ("free", "bound", "ms a free token", "more than alone", "device idle", "bound answers")
    print(Table.of(head, rows).markdown(), end="")
    return 0


def _row(found: Figure, alone: float) -> tuple[str, ...]:
    more = f"{100 * (found.per_token_s / alone - 1):+.1f} %"
    times = f"{1e3 * found.per_token_s:.2f}", more, f"{100 * found.idle:.1f} %"
    return f"{found.free}", f"{found.bound}", *times, f"{found.num_met}"
