"""``python -m bench bench-cuda``: speed for known shapes with random weights on a GPU.

The same run measures rates for memory reads and large matmuls.
"""

from __future__ import annotations

import traceback
import warnings
from argparse import ArgumentTypeError
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.cuda.rows import DECODE, METRICS, TTFT, BenchRow, find_rows
from tilewright.cli.terminal.console import compile_progress, err, note, out, print_table
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

REPEATS, QUICK_REPEATS, QUICK_TOKENS = 5, 2, 40
EXIT_NOT_MEASURED, EXIT_INTERRUPTED = 1, 130
_WIDTH, _HOST_CONTEXT = 132, 1200


@dataclass(frozen=True, slots=True)
class StepBench:
    """The checked command line."""

    rows: tuple[BenchRow, ...]
    repeats: int
    results: Path | None
    is_profiled: bool
    target: str = "cuda"
    num_ranks: int = 1
    shows_host_time: bool = False
    capability: tuple[int, int] | None = None


def _capability(text: str) -> tuple[int, int]:
    major, _, minor = text.partition(".")
    if not (major.isdecimal() and minor.isdecimal()):
        raise ArgumentTypeError(f"{text!r}; allowed: a compute capability, as 8.9")
    return int(major), int(minor)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    rows: tuple[str, ...] = option("row names, as 8b-*", default=(), metavar="NAME")
    list: bool = option("list the rows", default=False)
    results: Path | None = option("JSON lines file for the records", metavar="FILE", type=Path)
    profile: bool = option("show kernels by GPU time", default=False)
    repeats: int | None = option(f"repeats per row ({REPEATS})", type=integer(1, 1000))
    tensor_parallel: int = option("GPUs per model", default=1, type=integer(1, 8), metavar="N")
    capability: tuple[int, int] | None = option(
        "also measure the kernels of this compute capability, as 8.9", type=_capability, metavar="N"
    )
    host_time: bool = option("show every program's host time per step", default=False)
    quick: bool = option(
        f"{QUICK_REPEATS} repeats, {QUICK_TOKENS} tokens, not for tables", default=False
    )


def main(argv: Sequence[str]) -> int:
    """Run ``python -m bench bench-cuda``. Return 0 if all rows were measured.

    Raises:
        TilewrightError: for bad arguments, or without a GPU.
    """
    words = "Measure decoding and prompts with random weights on a GPU."
    options = parse(_Options, argv, prog="python -m bench bench-cuda", description=words)
    rows = find_rows(options.rows, options.tensor_parallel)
    if options.list:
        print_table(_screen(), f"rows (--rows) {RANDOM_WEIGHTS}", Table.by(_LIST, rows))
        return 0
    if options.quick:
        rows = tuple(replace(row, num_generated=QUICK_TOKENS) for row in rows)
    if options.results is not None:
        check_writable(options.results)
    repeats = options.repeats or (QUICK_REPEATS if options.quick else REPEATS)
    choices = StepBench(rows, repeats, options.results, options.profile)
    ranks, host_time = options.tensor_parallel, options.host_time
    choices = replace(choices, capability=options.capability)
    return bench(replace(choices, num_ranks=ranks, shows_host_time=host_time))


def bench(choices: StepBench, *, measured: Ceilings | None = None) -> int:
    """Measure rows and print them. ``measured``: known ceilings."""
    if choices.target == "cuda":
        check_gpu()
    warnings.filterwarnings("ignore", module="torch")
    from tilewright.evaluate.measure.ceilings import measure_ceilings

    if choices.shows_host_time:
        longer = (replace(row, context=max(row.program[-1], _HOST_CONTEXT)) for row in choices.rows)
        choices = replace(choices, rows=tuple(longer))
    session = _Session(_screen(), choices, measured or measure_ceilings(choices.target))
    session.print_ceilings()
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
    """Return the rows of each program."""
    programs = dict.fromkeys(workload.program for workload in rows)
    return [
        tuple(workload for workload in rows if workload.program == program) for program in programs
    ]


