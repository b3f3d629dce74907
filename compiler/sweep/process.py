"""One cell's process: started apart, watched, ended; what came of it in one line.

A cell that crashes, hangs or runs out of memory costs itself alone, and never outlives its sweep.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.compiler.bench.json_lines import is_json
from tilewright.compiler.bench.record import Result
from tilewright.compiler.bench.results import loads
from tilewright.compiler.child import PYTHON, Child, Ended
from tilewright.compiler.errors import ConfigError
from tilewright.compiler.sweep.journal import Outcome

RUN = (*PYTHON, "-m", "tilewright.compiler.cli", "run")

_MAX_REASON = 300


@dataclass(frozen=True, slots=True)
class Ending:
    """How a cell's process ended."""

    outcome: Outcome
    seconds: float
    reason: str = ""
    result: Result | None = None


class CellProcess:
    """A running cell. ``max_bytes``: of memory it may allocate, None for what there is.

    Raises:
        ConfigError: where it cannot be started.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        log: Path,
        *,
        timeout_s: float,
        max_bytes: int | None = None,
        command: Sequence[str] = RUN,
    ) -> None:
        self._child = Child(
            [*command, *arguments],
            log=log,
            timeout_s=timeout_s,
            max_bytes=max_bytes,
            what=f"{log}: a cell",
        )

    def poll(self) -> Ending | None:
        """How it ended, or None while it runs; one that takes too long is ended."""
        ended = self._child.poll()
        return None if ended is None else self._finish(ended, is_cancelled=False)

    def stop(self) -> Ending:
        """End it now: it was cancelled."""
        return self._finish(self._child.stop(), is_cancelled=True)

    def _finish(self, ended: Ended, *, is_cancelled: bool) -> Ending:
        output = self._child.output().decode("utf-8", errors="replace")
        self._child.close()
        if is_cancelled or ended.is_timed_out:
            outcome: Outcome = "cancelled" if is_cancelled else "timed out"
            return Ending(outcome, ended.seconds, f"after {ended.seconds:.0f} s")
        last = output.strip().rpartition("\n")[2]
        if ended.code == 0 and is_json(last.encode()):
            try:
                return Ending("done", ended.seconds, result=loads(last, place="result"))
            except ConfigError as error:
                return Ending("failed", ended.seconds, str(error)[:_MAX_REASON])
        how = ended.how if ended.code >= 0 else f"killed by {ended.how}"
        reason = f"{how}: {ended.last or 'said nothing'}"[:_MAX_REASON]
        if not reason.isprintable():
            reason = repr(reason)
        outcome = "out of memory" if ended.is_out_of_memory else "failed"
        return Ending(outcome, ended.seconds, reason)
