"""Crash-safe files of JSON lines: appended whole, synchronized to disk, torn tails removed.

`read_records` reads results, sweeps and runs through msgspec. Record types are defined elsewhere.
"""

from __future__ import annotations

import fcntl
import json
import os
import stat
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from tilewright.errors import ConfigError, one_line
from tilewright.utils.files import read_regular

S = TypeVar("S")
T = TypeVar("T")
_CHUNK = 1 << 16
_MAX_REASON = 1000  # characters: lines may contain long values


class TornLineWarning(UserWarning):
    """The last line of a file was incomplete and is dropped."""


def check_writable(path: str | os.PathLike[str], what: str = "results file") -> None:
    """Raise early if `append_lines` would fail. Create nothing.

    Raises:
        ConfigError: The path is a directory, or it or its nearest existing directory is not
            writable.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise ConfigError(f"{what} {path}: is a folder; allowed: a file's path")
        if path.exists():
            writable, place = os.access(path, os.W_OK), path
        else:
            place = next(each for each in path.absolute().parents if each.exists())
            writable = place.is_dir() and os.access(place, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        raise _unusable(path, what, error) from None
    if not writable:
        raise ConfigError(f"{what} {path}: {place} is not writable")


def append_lines(path: str | os.PathLike[str], data: bytes, what: str = "results file") -> None:
    """Append complete lines atomically. They are on disk when the function returns.

    Create missing directories. A file lock excludes concurrent writers. A torn last line from a
    crashed writer is removed with a `TornLineWarning`.

    Raises:
        ConfigError: The file cannot be written. Its contents are then unchanged.
    """
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except (OSError, ValueError) as error:
        raise _unusable(path, what, error) from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        is_file = stat.S_ISREG(os.fstat(handle).st_mode)
        if is_file:
            data = _mend_tail(handle, path) + data
        _write_whole(handle, data, is_file=is_file)
    except OSError as error:
        raise _unusable(path, what, error) from None
    finally:
        os.close(handle)  # also releases the lock


def read_lines(path: str | os.PathLike[str], what: str = "results file") -> list[tuple[int, bytes]]:
    """Return number and contents of every nonblank line, numbered from 1.

    An incomplete last line without JSON is dropped with a `TornLineWarning`.

    Raises:
        ConfigError: The file cannot be read.
    """
    path = Path(path)
    try:
        lines = read_regular(path).split(b"\n")
    except (OSError, ValueError) as error:
        raise _unusable(path, what, error) from None
    if lines[-1].strip() and not is_json(lines[-1]):
        _warn_torn(path, number=len(lines))
        lines.pop()
    return [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]


@dataclass(frozen=True, slots=True)
class Located(Generic[T]):
    """A record with its location for messages, ``results.jsonl:3``."""

    place: str
    record: T


def read_records(
    path: str | os.PathLike[str],
    decode: Callable[[bytes], T],
    *,
    expected: str = "not a record",
) -> list[Located[T]]:
    """Return all records of a file in order. See `read_lines` for a torn last line.

    Args:
        path: The file.
        decode: Makes a record from a line, like `msgspec.json.Decoder.decode`.
        expected: Message for an invalid line, for example "not a run".

    Raises:
        ConfigError: ``decode`` rejects a line. The message has file and line.
    """
    return [
        Located(place, decode_record(line, decode, place=place, expected=expected))
        for number, line in read_lines(path, "results file")
        for place in (f"{path}:{number}",)
    ]


def decode_record(
    line: S, decode: Callable[[S], T], *, place: str, expected: str = "not a record"
) -> T:
    """Decode a record from a line or from parsed data.

    Raises:
        ConfigError: ``decode`` rejects the line. The message has ``place``.
    """
    try:
        return decode(line)
    except (ConfigError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{place}: {expected}: {one_line(error, _MAX_REASON)}") from None


def is_json(line: bytes) -> bool:
    """Return whether a line is a complete JSON value."""
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _unusable(path: Path, what: str, error: OSError | ValueError) -> ConfigError:
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return ConfigError(f"{what} {path}: {reason}")


def _warn_torn(path: Path, *, number: int | None = None) -> None:
    place = f"{path}:{number}" if number else str(path)
    warnings.warn(f"{place}: dropped a last line cut short", TornLineWarning, stacklevel=3)


def _mend_tail(handle: int, path: Path) -> bytes:
    """Make the file end at a line end: remove a torn line, or return a missing newline."""
    size = end = os.fstat(handle).st_size
    parts: list[bytes] = []
    while end and not (parts and b"\n" in parts[-1]):
        start = max(0, end - _CHUNK)
        parts.append(os.pread(handle, end - start, start))
        end = start
    tail = b"".join(reversed(parts))
    torn = tail[tail.rfind(b"\n") + 1 :]
    if not torn:
        return b""
    if is_json(torn):
        return b"\n"
    os.ftruncate(handle, size - len(torn))
    _warn_torn(path)
    return b""


def _write_whole(handle: int, data: bytes, *, is_file: bool) -> None:
    size = os.fstat(handle).st_size
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(handle, left) :]
        if is_file:
            os.fsync(handle)
    except OSError:
        if is_file:
            os.ftruncate(handle, size)
        raise
