"""Runs what is left of a sweep: every cell in its own process, in order, some side by side.

Speed cells have the machine to themselves. Knows nothing of what the figures mean.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tilewright.compiler.devices import describe_cpu
from tilewright.compiler.environment import now
from tilewright.compiler.sweep.cell import Cell
from tilewright.compiler.sweep.journal import Added, CellState, Finished, Journal, Started
from tilewright.compiler.sweep.process import CellProcess, Ending

_LOOK_SECONDS = 0.1

Launch = Callable[[Cell, Journal, int | None], CellProcess]
"""Starts a cell: ``(cell, journal, threads)``."""

Report = Callable[[Journal], None]
"""Told of every start and end, and several times a second in between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerOptions:
    """``jobs``: accuracy cells side by side. ``timeout_s``: of one cell. ``max_bytes``: that a
    cell may allocate, None for what there is.
    """

    jobs: int = 1
    timeout_s: float = 900.0
    max_bytes: int | None = None

    def launch(self, cell: Cell, journal: Journal, threads: int | None) -> CellProcess:
        """A cell's process, its log beside the sweep's file."""
        return CellProcess(
            cell.arguments(threads),
            journal.log_path(cell.id),
            timeout_s=self.timeout_s,
            max_bytes=self.max_bytes,
        )


class Runner:
    """Runs the open cells of a journal that this process holds."""

    def __init__(
        self,
        journal: Journal,
        options: RunnerOptions,
        *,
        report: Report = lambda journal: None,
        launch: Launch | None = None,
    ) -> None:
        self.journal = journal
        self._options = options
        self._report = report
        self._launch = options.launch if launch is None else launch
        self._running: dict[str, CellProcess] = {}

    def measure(self, cells: Sequence[Cell]) -> list[CellState]:
        """Add those that are not there, run whatever is open, give these cells' states."""
        known = self.journal.state.cells
        if new := [cell for cell in cells if cell.id not in known]:
            self.journal.append(*map(Added, new))
        self.run()
        return [self.journal.state.cells[cell.id] for cell in cells]

    def run(self) -> None:
        """Until nothing is open. What an interrupt finds running stays open, and is stopped.

        Raises:
            ConfigError: where the sweep's file can no longer be written.
        """
        try:
            while True:
                self.journal.refresh()
                self._start_some()
                if not self._running:
                    return
                self._report(self.journal)
                time.sleep(_LOOK_SECONDS)
                self._collect()
        finally:
            for process in self._running.values():
                process.stop()
            self._running.clear()
            self._report(self.journal)

    def _start_some(self) -> None:
        waiting = (s for s in self.journal.state.open_cells() if s.cell.id not in self._running)
        for state in waiting:
            if state.is_cancel_asked:  # while nobody ran the sweep
                self.journal.append(Finished(cell=state.cell.id, outcome="cancelled", seconds=0.0))
                continue
            if not self._has_room(state.cell):
                return
            self.journal.append(Started(state.cell.id, now()))
            threads = self._threads(state.cell)
            self._running[state.cell.id] = self._launch(state.cell, self.journal, threads)

    def _has_room(self, cell: Cell) -> bool:
        kinds = {self.journal.state.cells[each].cell.kind for each in self._running}
        if not kinds:
            return True
        is_shared = kinds == {"accuracy"} and cell.kind == "accuracy"
        return is_shared and len(self._running) < self._options.jobs

    def _threads(self, cell: Cell) -> int | None:
        """The cores are shared out between cells that run side by side; else the run decides."""
        if cell.kind == "speed" or self._options.jobs == 1:
            return None
        return max(1, describe_cpu().num_cores // self._options.jobs)

    def _collect(self) -> None:
        for cell_id, process in list(self._running.items()):
            is_cancelled = self.journal.state.cells[cell_id].is_cancel_asked
            ending = process.stop() if is_cancelled else process.poll()
            if ending is not None:
                del self._running[cell_id]
                cell = self.journal.state.cells[cell_id].cell
                self.journal.append(_finished(cell_id, _checked(cell, ending)))


def _checked(cell: Cell, ending: Ending) -> Ending:
    """A result of something else is none: a checkpoint may have been replaced meanwhile."""
    result = ending.result
    if result is None or (result.model_hash, result.precision_id) == (
        cell.model_hash,
        cell.precision_id,
    ):
        return ending
    reason = "the result is of another model or configuration than was planned"
    return Ending("failed", ending.seconds, reason)


def _finished(cell_id: str, ending: Ending) -> Finished:
    return Finished(
        cell=cell_id,
        outcome=ending.outcome,
        seconds=round(ending.seconds, 3),
        reason=ending.reason,
        result=None if ending.result is None else ending.result.to_dict(),
    )
