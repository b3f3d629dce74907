"""``python -m bench bench-cuda``: speed of known shapes with random weights on a GPU, row by row.

The rates of memory reads and large matmuls are measured in the same run.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from bench.cuda.rows import DECODE, METRICS, START, TTFT, BenchRow, find_rows
from tilewright.cli.terminal.console import err, note, out, print_table
from tilewright.compiler.devices import check_gpu
from tilewright.errors import CheckpointError, TilewrightError, one_line
from tilewright.evaluate.report.display import decimal, percent, span
from tilewright.evaluate.report.table import Columns, Table
from tilewright.evaluate.results.record import RANDOM_WEIGHTS
from tilewright.evaluate.results.result_file import append
from tilewright.options.arguments import integer, option, parse
from tilewright.utils.json_lines import check_writable

if TYPE_CHECKING:
    from rich.console import Console

    from bench.cuda.measure import Bench, Figures
    from tilewright.evaluate.results.record import Ceilings

REPEATS = 5
QUICK_REPEATS, QUICK_TOKENS = 2, 40
EXIT_NOT_MEASURED, EXIT_INTERRUPTED = 1, 130
_TARGET = "cuda"
_WIDTH, _HOST_CONTEXT = 132, 1200


@dataclass(frozen=True, slots=True)
class Choices:
    """The command line of ``python -m bench bench-cuda``, checked."""

    rows: tuple[BenchRow, ...]
    repeats: int
    results: Path | None
    is_profiled: bool
    target: str = _TARGET
    num_ranks: int = 1
    shows_host_time: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    rows: tuple[str, ...] = option("some rows; 8b-* fits", default=(), metavar="NAME")
    list: bool = option("list the rows", default=False)
    results: Path | None = option("append records, as JSON lines", metavar="FILE", type=Path)
    profile: bool = option("show the kernels of steps by GPU time", default=False)
    repeats: int | None = option(f"of every row ({REPEATS})", type=integer(1, 1000))
    tensor_parallel: int = option(
        "GPUs that a model is spread over (1)", default=1, type=integer(1, 8), metavar="N"
    )
    host_time: bool = option("show the host time of a step of every program", default=False)
    quick: bool = option(
        f"{QUICK_REPEATS} repeats, {QUICK_TOKENS} tokens: no figures for a table", default=False
    )


def main(argv: Sequence[str]) -> int:
    """Run ``python -m bench bench-cuda``; 0 where every row that can be made was measured.

    Raises:
        TilewrightError: for a mistake in the arguments, or where there is no GPU.
    """
    asked = parse(
        _Asked,
        argv,
        prog="python -m bench bench-cuda",
        description="Measure decoding, prompts and starts with random weights on a GPU.",
    )
    rows = find_rows(asked.rows, asked.tensor_parallel)
    if asked.list:
        _print_list(rows)
        return 0
    if asked.quick:
        rows = tuple(replace(row, num_generated=QUICK_TOKENS) for row in rows)
    if asked.results is not None:
        check_writable(asked.results)
    repeats = asked.repeats or (QUICK_REPEATS if asked.quick else REPEATS)
    found = Choices(rows, repeats, asked.results, asked.profile)
    return bench(replace(found, num_ranks=asked.tensor_parallel, shows_host_time=asked.host_time))


def bench(choices: Choices, *, measured: Ceilings | None = None) -> int:
    """Measure a GPU's rows and print them; ``measured``: ceilings that are already known."""
    if choices.target == _TARGET:
        check_gpu()
    warnings.filterwarnings("ignore", module="torch")
    from tilewright.evaluate.measure.ceilings import measure_ceilings

    ceilings = measured or measure_ceilings(choices.target)
    if choices.shows_host_time:
        longer = (replace(row, context=max(row.program[-1], _HOST_CONTEXT)) for row in choices.rows)
        choices = replace(choices, rows=tuple(longer))
    session = _Session(_screen(), choices, ceilings)
    _print_ceilings(session.screen, ceilings)
    note(session.screen, "All rows have random weights.")
    code = 0
    try:
        for rows in programs(choices.rows):
            session.measure(rows)
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    session.print_report()
    return code or (EXIT_NOT_MEASURED if session.is_broken else 0)


