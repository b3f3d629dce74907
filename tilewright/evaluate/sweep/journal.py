"""A sweep's journal: an append-only file with an event per line, and the resulting state.

A single process runs a sweep. Other processes may read the file, and append commands to cancel or
restart cells.
"""

from __future__ import annotations

import fcntl
import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec

from tilewright.errors import ConfigError
from tilewright.evaluate.report.display import short_commit
from tilewright.evaluate.results import keys
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.result_file import from_values
from tilewright.evaluate.sweep.trial import Trial
from tilewright.utils.environment import Environment
from tilewright.utils.files import create_file
from tilewright.utils.json_lines import (
    TornLineWarning,
    append_lines,
    decode_record,
    read_lines,
)

_WHAT = "sweep file"
VERSION = 1
_LOCK_TRIES, _LOCK_SECONDS = 10, 0.02

Outcome = Literal["done", "failed", "timed out", "out of memory", "cancelled"]
Status = Literal["queued", "running", "done", "failed", "timed out", "out of memory", "cancelled"]
FAILURES: tuple[Status, ...] = ("failed", "timed out", "out of memory")


class _JournalEvent(msgspec.Struct, frozen=True, tag_field="event", forbid_unknown_fields=True):
    """A line of the file. A subclass's tag is its ``event``."""


class Planned(_JournalEvent, frozen=True, tag="planned", rename=keys.PLANNED, kw_only=True):
    """The first line: the sweep's plan and environment.

    ``base`` has the base configuration's ids on each model, separated by blanks.
    """

    version: int
    plan: str
    options: dict[str, str]
    base: str | None
    timestamp: str
    commit: str | None
    versions: dict[str, str]

    def is_base(self, cell: Trial) -> bool:
        """Return whether a cell has the base configuration."""
        is_calibrated = bool(cell.calibration)
        return (
            self.base is not None and cell.precision_id in self.base.split() and not is_calibrated
        )


class Added(_JournalEvent, frozen=True, tag="added", rename=keys.ADDED):
    """A cell to run."""

    cell: Trial


class TrialStarted(_JournalEvent, frozen=True, tag="started", rename=keys.STARTED):
    """The start of a cell's process."""

    cell: str
    timestamp: str


class TrialFinished(_JournalEvent, frozen=True, tag="finished", rename=keys.FINISHED, kw_only=True):
    """The end of a cell's process, with a ``result`` or with a ``reason`` on a single line."""

    cell: str
    outcome: Outcome
    seconds: float
    reason: str = ""
    result: dict[str, Any] | None = None


class TrialCommand(_JournalEvent, frozen=True, tag="asked", rename=keys.COMMANDS):
    """A request to cancel or restart a cell."""

    cell: str
    what: Literal["cancel", "restart"]


Event = Planned | Added | TrialStarted | TrialFinished | TrialCommand
_CELL = keys.ADDED["cell"]


@dataclass(slots=True)
class TrialState:
    """A cell and its progress.

    Attributes:
        seconds: time for the last finished run.
        is_cancel_requested: whether the running cell is to be stopped.
        is_restart_requested: whether it is to run again after that.
    """

    cell: Trial
    status: Status = "queued"
    seconds: float | None = None
    reason: str = ""
    result: Result | None = None
    started: str | None = None
    is_cancel_requested: bool = False
    is_restart_requested: bool = False

    @property
    def is_open(self) -> bool:
        """Return whether the cell still has to run."""
        return self.status in ("queued", "running")

    @property
    def why(self) -> str:
        """The cell's status and its reason."""
        return f"{self.status}: {self.reason}"

    def other_code(self, now: Environment) -> str:
        """Return the code versions of the record that differ: ``commit 18d3c11496, torch 2.12.0``.

        Empty without a difference. Local changes are ignored.
        """
        found = self.result
        if found is None:
            return ""
        parts = [] if found.commit == now.commit else [f"commit {short_commit(found.commit)}"]
        theirs = {name: found.versions.get(name) for name in now.versions}
        differing = [name for name, version in now.versions.items() if theirs[name] != version]
        return ", ".join([*parts, *(f"{name} {theirs[name] or 'unknown'}" for name in differing)])


@dataclass(slots=True)
class SweepState:
    """The result of all events. Cells are in the order of addition."""

    planned: Planned
    cells: dict[str, TrialState] = field(default_factory=dict)

    def apply(self, event: Event) -> None:
        """Update the state by an event.

        Raises:
            ConfigError: for an unknown cell, a second header, or a malformed result.
        """
        if isinstance(event, Planned):
            raise ConfigError("a second header; allowed: one, first")
        if isinstance(event, Added):
            self.cells.setdefault(event.cell.id, TrialState(event.cell))
            return
        state = self.cells.get(event.cell)
        if state is None:
            raise ConfigError(f"event {event.cell[:40]!r} of a cell that was not added")
        if isinstance(event, TrialStarted):
            state.status, state.started, state.reason = "running", event.timestamp, ""
            state.is_cancel_requested = state.is_restart_requested = False
            state.result = None
        elif isinstance(event, TrialFinished):
            _finish(state, event)
        elif event.what == "restart":
            state.is_restart_requested = state.is_cancel_requested
            if not state.is_open:
                state.status, state.reason, state.result = "queued", "", None
        elif state.status == "queued":
            state.status, state.reason = "cancelled", "before it ran"
        elif state.status == "running":
            state.is_cancel_requested = True

    def open_cells(self) -> list[TrialState]:
        """Return the cells to run, in order."""
        return [state for state in self.cells.values() if state.is_open]

    def count(self, *statuses: Status) -> int:
        """Return the cell count with these statuses."""
        return sum(state.status in statuses for state in self.cells.values())


