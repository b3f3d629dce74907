"""How long passes take that rows which decode share with pieces of prompts, and where that goes.

``python -m bench.cuda.shared_pass --model shape:llama-3.1-8b`` runs, for every number of rows and
of tokens, the same pass again and again: the rows behind ``--context`` positions, and a piece of a
prompt from ``--start`` on. It prints medians, and with ``--profile`` what its kernels take. Passes
follow each other without a pause, so the GPU has the clock that it has under load.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.cuda.kernel_profile import kernel_rows, profile_steps, record_launches
from bench.script import run_script
from tilewright.compiler.bench.display import decimal
from tilewright.compiler.bench.record import RANDOM_WEIGHTS
from tilewright.compiler.bench.table import Table
from tilewright.compiler.commands.arguments import (
    ModelArguments,
    ModelOptions,
    integer,
    option,
    parse,
    read_model_options,
)
from tilewright.compiler.errors import ConfigError
from tilewright.compiler.targets.base import CompileOptions, Executable, StepOutput
from tilewright.compiler.targets.compiled import silent
from tilewright.compiler.targets.step import Choosing, Chunk, Close, Edit, Open, Pages, Seat, Step

_PRECISION = "bf16"
_WARM_UP, _PROFILED = 3, 5
_TOKEN = 5
_KERNELS = ("kernel", "launches", "own (us)", "of pass", "durations (us)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options(ModelArguments):
    """What passes are measured: all of these with each other."""

    target: str | None = option("that shares passes", default="cuda", group="model")
    rows: tuple[int, ...] = option(
        "rows that decode", default=(64,), type=integer(1, 512), metavar="N"
    )
    tokens: tuple[int, ...] = option(
        "tokens of the piece", default=(448, 720), type=integer(1, 65_536), metavar="N"
    )
    context: int = option("positions before each row", default=1150, type=integer(1), metavar="N")
    start: int = option("positions before the piece", default=0, type=integer(0), metavar="N")
    passes: int = option("that are timed", default=20, type=integer(2), metavar="N")
    profile: bool = option("show what their kernels take", default=False)


class Passes:
    """An executable whose first seats hold ``context`` positions each, and the next a prompt's."""

    def __init__(self, executable: Executable, options: Options) -> None:
        self._executable, self._options = executable, options
        limits = executable.capabilities
        if not limits.page_size or not limits.passes:
            raise ConfigError("rows and prompts share no pass; allowed: a target where they do")
        self._page, self._given = limits.page_size, 0
        most = options.start + max(options.tokens)
        self._prompt = Seat(max(options.rows))
        self._pages = {self._prompt: self._take(most)}
        length = options.context + len(options.rows) * len(options.tokens) * (
            2 * _WARM_UP + options.passes + _PROFILED + 2
        )
        for row in range(max(options.rows)):
            self._pages[Seat(row)] = self._take(length)
        if self._given > limits.num_pages:
            raise ConfigError(f"{self._given} pages are needed; allowed: {limits.num_pages}")

    def _take(self, num_positions: int) -> tuple[int, ...]:
        first, count = self._given, -(-num_positions // self._page)
        self._given += count
        return tuple(range(first, first + count))

    def _open(self, seat: Seat) -> tuple[Edit, ...]:
        return Open(seat, Choosing()), Pages(seat, 0, self._pages[seat])

    def fill(self) -> None:
        """Compute what stands before the rows and before the piece."""
        starts = dict.fromkeys(map(Seat, range(max(self._options.rows))), self._options.context)
        for seat, count in {**starts, self._prompt: self._options.start}.items():
            edits, most = self._open(seat), self._executable.capabilities.max_step_tokens
            for start in range(0, count, most):
                tokens = (_TOKEN,) * min(most, count - start)
                chunk = Chunk(seat, start, tokens, chooses=start + len(tokens) == count)
                _read(self._executable.step(Step(prompts=(chunk,), edits=edits)))
                edits = ()
            if edits:
                self._executable.step(Step(edits=edits))

    def run(self, num_rows: int, num_tokens: int, count: int) -> list[float]:
        """Run a pass so many times, each launched before the last is read: milliseconds of each."""
        decode = tuple(map(Seat, range(num_rows)))
        chunk = Chunk(self._prompt, self._options.start, (_TOKEN,) * num_tokens)
        step = Step(decode=decode, prompts=(chunk,))
        found: list[float] = []
        before, flight = time.perf_counter(), self._executable.step(step)
        for index in range(count):
            following = self._executable.step(step) if index + 1 < count else None
            if not flight.is_mixed:
                raise ConfigError(f"{num_rows} rows and {num_tokens} tokens share no pass here")
            _read(flight)
            now = time.perf_counter()
            found.append(1e3 * (now - before))
            before = now
            if following is not None:
                flight = following
        return found

    def close(self) -> None:
        """Give all seats back."""
        self._executable.step(Step(edits=tuple(map(Close, self._pages))))


def _read(output: StepOutput) -> None:
    for part in output.parts:
        part.read()


def measure(executable: Executable, options: Options) -> list[tuple[int, int, list[float]]]:
    """Rows, tokens, and the milliseconds of passes of so many."""
    passes = Passes(executable, options)
    passes.fill()
    found = []
    for rows in options.rows:
        for tokens in options.tokens:
            taken = passes.run(rows, tokens, _WARM_UP + options.passes)
            found.append((rows, tokens, taken[_WARM_UP:]))
            if options.profile:
                print(_profile(passes, rows, tokens), end="\n\n")
    passes.close()
    return found


def _profile(passes: Passes, rows: int, tokens: int) -> str:
    def run() -> None:
        passes.run(rows, tokens, _WARM_UP + _PROFILED)

    launches = record_launches(run)
    found = profile_steps(launches, ())
    if found is None:
        return f"{rows} rows, {tokens} tokens: the profiler saw no whole pass"
    title = f"{rows} rows, {tokens} tokens, under the profiler {found.step / 1e3:,.2f} ms"
    lines = kernel_rows(found)
    return f"{title}\n\n{Table.of(_KERNELS, lines).markdown()}"


def show(found: Sequence[tuple[int, int, list[float]]]) -> str:
    """A line for each kind of pass."""
    heads = ["rows", "tokens", "a pass, ms", "least", "most", "tokens and rows a ms"]
    lines = []
    for rows, tokens, taken in found:
        median = statistics.median(taken)
        times = [decimal(each, 2) for each in (median, min(taken), max(taken))]
        lines.append([f"{rows:,}", f"{tokens:,}", *times, decimal((rows + tokens) / median)])
    return Table.of(heads, lines).markdown()


def main(argv: Sequence[str]) -> int:
    """Print the table; 2 for a mistake in the arguments, or where nothing can be measured."""
    return run_script(_measured, argv)


def _measured(argv: Sequence[str]) -> str:
    options = parse(
        Options,
        argv,
        prog="python -m bench.cuda.shared_pass",
        description="Measure passes that rows and a piece of a prompt share.",
    )
    from tilewright.compiler.commands.source import compile_source, open_source

    choices: ModelOptions = read_model_options(options, _PRECISION)
    source = open_source(choices.path)
    asked = CompileOptions(
        max_batch=max(options.rows) + 1,
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
