"""The file of results: one JSON line per measurement, appended safely and read strictly.

`Result`, its parts and `environment` are offered here too, so that who measures imports one module.
"""

from __future__ import annotations

import dataclasses
import fcntl
import functools
import json
import os
import stat
import types
import typing
import warnings
from pathlib import Path
from typing import Any, Literal

from compiler.bench.record import (
    KINDS,
    SCHEMA,
    Accuracy,
    ContractLine,
    Kind,
    Medians,
    Paired,
    Repeat,
    Result,
    medians,
)
from compiler.environment import Environment, environment
from compiler.errors import ConfigError, allowed
from compiler.files import read_regular

__all__ = [
    "KINDS",
    "SCHEMA",
    "Accuracy",
    "ContractLine",
    "Environment",
    "Kind",
    "Medians",
    "Paired",
    "Repeat",
    "Result",
    "TornLineWarning",
    "append",
    "check_writable",
    "dumps",
    "environment",
    "loads",
    "medians",
    "read",
]


_MAX_REASON = 1000  # characters: a line may hold values of any length


class TornLineWarning(UserWarning):
    """The last line of a results file was cut short, and was dropped."""


class _MalformedError(Exception):
    """Why a line is not a result; its reader adds the file and the line."""


def dumps(result: Result) -> str:
    """One line of ASCII JSON without its newline; `loads` gives an equal Result."""
    return json.dumps(result.to_dict(), allow_nan=False, separators=(",", ":"))


def loads(line: str, *, place: str = "result") -> Result:
    """The Result of one line.

    Raises:
        ConfigError: naming ``place`` and the field, on anything but a line of this schema.
    """
    try:
        return _from_json(line)
    except (_MalformedError, ConfigError) as error:
        raise ConfigError(f"{place}: {str(error)[:_MAX_REASON]}") from None


def check_writable(path: str | os.PathLike[str]) -> None:
    """Fail early where `append` would fail, before time is spent on measuring; makes nothing.

    Raises:
        ConfigError: if the path is a folder, or it or its nearest existing folder is not writable.
    """
    path = Path(path)
    try:
        if path.is_dir():
            raise ConfigError(f"results file {path}: is a folder; allowed: a file's path")
        if path.exists():
            writable, what = os.access(path, os.W_OK), path
        else:
            what = next(each for each in path.absolute().parents if each.exists())
            writable = what.is_dir() and os.access(what, os.W_OK | os.X_OK)
    except (OSError, ValueError) as error:
        raise ConfigError(f"results file {path}: {_reason(error)}") from None
    if not writable:
        raise ConfigError(f"results file {path}: {what} is not writable")


def append(path: str | os.PathLike[str], result: Result) -> None:
    """Add one line, whole or not at all, and have it on disk on return.

    Makes the folder. Writers exclude each other by a lock on the file. What an earlier writer left
    of a line when it died is cut off, with a `TornLineWarning`.

    Raises:
        ConfigError: if the file cannot be written; what it held is then unchanged.
    """
    data = (dumps(result) + "\n").encode("ascii")
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    except (OSError, ValueError) as error:
        raise ConfigError(f"results file {path}: {_reason(error)}") from None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        is_file = stat.S_ISREG(os.fstat(handle).st_mode)
        if is_file:
            data = _mend_tail(handle, path) + data
        _write_whole(handle, data, is_file=is_file)
    except OSError as error:
        raise ConfigError(f"results file {path}: {_reason(error)}") from None
    finally:
        os.close(handle)  # gives the lock back