def _finish(state: TrialState, event: TrialFinished) -> None:
    if (event.outcome == "done") is (event.result is None):
        raise ConfigError(f"cell {event.cell}: {event.outcome}, and a result that does not fit it")
    result = None if event.result is None else from_values(event.result, place=event.cell)
    if result is not None and result.decode_tsu is not None and result.decode_tsu <= 0:
        raise ConfigError(f"cell {event.cell}: decode_tsu {result.decode_tsu}; allowed: above 0")
    state.status, state.seconds, state.reason = event.outcome, event.seconds, event.reason
    state.result, state.is_cancel_requested = result, False
    if state.is_restart_requested and event.outcome == "cancelled":
        state.status, state.reason = "queued", ""
    state.is_restart_requested = False


class SweepJournal:
    """The file of a sweep. ``state`` is as of the last read or write."""

    def __init__(self, path: Path, state: SweepState, num_lines: int) -> None:
        self.path = path
        self.state = state
        self._num_lines = num_lines
        self._size = -1

    @classmethod
    def create(cls, path: Path, planned: Planned, cells: Sequence[Trial]) -> SweepJournal:
        """Create a new sweep's file with its planned cells.

        Raises:
            ConfigError: if the file exists or is not writable.
        """
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            create_file(path, _encode([planned, *map(Added, cells)]))
        except FileExistsError:
            raise ConfigError(
                f"{_WHAT} {path}: is there already; allowed: --resume, or another --results"
            ) from None
        except OSError as error:
            raise ConfigError(f"{_WHAT} {path}: {error.strerror}") from None
        journal = cls(path, SweepState(planned), 1)
        journal.refresh()
        return journal

    @classmethod
    def open(cls, path: Path) -> SweepJournal:
        """Read a sweep's file. A torn last line is dropped with a `TornLineWarning`.

        Raises:
            ConfigError: with the line, for any other file.
        """
        lines = read_lines(path, _WHAT)
        first = _decode(lines[0][1], f"{path}:{lines[0][0]}") if lines else None
        if not isinstance(first, Planned) or first.version != VERSION:
            raise ConfigError(
                f"{_WHAT} {path}: no sweep of version {VERSION}; allowed: a file that "
                "`tilewright sweep` wrote"
            )
        journal = cls(path, SweepState(first), 1)
        journal._take(lines[1:])
        return journal

    def refresh(self) -> None:
        """Read the lines of other processes. Raises ConfigError as `open`."""
        try:
            size = self.path.stat().st_size
        except OSError as error:
            raise ConfigError(f"{_WHAT} {self.path}: {error.strerror}") from None
        if size != self._size:
            with warnings.catch_warnings():
                # A line that is being written is complete at the next read.
                warnings.simplefilter("ignore", TornLineWarning)
                lines = read_lines(self.path, _WHAT)
            self._take(lines[self._num_lines :])
            self._size = size

    def append(self, *events: Event) -> None:
        """Append events to the file and apply them. Raises ConfigError if it is not writable."""
        append_lines(self.path, _encode(events), _WHAT)
        self.refresh()

    def _take(self, lines: Sequence[tuple[int, bytes]]) -> None:
        for number, line in lines:
            place = f"{self.path}:{number}"
            event = _decode(line, place)
            try:
                self.state.apply(event)
            except ConfigError as error:
                raise ConfigError(f"{place}: {error}") from None
            self._num_lines += 1

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Lock the sweep for this process.

        Raises:
            ConfigError: if another process has the lock.
        """
        place = self._lock_path
        try:
            handle = os.open(place, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise ConfigError(f"{_WHAT} {self.path}: {place.name}: {error.strerror}") from None
        try:
            for _ in range(_LOCK_TRIES):  # `has_runner` takes the lock for a moment
                if is_ours := _try_lock(handle, fcntl.LOCK_EX):
                    break
                time.sleep(_LOCK_SECONDS)
            if not is_ours:
                raise ConfigError(
                    f"{_WHAT} {self.path}: another process is running this sweep; allowed: one"
                )
            yield
        finally:
            os.close(handle)

    def has_runner(self) -> bool:
        """Return whether a process runs this sweep."""
        try:
            handle = os.open(self._lock_path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False  # it has never run
        try:
            return not _try_lock(handle, fcntl.LOCK_SH)
        finally:
            os.close(handle)

    @property
    def _lock_path(self) -> Path:
        """Return a separate file, because appending locks the journal for a moment."""
        return self.path.with_name(f".{self.path.name}.lock")

    def log_path(self, cell_id: str) -> Path:
        """Return the log of a cell's standard error, with all attempts."""
        return self.path.with_name(f"{self.path.stem}-logs") / f"{cell_id}.log"


def _try_lock(handle: int, kind: int) -> bool:
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _encode(events: Sequence[Event]) -> bytes:
    return b"".join(msgspec.json.encode(_by_key(each)) + b"\n" for each in events)


def _by_key(event: Event) -> Any:
    """Return an event as JSON values. A cell has its table's keys."""
    values = msgspec.to_builtins(event)
    if isinstance(event, Added):
        values[_CELL] = keys.to_keys(values[_CELL], keys.CELL)
    return values


def _event_of(line: bytes) -> Event:
    values = msgspec.json.decode(line)
    if isinstance(values, dict) and isinstance(cell := values.get(_CELL), dict):
        values[_CELL] = keys.from_keys(cell, keys.CELL)
    return msgspec.convert(values, Event)  # type: ignore[no-any-return]


def _decode(line: bytes, place: str) -> Event:
    return decode_record(line, _event_of, place=place, expected="no event of a sweep")
