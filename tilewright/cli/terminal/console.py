"""Terminal output of the commands through rich: progress, tables and notes."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from tilewright.evaluate.cases.cases import ACCURACY_TEXT
from tilewright.evaluate.report.display import decimal, megabytes, percent, span, with_spread
from tilewright.evaluate.report.table import Columns, Table
from tilewright.evaluate.results.record import Accuracy, Repeat, Result
from tilewright.evaluate.results.result_file import append, dumps

if TYPE_CHECKING:
    from tilewright.cli.arguments.bench import RunOptions
    from tilewright.compiler.targets.interface.base import Progress as ProgressCallback


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError for `cli.main`. The default of rich exits with 1."""
        raise BrokenPipeError


def out() -> Console:
    """Return the console for texts and tables on standard output, without markup."""
    return _Console(file=sys.stdout, highlight=False, markup=False)


def err() -> Console:
    """Return the console for progress and notes on standard error, without markup."""
    return _Console(file=sys.stderr, highlight=False, markup=False)


@contextmanager
def compile_progress(console: Console, *times: ProgressColumn) -> Iterator[ProgressCallback]:
    """Yield a callback that takes ``(what, done, total)`` and moves a transient progress bar.

    Disabled without a terminal, because rich would leave a blank line in a log.

    Args:
        times: Columns after the bar. Empty: the elapsed time.
    """
    ends = times or (TimeElapsedColumn(),)
    columns = (TextColumn("{task.description:<12}"), BarColumn(), *ends)
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task("compile", total=None)

        def report(what: str, done: int, total: int) -> None:
            progress.update(task, description=what, completed=done, total=total)

        yield report


def print_table(console: Console, title: str, table: Table, *, numbers: bool = False) -> None:
    """Print a table of text cells. ``numbers`` right-aligns all columns except the first."""
    shown = RichTable()
    for index, column in enumerate(table.columns):
        justify: Literal["left", "right"] = "right" if numbers and index else "left"
        shown.add_column(column, justify=justify, overflow="fold")
    for row in table.rows:
        shown.add_row(*row)
    if title:
        console.print(title, style="bold")
    console.print(shown)
    note(console, *table.notes)


def print_columns(console: Console, lines: Sequence[Sequence[str]]) -> None:
    """Print aligned cells. Cells are never folded, so a narrow terminal wraps lines."""
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    for line in lines:
        cells = (f"{cell:{width}}" for cell, width in zip(line, widths, strict=True))
        console.print("  ".join(cells).rstrip(), soft_wrap=True)


def note(console: Console, *lines: str) -> None:
    """Print dim lines without folding."""
    for line in lines:
        console.print(line, style="dim", soft_wrap=True)


def print_files(console: Console, folder: Path) -> None:
    """Print a written directory's files with their sizes."""
    for path in sorted(each for each in folder.rglob("*") if each.is_file()):
        size = f"{path.stat().st_size / 1e6:10,.1f} MB"
        console.print(f"{size}  {path.relative_to(folder)}", soft_wrap=True)


def keep_results(screen: Console, options: RunOptions, results: Sequence[Result]) -> None:
    """Record results and print them as JSON, as requested by the options."""
    for result in results:
        if options.results is not None:
            append(options.results, result)
        if options.as_json:
            print(dumps(result))
    if options.results is not None:
        note(screen, f"recorded in {options.results}")


def result_rows(result: Result) -> list[tuple[str, str]]:
    """Return a result's values as pairs of name and text."""
    spread_of = partial(with_spread, word="spread ")
    rows = [
        ("TTFT (ms)", spread_of(_number(result.ttft_ms), result.ttft_spread)),
        ("prefill (t/s)", _number(result.prefill_tps)),
        ("decode (t/s/u)", spread_of(_number(result.decode_tsu), result.spread)),
        ("all users (t/s)", _number(result.tps)),
        ("peak memory (MB)", _megabytes(result.peak_memory_bytes)),
        ("weights (MB)", _megabytes(result.resident_bytes)),
        ("cache (MB)", _megabytes(result.cache_bytes)),
    ]
    if result.ttft_median_ms is not None:
        rows[0] = ("TTFT, avg (ms)", rows[0][1])
        parts = (result.ttft_first_ms, result.ttft_median_ms, result.ttft_last_ms)
        rows.insert(1, ("first / median / last", " / ".join(map(_number, parts))))
    if (drafts := result.drafts) is not None and drafts.length is not None:
        shares = " / ".join(percent(share) for share in drafts.shares)
        rows.append(("tokens per verification", decimal(drafts.length, 2)))
        rows.append(("drafts accepted by position (%)", shares))
    return [*rows, *accuracy_rows(result.accuracy)]


def accuracy_rows(accuracy: Accuracy | None) -> list[tuple[str, str]]:
    """Return the agreement with the reference as name and text, empty without a measurement."""
    if accuracy is None:
        return []
    rows = [("accuracy on", accuracy.text)] if accuracy.text != ACCURACY_TEXT else []
    total = accuracy.num_positions
    for name, count, interval in (
        ("top-1", accuracy.num_top1, accuracy.top1_interval),
        ("top-5", accuracy.num_top5, accuracy.top5_interval),
    ):
        between = span(100 * interval[0], 100 * interval[1], joint=" to ")
        rows.append((name, f"{percent(count / total)} %  ({count} of {total}; 95 %: {between})"))
    if accuracy.kl_mean is not None:
        error = decimal(accuracy.kl_error, 5)
        rows.append(
            ("KL to fp32", decimal(accuracy.kl_mean, 5) + (error and f"  (standard error {error})"))
        )
    if accuracy.paired is not None:
        pair = accuracy.paired
        rows.append((f"against {pair.base}", f"-{pair.b} +{pair.c} positions, p = {pair.p:.3f}"))
    return rows


_number = partial(decimal, none="-", grouped=True)
_megabytes = partial(megabytes, none="-", grouped=True)
REPEAT_COLUMNS: Columns[tuple[int, Repeat]] = {
    "repeat": lambda each: str(each[0]),
    "TTFT (ms)": lambda each: _number(each[1].ttft_ms),
    "prefill (t/s)": lambda each: _number(each[1].prefill_tps),
    "decode (t/s/u)": lambda each: _number(each[1].decode_tsu),
}
"""Text of each column for a pair of repeat number and repeat."""