def programs(rows: Sequence[BenchRow]) -> list[tuple[BenchRow, ...]]:
    """Rows that are measured together, in the order of the first of each; starts are by themselves
    and last.
    """
    compiled = [row for row in rows if row.metric != START]
    keys = dict.fromkeys(row.program for row in compiled)
    shared = [tuple(row for row in compiled if row.program == key) for key in keys]
    return [*shared, *((row,) for row in rows if row.metric == START)]


@dataclass(slots=True)
class _Session:
    """A run of the command.

    By a row's name, ``found`` is what was measured and ``missed`` why it was not; ``is_broken``:
    something failed.
    """

    screen: Console
    choices: Choices
    ceilings: Ceilings
    found: dict[str, Figures] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)
    is_broken: bool = False

    def measure(self, rows: Sequence[BenchRow]) -> None:
        """The rows of one program; what cannot be measured is said and left out, so that the others
        are not lost.
        """
        try:
            self._measure(rows)
            return
        except CheckpointError as error:  # a shape whose architecture is not built
            reason = str(error)
        except TilewrightError as error:
            reason, self.is_broken = str(error), True
        except Exception as error:  # a bug in one row must not cost the others
            traceback.print_exc()
            reason, self.is_broken = f"failed: {one_line(error)}", True
        for row in rows:
            if row.name not in self.found:
                self.missed[row.name] = reason
                self._print_missed(row.name)

    def _measure(self, rows: Sequence[BenchRow]) -> None:
        from bench.cuda.measure import Bench, measure_start
        from bench.cuda.step_times import host_times
        from tilewright.cli.terminal.console import compile_progress

        target, repeats = self.choices.target, self.choices.repeats
        if rows[0].metric == START:
            self._take(measure_start(rows[0], target=target, repeats=repeats))
            return
        with compile_progress(err()) as progress:
            made = Bench(
                rows,
                target=target,
                repeats=repeats,
                progress=progress,
                num_ranks=self.choices.num_ranks,
            )
        _print_program(self.screen, made)
        try:
            for row in rows:
                self._take(made.measure(row, self.ceilings))
                if row.metric == DECODE and (routing := made.routing(row)):
                    self.screen.print(f"{row.name}: {routing}", soft_wrap=True)
            for row in rows if self.choices.is_profiled else ():  # after all timed runs
                self._profile(made, row)
            if self.choices.shows_host_time:
                for line in host_times(made.compiled.executable, made.options.max_batch):
                    self.screen.print(f"{rows[0].name}: {line}", soft_wrap=True)
        finally:
            made.close()

    def _take(self, found: Figures) -> None:
        """Keep, record and print a row at once: the run may be ended at any time."""
        self.found[found.row.name] = found
        if found.result is not None and self.choices.results is not None:
            append(self.choices.results, found.result)
        name, figure, value, floor, goal, met, limit, share = (c(found) for c in COLUMNS.values())
        bounds = "" if floor == "-" else f"; floor {floor}, goal {goal}: {met}"
        of_limit = "" if limit == "-" else f"; limit {limit}, {share} of it"
        line = f"{name}: {figure}: {value}{bounds}{of_limit}; {found.detail}"
        self.screen.print(line, soft_wrap=True)

    def _profile(self, made: Bench, row: BenchRow) -> None:
        from bench.cuda.step_times import profile

        try:
            found = profile(made.compiled.executable, made.jobs(row), is_decode=row.metric != TTFT)
            self.screen.print(f"{row.name}: kernels by GPU time\n{found}", soft_wrap=True)
        except Exception as error:  # nor must a profiler that fails
            traceback.print_exc()
            self.is_broken = True
            self.screen.print(f"{row.name}: no profile: {one_line(error)}", style="yellow")

    def _print_missed(self, name: str) -> None:
        line = f"{name}: not measured: {self.missed[name]}"
        self.screen.print(line, style="yellow", soft_wrap=True)

    def print_report(self) -> None:
        """The table of what was measured, and what was not."""
        rows = [self.found[row.name] for row in self.choices.rows if row.name in self.found]
        if rows:
            metrics = dict.fromkeys(METRICS[each.row.metric] for each in self.found.values())
            notes = [f"{each.label}: {each.text}" for each in metrics]
            table = Table.by(COLUMNS, rows, *notes)
            print_table(self.screen, f"all rows {RANDOM_WEIGHTS}", table, numbers=True)
        for name in self.missed:
            self._print_missed(name)