@dataclass(slots=True)
class _Session:
    """A run with the values, or the reason for missing values, by row name."""

    screen: Console
    choices: StepBench
    ceilings: Ceilings
    found: dict[str, Figures] = field(default_factory=dict)
    missed: dict[str, str] = field(default_factory=dict)
    is_broken: bool = False

    def measure(self, rows: Sequence[BenchRow]) -> None:
        """Measure a program's rows. An error affects only these rows."""
        try:
            self._measure(rows)
            return
        except CheckpointError as error:  # the shape has no architecture
            reason = str(error)
        except TilewrightError as error:
            reason, self.is_broken = str(error), True
        except Exception as error:
            traceback.print_exc()
            reason, self.is_broken = f"failed: {one_line(error)}", True
        for row in rows:
            if row.name not in self.found:
                self.missed[row.name] = reason
                self._print(f"{row.name}: not measured: {reason}", style="yellow")

    def _measure(self, rows: Sequence[BenchRow]) -> None:
        from bench.cuda.measure import Bench
        from bench.cuda.step_times import host_times

        target, repeats = self.choices.target, self.choices.repeats
        how: dict[str, Any] = {"target": target, "repeats": repeats}
        with compile_progress(err()) as progress:
            made = Bench(rows, progress=progress, num_ranks=self.choices.num_ranks, **how)
        note(self.screen, made.text())
        try:
            for row in rows:
                self._take(made.measure(row, self.ceilings))
                if row.metric == DECODE and (routing := made.routing(row)):
                    self._print(f"{row.name}: {routing}")
            for row in rows if self.choices.is_profiled else ():  # after the timed runs
                self._profile(made, row)
            if self.choices.shows_host_time:
                for line in host_times(made.compiled.executable, made.options.max_batch):
                    self._print(f"{rows[0].name}: {line}")
            if self.choices.capability is not None:
                self._compare(made, rows, self.choices.capability)
        finally:
            made.close()

    def _compare(self, made: Bench, rows: Sequence[BenchRow], capability: tuple[int, int]) -> None:
        """Measure the rows with another GPU's kernels, and print the share of this GPU's speed."""
        made.use_kernels_of(capability)
        name = "kernels of compute capability {}.{}".format(*capability)
        for row in rows:
            other, own = made.measure(row, self.ceilings), self.found[row.name]
            metric, share = METRICS[row.metric], other.value / own.value
            share = 1 / share if metric.is_most else share
            spread = f"{_MEDIAN(other)} ({_LOWEST(other)}-{_HIGHEST(other)})"
            ratio = f"{percent(share)} % of {_MEDIAN(own)}"
            self._print(f"{row.name}: {metric.label}: {name}: {spread}, {ratio}; {other.detail}")
        for row in rows if self.choices.is_profiled else ():
            self._profile(made, row)

    def _take(self, found: Figures) -> None:
        """Record and print a row at once, because the run may end at any time."""
        self.found[found.row.name] = found
        if found.result is not None and self.choices.results is not None:
            append(self.choices.results, found.result)
        name, figure, value, floor, goal, met, limit, share = (c(found) for c in COLUMNS.values())
        bounds = "" if floor == "-" else f"; floor {floor}, goal {goal}: {met}"
        of_limit = "" if limit == "-" else f"; limit {limit}, {share} of it"
        self._print(f"{name}: {figure}: {value}{bounds}{of_limit}; {found.detail}")

    def _profile(self, made: Bench, row: BenchRow) -> None:
        from bench.cuda import step_times

        try:
            jobs, is_decode = made.jobs(row), row.metric != TTFT
            profile = step_times.profile(made.compiled.executable, jobs, is_decode=is_decode)
            self._print(f"{row.name}: kernels by GPU time\n{profile}")
        except Exception as error:  # a failed profiler does not affect the row
            traceback.print_exc()
            self.is_broken = True
            self._print(f"{row.name}: no profile: {one_line(error)}", style="yellow")

    def _print(self, text: str, style: str | None = None) -> None:
        self.screen.print(text, style=style, soft_wrap=True)

    def print_report(self) -> None:
        """Print the measured rows, and the missed rows."""
        rows = [self.found[row.name] for row in self.choices.rows if row.name in self.found]
        if rows:
            metrics = dict.fromkeys(METRICS[each.row.metric] for each in self.found.values())
            notes = [f"{each.label}: {each.text}" for each in metrics]
            table = Table.by(COLUMNS, rows, *notes)
            print_table(self.screen, f"all rows {RANDOM_WEIGHTS}", table, numbers=True)
        for name, reason in self.missed.items():
            self._print(f"{name}: not measured: {reason}", style="yellow")

    def print_ceilings(self) -> None:
        """Print the measured rates of the device."""
        found = self.ceilings
        rates = (
            ("reads (TB/s)", found.bytes_per_s, found.reads),
            (f"{found.product_type} products (TFLOP/s)", found.flops_per_s, found.products),
        )
        rows = [
            (name, decimal(rate / 1e12, 3), span(min(every) / 1e12, max(every) / 1e12, 3))
            for name, rate, every in rates
        ]
        table = Table.of(("ceiling", "median", "min-max"), rows)
        print_table(self.screen, f"measured on {found.device}", table, numbers=True)


def _figure(value: Callable[[Figures], float | None]) -> Callable[[Figures], str]:
    """Return a column with values in the metric's unit."""
    return lambda found: decimal(
        value(found), METRICS[found.row.metric].digits, none="-", grouped=True
    )


def _share(found: Figures) -> str:
    """Return the reached share of the limit."""
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


_MEDIAN, _LOWEST = _figure(lambda found: found.value), _figure(lambda found: min(found.values))
_HIGHEST = _figure(lambda found: max(found.values))
COLUMNS: Columns[Figures] = {
    "row": lambda found: found.row.name,
    "figure": lambda found: METRICS[found.row.metric].label,
    "median (min-max)": lambda found: f"{_MEDIAN(found)} ({_LOWEST(found)}-{_HIGHEST(found)})",
    "floor": _figure(lambda found: found.row.floor),
    "goal": _figure(lambda found: found.row.goal),
    "met": _met,
    "limit": _figure(lambda found: found.limit),
    "of limit": _share,
}
_LIST: Columns[BenchRow] = {
    "row": lambda row: row.name,
    "shape": lambda row: row.shape,
    "precision": lambda row: row.precision,
    "users": lambda row: f"{row.batch} x {row.prompt_length:,} + {row.num_generated}",
    "figure": lambda row: METRICS[row.metric].label,
    "floor": lambda row: "-" if row.floor is None else f"{row.floor:,g}",
    "goal": lambda row: "-" if row.goal is None else f"{row.goal:,g}",
}


def _screen() -> Console:
    """Return standard output, wide enough for the tables in a file."""
    found = out()
    if not found.is_terminal:
        found.width = max(found.width, _WIDTH)
    return found
