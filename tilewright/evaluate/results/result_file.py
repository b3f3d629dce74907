"""The file of results: one JSON line per measurement, appended safely and read strictly.

What a line means is for `record`; how lines are kept whole is for `json_lines`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tilewright.errors import ConfigError, allowed
from tilewright.evaluate.results import record
from tilewright.utils.json_lines import append_lines, decode_record, read_records

_WHAT = "not a result"
_DECODER: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])
_PARTS: Mapping[str, type] = MappingProxyType(
    {
        "repeats": record.Repeat,
        "accuracy": record.Accuracy,
        "paired": record.Paired,
        "contract": record.ContractLine,
        "ceilings": record.Ceilings,
    }
)
"""Fields that hold records, or lists of them."""


def dumps(result: record.Result) -> str:
    """One line of ASCII JSON without its newline; `loads` gives an equal Result."""
    return json.dumps(result.to_dict(), allow_nan=False, separators=(",", ":"))


def loads(line: str | bytes, *, place: str = "result") -> record.Result:
    """Parse one line of a results file as a `Result`.

    Raises:
        ConfigError: naming ``place`` and the field, on anything but a line of this schema.
    """
    data = line if isinstance(line, bytes) else line.encode()
    return decode_record(data, _decode, place=place, expected=_WHAT)


def append(path: str | os.PathLike[str], result: record.Result) -> None:
    """Add one line, whole or not at all, and have it on disk on return; see `append_lines`.

    Raises:
        ConfigError: if the file cannot be written; what it held is then unchanged.
    """
    append_lines(path, (dumps(result) + "\n").encode("ascii"))


def read(path: str | os.PathLike[str]) -> list[record.Result]:
    """Every result of a file, in the order they were written.

    A last line cut short by a crash is dropped with a `TornLineWarning`.

    Raises:
        ConfigError: naming file and line, on any other line that is not a result.
    """
    return [each.record for each in read_records(path, _decode, expected=_WHAT)]


def from_values(values: dict[str, Any], *, place: str = "result") -> record.Result:
    """The Result that `Result.to_dict` made these JSON values of.

    Raises:
        ConfigError: naming ``place`` and the field, on anything else.
    """
    return decode_record(values, _from_values, place=place, expected=_WHAT)


def _decode(line: bytes) -> record.Result:
    return _from_values(_DECODER.decode(line))


def _from_values(values: dict[str, Any]) -> record.Result:
    values = dict(values)
    schema = values.pop("schema", None)
    names = {field.name for field in dataclasses.fields(record.Result)}
    if schema != record.SCHEMA or isinstance(schema, bool):
        unknown = ", ".join(sorted(map(repr, values.keys() - names))) or "none"
        raise ConfigError(
            f"schema {schema!r}; allowed: {record.SCHEMA} (unknown fields: {unknown})"
        )
    _check_fields(record.Result, values)
    record.check_choices(values)
    return msgspec.convert(values, record.Result)


def _check_fields(kind: type, values: dict[str, Any], prefix: str = "") -> None:
    """A record has its fields and no others; only one that was added later may be missing, because
    older lines have it not.
    """
    fields = {field.name: field for field in dataclasses.fields(kind)}
    if unknown := sorted(values.keys() - fields.keys()):
        listed = ", ".join(repr(prefix + name) for name in unknown)
        raise ConfigError(f"unknown field {listed}; {allowed(fields)}")
    required = [name for name in fields if not fields[name].metadata.get("added_later")]
    if missing := [repr(prefix + name) for name in required if name not in values]:
        raise ConfigError(f"missing field {', '.join(missing)}")
    for name in values.keys() & _PARTS.keys():
        part = values[name]
        parts = {name: part}
        if isinstance(part, list | tuple):
            parts = {f"{name}[{i}]": each for i, each in enumerate(part)}
        for place, each in parts.items():
            if isinstance(each, dict):
                _check_fields(_PARTS[name], each, f"{prefix}{place}.")
