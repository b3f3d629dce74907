"""The file of results: one JSON line per measurement, appended safely and read strictly.

`Result`, its parts and `environment` are offered here too, so that who measures imports one module.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import types
import typing
from typing import Any, Literal

from tilewright.compiler.bench.json_lines import (
    TornLineWarning,
    append_lines,
    check_writable,
    read_lines,
)
from tilewright.compiler.bench.record import (
    KINDS,
    SCHEMA,
    Accuracy,
    ContractLine,
    Kind,
    Paired,
    Repeat,
    Result,
    medians,
)
from tilewright.compiler.environment import Environment, environment
from tilewright.compiler.errors import ConfigError, allowed

__all__ = [
    "KINDS",
    "SCHEMA",
    "Accuracy",
    "ContractLine",
    "Environment",
    "Kind",
    "Paired",
    "Repeat",
    "Result",
    "TornLineWarning",
    "append",
    "check_writable",
    "dumps",
    "environment",
    "from_values",
    "loads",
    "medians",
    "read",
]


_MAX_REASON = 1000  # characters: a line may hold values of any length


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


def append(path: str | os.PathLike[str], result: Result) -> None:
    """Add one line, whole or not at all, and have it on disk on return; see `append_lines`.

    Raises:
        ConfigError: if the file cannot be written; what it held is then unchanged.
    """
    append_lines(path, (dumps(result) + "\n").encode("ascii"))


def read(path: str | os.PathLike[str]) -> list[Result]:
    """Every result of a file, in the order they were written.

    A last line cut short by a crash is dropped with a `TornLineWarning`.

    Raises:
        ConfigError: naming file and line, on any other line that is not a result.
    """
    found = []
    for number, line in read_lines(path):
        place = f"{path}:{number}"
        try:
            found.append(loads(line.decode("utf-8"), place=place))
        except UnicodeDecodeError:
            raise ConfigError(f"{place}: is not UTF-8 text") from None
    return found


def from_values(values: dict[str, Any], *, place: str = "result") -> Result:
    """The Result that `Result.to_dict` made these JSON values of.

    Raises:
        ConfigError: naming ``place`` and the field, on anything else.
    """
    try:
        return _from_values(values)
    except (_MalformedError, ConfigError) as error:
        raise ConfigError(f"{place}: {str(error)[:_MAX_REASON]}") from None


def _from_json(line: str) -> Result:
    try:
        values = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _MalformedError(f"not JSON: {str(error).splitlines()[0][:120]}") from None
    if not isinstance(values, dict):
        raise _MalformedError("not a JSON object")
    return _from_values(values)


def _from_values(values: dict[str, Any]) -> Result:
    values = dict(values)
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
    """A dataclass from its fields and no others, each checked against its annotation.

    Only a field that was added later may be missing: older lines have it not.
    """
    fields = dataclasses.fields(kind)
    names = [field.name for field in fields]
    prefix = f"{place}." if place else ""
    if unknown := sorted(values.keys() - set(names)):
        listed = ", ".join(repr(prefix + name) for name in unknown)
        raise _MalformedError(f"unknown field {listed}; {allowed(names)}")
    required = [field.name for field in fields if not field.metadata.get("added_later")]
    if missing := [name for name in required if name not in values]:
        raise _MalformedError(f"missing field {', '.join(repr(prefix + name) for name in missing)}")
    hints = _hints(kind)
    return kind(
        **{name: _value(hints[name], each, place=prefix + name) for name, each in values.items()}
    )


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
