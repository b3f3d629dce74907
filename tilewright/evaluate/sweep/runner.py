"""Runs a sweep's open cells in order, each in its own process.

Speed cells run exclusively. A cell that crashes, hangs or runs out of memory fails only itself. No
cell outlives the sweep.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tilewright.compiler.devices import describe_cpu
from tilewright.errors import ConfigError
from tilewright.evaluate.results.result_file import loads
from tilewright.evaluate.sweep.calibrated import CalibratedFolders
from tilewright.evaluate.sweep.journal import (
    Added,
    Outcome,
    SweepJournal,
    TrialFinished,
    TrialStarted,
    TrialState,
)
from tilewright.evaluate.sweep.trial import Trial
from tilewright.utils.child_process import PYTHON, Child, ChildExit
from tilewright.utils.environment import now
from tilewright.utils.json_lines import is_json

BENCH = (*PYTHON, "-m", "tilewright.cli.main", "bench")

_LOOK_SECONDS = 0.1
_MAX_REASON = 300

Launch = Callable[[Trial, Path, int | None], Child]
"""Starts a cell's process: ``(cell, log, threads)``."""

Report = Callable[[SweepJournal], None]
"""Called at every start and end, and several times per second."""


def launcher(
    *,
    timeout_s: float,
    max_bytes: int | None = None,
    calibrated: CalibratedFolders | None = None,
) -> Launch:
    """Return a function that starts cells.

    Args:
        timeout_s: time limit per cell in seconds.
        max_bytes: memory limit per cell. None: no limit.
        calibrated: store for calibrated weights.

    Raises (when called):
        ConfigError: if a cell cannot be started.
    """

    def launch(cell: Trial, log: Path, threads: int | None) -> Child:
        command, what = [*BENCH, *cell.arguments(threads)], f"{log}: a cell"
        if cell.calibration:
            assert calibrated is not None
            command = calibrated.command(cell, threads)
        return Child(command, log=log, timeout_s=timeout_s, max_bytes=max_bytes, what=what)

    return launch


class Runner:
    """Runs a locked journal's open cells, with up to ``jobs`` concurrent accuracy cells."""

    def __init__(
        self,
        journal: SweepJournal,
        launch: Launch,
        *,
        jobs: int = 1,
        report: Report = lambda journal: None,
    ) -> None:
        self.journal = journal
        self._launch, self._jobs, self._report = launch, jobs, report
        self._running: dict[str, Child] = {}

    def measure(self, cells: Sequence[Trial]) -> list[TrialState]:
        """Add new cells, run all open cells, and return their states."""
        known = self.journal.state.cells
        if new := [cell for cell in cells if cell.id not in known]:
            self.journal.append(*map(Added, new))
        self.run()
        return [self.journal.state.cells[cell.id] for cell in cells]

    def run(self) -> None:
        """Run cells until none is open. An interrupt stops running cells, which stay open.

        Raises:
            ConfigError: if the sweep's file is not writable.
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
            for child in self._running.values():
                child.close()
            self._running.clear()
            self._report(self.journal)

    def _start_some(self) -> None:
        waiting = (s for s in self.journal.state.open_cells() if s.cell.id not in self._running)
        for state in waiting:
            if state.is_cancel_requested:  # cancelled without a runner
                self.journal.append(
                    TrialFinished(cell=state.cell.id, outcome="cancelled", seconds=0.0)
                )
                continue
            if not self._has_room(state.cell):
                return
            self.journal.append(TrialStarted(state.cell.id, now()))
            log, threads = self.journal.log_path(state.cell.id), self._threads(state.cell)
            self._running[state.cell.id] = self._launch(state.cell, log, threads)

    def _has_room(self, cell: Trial) -> bool:
        kinds = {self.journal.state.cells[each].cell.kind for each in self._running}
        if not kinds:
            return True
        is_shared = kinds == {"accuracy"} and cell.kind == "accuracy"
        return is_shared and len(self._running) < self._jobs

    def _threads(self, cell: Trial) -> int | None:
        """Return the threads for a concurrent cell. None: the run decides."""
        if cell.kind == "speed" or self._jobs == 1:
            return None
        return max(1, describe_cpu().num_cores // self._jobs)

    def _collect(self) -> None:
        for cell_id, child in list(self._running.items()):
            state = self.journal.state.cells[cell_id]
            is_cancelled = state.is_cancel_requested
            ended = child.stop() if is_cancelled else child.poll()
            if ended is not None:
                end = finished(state.cell, ended, child.output(), is_cancelled=is_cancelled)
                del self._running[cell_id]
                child.close()
                self.journal.append(end)


def finished(
    cell: Trial, ended: ChildExit, output: bytes, *, is_cancelled: bool = False
) -> TrialFinished:
    """Return the event for an ended process. Its output ends with its record."""
    last = output.strip().rpartition(b"\n")[2]
    outcome: Outcome = "failed"
    reason, result = "", None
    if is_cancelled or ended.is_timed_out:
        outcome = "cancelled" if is_cancelled else "timed out"
        reason = f"after {ended.seconds:.0f} s"
    elif ended.code == 0 and is_json(last):
        try:
            result, outcome = _record(cell, last), "done"
        except ConfigError as error:
            reason = str(error)[:_MAX_REASON]
    else:
        outcome = "out of memory" if ended.is_out_of_memory else "failed"
        how = ended.how if ended.code >= 0 else f"killed by {ended.how}"
        reason = f"{how}: {ended.last or 'said nothing'}"[:_MAX_REASON]
        reason = reason if reason.isprintable() else repr(reason)
    seconds = round(ended.seconds, 3)
    return TrialFinished(
        cell=cell.id, outcome=outcome, seconds=seconds, reason=reason, result=result
    )


def _record(cell: Trial, line: bytes) -> dict[str, Any]:
    """Check a result's model and configuration, and return its values.

    The checkpoint may have been replaced.
    """
    result = loads(line, place="result")
    if (result.model_hash, result.precision_id) != (cell.model_hash, cell.precision_id):
        raise ConfigError("the result has another model or configuration than planned")
    if result.calibration.partition(",")[0] != cell.calibration.partition(" ")[0]:
        raise ConfigError("the result has another calibration than planned")
    return result.to_dict()