def read(path: str | os.PathLike[str]) -> list[Result]:
    """Every result of a file, in the order they were written.

    A last line without its newline that is no result was cut short by a crash: it is dropped with
    a `TornLineWarning`. Blank lines are skipped.

    Raises:
        ConfigError: naming file and line, on any other line that is not a result.
    """
    path = Path(path)
    try:
        lines = read_regular(path).split(b"\n")
    except (OSError, ValueError) as error:
        raise ConfigError(f"results file {path}: {_reason(error)}") from None
    found = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            found.append(loads(line.decode("utf-8"), place=f"{path}:{number}"))
        except (ConfigError, UnicodeDecodeError) as error:
            if number == len(lines) and not _is_json(line):
                _warn_torn(path, number=number)
            elif isinstance(error, ConfigError):
                raise
            else:
                raise ConfigError(f"{path}:{number}: is not UTF-8 text") from None
    return found


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _warn_torn(path: Path, *, number: int | None = None) -> None:
    place = f"{path}:{number}" if number else str(path)
    warnings.warn(f"{place}: dropped a last line cut short", TornLineWarning, stacklevel=3)


def _is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _mend_tail(handle: int, path: Path) -> bytes:
    """Make the file end where a line ends: cut a torn line, or return the newline it lacks."""
    size = end = os.fstat(handle).st_size
    parts: list[bytes] = []
    while end and not (parts and b"\n" in parts[-1]):
        start = max(0, end - 65536)
        parts.append(os.pread(handle, end - start, start))
        end = start
    tail = b"".join(reversed(parts))
    torn = tail[tail.rfind(b"\n") + 1 :]
    if not torn:
        return b""
    if _is_json(torn):
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


def _from_json(line: str) -> Result:
    try:
        values = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _MalformedError(f"not JSON: {str(error).splitlines()[0][:120]}") from None
    if not isinstance(values, dict):
        raise _MalformedError("not a JSON object")
    schema = values.pop("schema", None)
    names = {field.name for field in dataclasses.fields(Result)}
    unknown = ", ".join(sorted(map(repr, values.keys() - names))) or "none"
    if schema != SCHEMA or isinstance(schema, bool):
        raise _MalformedError(f"schema {schema!r}; allowed: {SCHEMA} (unknown fields: {unknown})")
    return typing.cast(Result, _record(Result, values, place=""))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number that is allowed")


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _record(kind: type, values: dict[str, Any], *, place: str) -> object:
    """A dataclass from exactly its fields, each checked against its annotation."""
    names = [field.name for field in dataclasses.fields(kind)]
    prefix = f"{place}." if place else ""
    if unknown := sorted(values.keys() - set(names)):
        listed = ", ".join(repr(prefix + name) for name in unknown)
        raise _MalformedError(f"unknown field {listed}; {allowed(names)}")
    if missing := [name for name in names if name not in values]:
        raise _MalformedError(f"missing field {', '.join(repr(prefix + name) for name in missing)}")
    hints = _hints(kind)
    return kind(**{name: _value(hints[name], values[name], place=prefix + name) for name in names})


def _value(hint: Any, value: Any, *, place: str) -> Any:
    """One JSON value as its annotation wants it; the hints are only those of record.py."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        if value is None:
            return None
        (hint,) = (each for each in arguments if each is not types.NoneType)
        return _value(hint, value, place=place)
    if dataclasses.is_dataclass(hint) and isinstance(value, dict):
        return _record(typing.cast(type, hint), value, place=place)
    if origin is Literal and isinstance(value, str):
        return value
    if origin is tuple and isinstance(value, list):
        return _tuple(arguments, value, place=place)
    if origin is dict and isinstance(value, dict):
        return {key: _value(str, each, place=f"{place}.{key}") for key, each in value.items()}
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if hint is float and is_number and abs(value) <= 1e300:
        return float(value)
    if hint in (int, str) and type(value) is hint:
        return value
    wanted = getattr(hint, "__name__", str(hint)) if origin is None else str(hint)
    raise _MalformedError(f"field {place!r} is {str(value)[:60]!r}; allowed: {wanted}")


def _tuple(arguments: tuple[Any, ...], values: list[Any], *, place: str) -> tuple[Any, ...]:
    if arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(values)
    if len(arguments) != len(values):
        raise _MalformedError(
            f"field {place!r} has {len(values)} values; allowed: {len(arguments)}"
        )
    pairs = zip(arguments, values, strict=True)
    return tuple(
        _value(hint, value, place=f"{place}[{i}]") for i, (hint, value) in enumerate(pairs)
    )
