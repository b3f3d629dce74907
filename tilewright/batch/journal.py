"""A batch's journal: a line with its settings, then a line per finished row.

Each line is written at once, so a killed process loses no row. Lines are synced to the disk in
groups, so a failed machine loses at most the last second.
"""

from __future__ import annotations

import fcntl
import os
import time
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Self

import msgspec

from tilewright.batch.records import Record
from tilewright.errors import ConfigError, one_line
from tilewright.utils.files import create_file

VERSION = 1
SYNC_SECONDS = 1.0
_WHAT = "batch journal"
_RECORD = msgspec.json.Decoder(Record)
_CHUNK = 1 << 20


class BatchHeader(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line of a journal.

    Attributes:
        version: format version.
        facts: settings that determine the answers, by name: data set, model, sampling.
        created: seconds since 1970. All answers of the batch contain it.
    """

    version: int
    facts: dict[str, str]
    created: int


_HEADER = msgspec.json.Decoder(BatchHeader)


class BatchJournal:
    """The journal of a batch, written by a single process.

    Attributes:
        header: the first line.
        rows: numbers of finished rows, in the order of completion.
    """

    def __init__(self, path: Path, handle: int, header: BatchHeader, size: int) -> None:
        self.path, self.header = path, header
        self.rows = array("Q")
        self._handle, self._size = handle, size
        self._places: dict[int, tuple[int, int]] = {}
        self._num_failed = 0
        self._synced_at = time.monotonic()
        self._is_dirty = False

    @classmethod
    def create(cls, path: Path, facts: Mapping[str, str]) -> Self:
        """Create a new batch's journal.

        Raises:
            ConfigError: if a journal exists, or the file is not writable.
        """
        header = BatchHeader(version=VERSION, facts=dict(facts), created=int(time.time()))
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            create_file(path, msgspec.json.encode(header) + b"\n")
        except FileExistsError:
            said = "a run was stopped there; allowed: --resume, or another --output"
            raise ConfigError(f"{_WHAT} {path}: {said}") from None
        except (OSError, ValueError) as error:
            raise _unusable(path, error) from None
        return cls.open(path)

    @classmethod
    def open(cls, path: Path) -> Self:
        """Open a batch's journal to continue. An incomplete last line is dropped.

        Raises:
            ConfigError: with the line, for any other file. Also if another process uses it.
        """
        try:
            handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        except (OSError, ValueError) as error:
            raise _unusable(path, error) from None
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return cls._read(path, handle)
        except BlockingIOError:
            os.close(handle)
            said = "another process is at work on this batch; allowed: one"
            raise ConfigError(f"{_WHAT} {path}: {said}") from None
        except OSError as error:
            os.close(handle)
            raise _unusable(path, error) from None
        except BaseException:
            os.close(handle)
            raise

    @classmethod
    def _read(cls, path: Path, handle: int) -> Self:
        lines = _lines(handle)
        start, first, is_whole = next(lines, (0, b"", False))
        try:
            header = _HEADER.decode(first)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            header = None
            reason = one_line(error)
        if header is None or not is_whole or header.version != VERSION:
            said = reason if header is None else "no whole first line of this version"
            raise ConfigError(
                f"{_WHAT} {path}:1: {said}; allowed: what `tilewright batch` wrote, or no file"
            )
        journal = cls(path, handle, header, len(first) + 1)
        for number, (start, line, is_whole) in enumerate(lines, start=2):
            try:
                record = _RECORD.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                if not is_whole:
                    break
                reason = one_line(error)
                raise ConfigError(f"{_WHAT} {path}:{number}: no record: {reason}") from None
            if not is_whole:
                break  # complete except for its newline: computed again
            journal._note(record, start, len(line))
            journal._size = start + len(line) + 1
        os.ftruncate(handle, journal._size)
        return journal

    def check(self, facts: Mapping[str, str]) -> None:
        """Check that the batch has the same settings.

        Raises:
            ConfigError: with the first different setting.
        """
        begun = self.header.facts
        for name in dict.fromkeys((*begun, *facts)):
            was, is_now = begun.get(name, "nothing"), facts.get(name, "nothing")
            if was != is_now:
                raise ConfigError(
                    f"{_WHAT} {self.path}: was begun with {name} {was[:200]}, not "
                    f"{is_now[:200]}; allowed: the same, or another --output"
                )

    def __contains__(self, row: object) -> bool:
        return row in self._places

    def __len__(self) -> int:
        return len(self._places)

    @property
    def num_failed(self) -> int:
        """The failed rows."""
        return self._num_failed

    def add(self, records: Iterable[Record]) -> None:
        """Write finished rows. Rows in the journal are unchanged.

        Raises:
            ConfigError: if the file is not writable. Earlier lines stay complete.
        """
        data, at, new = b"", self._size, dict[int, tuple[Record, int, int]]()
        for record in records:
            if record.row not in self._places and record.row not in new:
                line = msgspec.json.encode(record)
                new[record.row] = record, at, len(line)
                data += line + b"\n"
                at = self._size + len(data)
        if data:
            self._write(data)
            for record, start, length in new.values():
                self._note(record, start, length)
            self._is_dirty = True
        if time.monotonic() - self._synced_at > SYNC_SECONDS:
            self.sync()

    def sync(self) -> None:
        """Sync all lines to the disk. Raises ConfigError."""
        self._synced_at = time.monotonic()
        if self._is_dirty:
            try:
                os.fsync(self._handle)
            except OSError as error:
                raise _unusable(self.path, error) from None
            self._is_dirty = False

    def records(self, rows: Sequence[int]) -> Iterator[Record]:
        """Yield the records of finished ``rows`` in order."""
        for row in rows:
            start, length = self._places[row]
            yield _RECORD.decode(os.pread(self._handle, length, start))

    def close(self) -> None:
        """Close the file and release its lock."""
        os.close(self._handle)

    def _note(self, record: Record, start: int, length: int) -> None:
        if record.row not in self._places:
            self._places[record.row] = start, length
            self.rows.append(record.row)
            self._num_failed += not record.is_ok

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._handle, self._size)
            raise _unusable(self.path, error) from None
        self._size += len(data)


def _lines(handle: int) -> Iterator[tuple[int, bytes, bool]]:
    """Yield the start, the content and the completeness of each line of a file."""
    at, rest = 0, b""
    start = 0
    while chunk := os.pread(handle, _CHUNK, at):
        at += len(chunk)
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield start, line, True
            start += len(line) + 1
    if rest:
        yield start, rest, False


def _unusable(path: Path, error: OSError | ValueError) -> ConfigError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    said = "" if isinstance(error, FileNotFoundError) else "; --resume continues"
    return ConfigError(f"{_WHAT} {path}: {reason}{said}")
