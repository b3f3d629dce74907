"""How long passes take that rows which decode share with pieces of prompts, and where that goes.

``python -m bench.cuda.shared_pass --model shape:llama-3.1-8b`` runs, for every number of rows, of
pieces and of tokens, the same pass again and again: the rows behind ``--context`` positions, and
pieces of prompts from ``--start`` on. It prints medians, and with ``--profile`` what its kernels
take. Passes follow each other without a pause, so the GPU has the clock that it has under load.

Eight prompts of 1,024 of a hybrid, beside rows and by themselves::

    python -m bench.cuda.shared_pass --model shape:qwen3.5-35b-a3b --rows 0 16 56 \\
        --pieces 1 2 4 8 --tokens 1024
"""

from __future__ import annotations

import itertools
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.cuda.kernel_profile import kernel_rows, profile_steps, record_launches
from bench.script import run_script
from tilewright.compiler.targets.interface.base import CompileOptions, Executable, StepOutput
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.interface.step import (
    Choosing,
    Chunk,
    Close,
    Edit,
    Open,
    Pages,
    Seat,
    Step,
)
from tilewright.errors import ConfigError
from tilewright.evaluate.report.display import decimal
from tilewright.evaluate.report.table import Table
from tilewright.evaluate.results.record import RANDOM_WEIGHTS
from tilewright.options.arguments import (
    ModelArguments,
    ModelOptions,
    integer,
    option,
    read_model_options,
)

_PRECISION = "bf16"
_WARM_UP, _PROFILED = 3, 5
_KERNELS = ("kernel", "launches", "own (us)", "of pass", "durations (us)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ModelArguments):
    """What passes are measured: all of these with each other."""

    target: str | None = option("that shares passes", default="cuda", group="model")
    rows: tuple[int, ...] = option(
        "rows that decode; without any, all pieces end and choose a token",
        default=(64,),
        type=integer(0, 512),
        metavar="N",
    )
    pieces: tuple[int, ...] = option(
        "pieces of prompts, of one each", default=(1,), type=integer(1, 64), metavar="N"
    )
    tokens: tuple[int, ...] = option(
        "tokens of each piece", default=(448, 720), type=integer(1, 65_536), metavar="N"
    )
    context: int = option("positions before each row", default=1150, type=integer(1), metavar="N")
    start: int = option("positions before each piece", default=0, type=integer(0), metavar="N")
    passes: int = option("that are timed", default=20, type=integer(2), metavar="N")
    profile: bool = option("show what their kernels take", default=False)


@dataclass(frozen=True, slots=True)
class Kind:
    """Passes of so many rows, and of pieces of so many tokens each."""

    rows: int
    pieces: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.rows} rows and {self.pieces} pieces of {self.tokens} tokens"