def _figure(found: Figures, value: float | None) -> str:
    """A value of a row's metric."""
    return decimal(value, METRICS[found.row.metric].digits, none="-", grouped=True)


def _share(found: Figures) -> str:
    """The share of its limit that a value reaches; of a value that is to be small, the limit's of
    it.
    """
    if not found.limit:
        return "-"
    share = found.value / found.limit
    return f"{percent(1 / share if METRICS[found.row.metric].is_most else share)} %"


def _met(found: Figures) -> str:
    row, value = found.row, found.value
    if row.floor is None:
        return "-"
    if row.goal is not None and row.is_met(value, row.goal):
        return "goal"
    if row.is_met(value, row.floor):
        return "floor" if row.goal is not None else "yes"
    return "NO"


COLUMNS: Columns[Figures] = {
    "row": lambda found: found.row.name,
    "figure": lambda found: METRICS[found.row.metric].label,
    "median (min-max)": lambda found: (
        f"{_figure(found, found.value)} "
        f"({_figure(found, min(found.values))}-{_figure(found, max(found.values))})"
    ),
    "floor": lambda found: _figure(found, found.row.floor),
    "goal": lambda found: _figure(found, found.row.goal),
    "met": _met,
    "limit": lambda found: _figure(found, found.limit),
    "of limit": _share,
}


def _print_program(screen: Console, made: Bench) -> None:
    executable, options = made.compiled.executable, made.options
    weights = executable.memory().weights / 1e9
    cache = options.max_batch * executable.state_bytes(options.max_context) / 1e9
    note(
        screen,
        f"{made.source.name} {RANDOM_WEIGHTS}, {made.compiled.precision.name}, for "
        f"{options.max_batch} x {options.max_context:,} positions: {weights:.1f} GB of weights, "
        f"{cache:.1f} GB of cache; made in {made.seconds_to_compile:.1f} s",
    )


def _print_ceilings(screen: Console, ceilings: Ceilings) -> None:
    rates = (
        ("reads (TB/s)", ceilings.bytes_per_s, ceilings.reads),
        (f"{ceilings.product_type} products (TFLOP/s)", ceilings.flops_per_s, ceilings.products),
    )
    rows = [
        (name, decimal(each / 1e12, 3), span(min(found) / 1e12, max(found) / 1e12, 3))
        for name, each, found in rates
    ]
    table = Table.of(("ceiling", "median", "min-max"), rows)
    print_table(screen, f"measured on {ceilings.device}", table, numbers=True)


def _print_list(rows: Sequence[BenchRow]) -> None:
    columns: Columns[BenchRow] = {
        "row": lambda row: row.name,
        "shape": lambda row: row.shape,
        "precision": lambda row: row.precision,
        "users": lambda row: f"{row.batch} x {row.prompt_length:,} + {row.num_generated}",
        "figure": lambda row: METRICS[row.metric].label,
        "floor": lambda row: "-" if row.floor is None else f"{row.floor:,g}",
        "goal": lambda row: "-" if row.goal is None else f"{row.goal:,g}",
    }
    print_table(_screen(), f"rows (--rows) {RANDOM_WEIGHTS}", Table.by(columns, rows))


def _screen() -> Console:
    """Standard output; wide enough for the tables where it is no terminal."""
    found = out()
    if not found.is_terminal:
        found.width = max(found.width, _WIDTH)
    return found
