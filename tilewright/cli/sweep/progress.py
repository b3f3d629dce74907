"""Progress of a sweep on standard error: a bar on a terminal, or a line per finished cell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tilewright.cli.sweep.layout import shorten
from tilewright.evaluate.report import display
from tilewright.evaluate.results.row import ResultRow
from tilewright.evaluate.sweep import estimate
from tilewright.evaluate.sweep.journal import SweepJournal, TrialState
from tilewright.evaluate.sweep.runner import Report

_NAME_WIDTH = 36


@contextmanager
def sweep_progress(console: Console, *, jobs: int) -> Iterator[Report]:
    """Yield the runner's report function. A terminal has a bar until the block ends."""
    columns = (
        TextColumn("{task.description:<36}", markup=False),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[left]}"),
    )
    is_shown = console.is_terminal
    seen: dict[str, str] = {}
    with Progress(*columns, console=console, transient=True, disable=not is_shown) as progress:
        task = progress.add_task("plan", total=None, left="")

        def report(journal: SweepJournal) -> None:
            state = journal.state
            if {key: each.status for key, each in state.cells.items()} == seen:
                return
            minutes = estimate.remaining_seconds(state, jobs=jobs) / 60
            left = f"~{minutes:.0f} min left"
            running = next((s for s in state.cells.values() if s.status == "running"), None)
            num_closed = len(state.cells) - len(state.open_cells())
            name = shorten(running.cell.title(), _NAME_WIDTH) if running else ""
            total = len(state.cells)
            progress.update(task, description=name, completed=num_closed, total=total, left=left)
            for key, each in state.cells.items():
                if seen and not each.is_open and seen.get(key) != each.status:
                    line = f"[{num_closed}/{total}] {_line(each)}; {left}"
                    console.print(line, style="dim", soft_wrap=True)
            seen.update({key: each.status for key, each in state.cells.items()})

        yield report


def _line(state: TrialState) -> str:
    found = f"{state.cell.title()}: {state.status}"
    if state.seconds is not None:
        found += f" in {state.seconds:.0f} s"
    result = state.result
    if result is None:
        return f"{found}: {state.reason}" if state.reason else found
    figures = ResultRow.of(result, result.accuracy)
    if result.accuracy is not None:
        kl = display.significant(figures.kl_nats or 0)
        return f"{found}: top-1 {display.decimal(figures.top1_percent)} %, KL {kl}"
    speed, ttft = figures.decode_tokens_per_s or 0, figures.ttft_ms or 0
    return f"{found}: {display.decimal(speed)} t/s/u, TTFT {display.decimal(ttft, 0)} ms"