class Passes:
    """An executable whose first seats hold ``context`` positions each, and the next prompts'."""

    def __init__(self, executable: Executable, options: Options) -> None:
        self._executable, self._options = executable, options
        limits = executable.capabilities
        if not limits.page_size or not limits.passes:
            raise ConfigError("rows and prompts share no pass; allowed: a target where they do")
        self._page, self._given = limits.page_size, 0
        most, first = options.start + max(options.tokens), max(options.rows)
        self._rows = tuple(map(Seat, range(first)))
        self._prompts = tuple(Seat(first + each) for each in range(max(options.pieces)))
        self._pages = {seat: self._take(most) for seat in self._prompts}
        kinds = len(options.rows) * len(options.pieces) * len(options.tokens)
        length = options.context + kinds * (2 * _WARM_UP + options.passes + _PROFILED + 2)
        self._pages |= {seat: self._take(length) for seat in self._rows}
        if self._given > limits.num_pages:
            raise ConfigError(f"{self._given} pages are needed; allowed: {limits.num_pages}")

    def _take(self, num_positions: int) -> tuple[int, ...]:
        first, count = self._given, -(-num_positions // self._page)
        self._given += count
        return tuple(range(first, first + count))

    def _open(self, seat: Seat) -> tuple[Edit, ...]:
        return Open(seat, Choosing()), Pages(seat, 0, self._pages[seat])

    def _tokens(self, seat: Seat, count: int) -> tuple[int, ...]:
        """Of all kinds, and a seat's own: experts are chosen by them."""
        vocabulary = range(self._executable.vocab_size)
        return tuple(random.Random(seat).choices(vocabulary, k=count))

    def fill(self) -> None:
        """Compute what stands before the rows and before the pieces."""
        starts = dict.fromkeys(self._rows, self._options.context)
        starts |= dict.fromkeys(self._prompts, self._options.start)
        for seat, count in starts.items():
            edits, most = self._open(seat), self._executable.capabilities.max_step_tokens
            for start in range(0, count, most):
                tokens = self._tokens(seat, min(most, count - start))
                chunk = Chunk(seat, start, tokens, chooses=start + len(tokens) == count)
                _read(self._executable.step(Step(prompts=(chunk,), edits=edits)))
                edits = ()
            if edits:
                self._executable.step(Step(edits=edits))

    def run(self, kind: Kind, count: int) -> list[float]:
        """Run a pass so many times, each launched before the last is read: milliseconds of each."""
        why_not = ConfigError(f"{kind} share no pass here")
        if not self._fits(kind):
            raise why_not
        start = self._options.start
        chunks = tuple(
            Chunk(seat, start, self._tokens(seat, kind.tokens), chooses=not kind.rows)
            for seat in self._prompts[: kind.pieces]
        )
        step = Step(decode=self._rows[: kind.rows], prompts=chunks)
        found: list[float] = []
        before, flight = time.perf_counter(), self._executable.step(step)
        for index in range(count):
            following = self._executable.step(step) if index + 1 < count else None
            if kind.rows and not flight.is_mixed:
                raise why_not
            _read(flight)
            now = time.perf_counter()
            found.append(1e3 * (now - before))
            before = now
            if following is not None:
                flight = following
        return found

    def _fits(self, kind: Kind) -> bool:
        """Whether so many pieces are one pass, as one by itself is."""
        limits = self._executable.capabilities
        num_tokens = kind.pieces * -(-kind.tokens // self._page) * self._page
        return kind.pieces == 1 or (
            kind.pieces <= limits.max_prompts and num_tokens <= limits.most_shared
        )

    def close(self) -> None:
        """Give all seats back."""
        self._executable.step(Step(edits=tuple(map(Close, self._pages))))


def _read(output: StepOutput) -> None:
    for part in output.parts:
        part.read()


def measure(executable: Executable, options: Options) -> list[tuple[Kind, list[float]]]:
    """Kinds of passes, and the milliseconds that each of them took."""
    passes = Passes(executable, options)
    passes.fill()
    found = []
    for each in itertools.product(options.rows, options.pieces, options.tokens):
        kind = Kind(*each)
        taken = passes.run(kind, _WARM_UP + options.passes)
        found.append((kind, taken[_WARM_UP:]))
        if options.profile:
            print(_profile(passes, kind), end="\n\n")
    passes.close()
    return found


def _profile(passes: Passes, kind: Kind) -> str:
    def run() -> None:
        passes.run(kind, _WARM_UP + _PROFILED)

    launches = record_launches(run)
    found = profile_steps(launches, ())
    if found is None:
        return f"{kind}: the profiler saw no whole pass"
    title = f"{kind}, under the profiler {found.step / 1e3:,.2f} ms"
    lines = kernel_rows(found)
    return f"{title}\n\n{Table.of(_KERNELS, lines).markdown()}"


def show(found: Sequence[tuple[Kind, list[float]]]) -> str:
    """A line for each kind of pass."""
    heads = ["rows", "pieces", "tokens each", "a pass, ms", "least", "most"]
    heads += ["ms a piece", "tokens and rows a ms"]
    lines = []
    for kind, taken in found:
        median, count = statistics.median(taken), kind.rows + kind.pieces * kind.tokens
        times = [median, min(taken), max(taken), median / kind.pieces]
        what = [f"{each:,}" for each in (kind.rows, kind.pieces, kind.tokens)]
        lines.append([*what, *(decimal(each, 2) for each in times), decimal(count / median)])
    return Table.of(heads, lines).markdown()


def main(argv: Sequence[str]) -> int:
    """Print the table; 2 for a mistake in the arguments, or where nothing can be measured."""
    return run_script(
        _measured,
        Options,
        argv,
        prog="python -m bench.cuda.shared_pass",
        description="Measure passes that rows and pieces of prompts share.",
    )


def _measured(options: Options) -> str:
    from tilewright.loading.source import compile_source, open_source

    choices: ModelOptions = read_model_options(options, _PRECISION)
    source = open_source(choices.path)
    asked = CompileOptions(
        max_batch=max(options.rows) + max(options.pieces),
        max_context=max(2 * options.context + 512, options.start + max(options.tokens)),
    )
    compiled = compile_source(source, choices, asked, silent, use_cache=False)
    try:
        found = measure(compiled.executable, options)
    finally:
        compiled.executable.close()
    return f"{source.name} {RANDOM_WEIGHTS}, shared passes\n\n{show(found)}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
