"""The results file: a JSON line per measurement, appended atomically and read strictly.

`record` defines a line's contents and `json_lines` its storage.
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
from tilewright.evaluate.results.keys import from_keys
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
        "drafts": record.Drafts,
    }
)
"""Fields that contain records, or lists of records."""


def dumps(result: record.Result) -> str:
    """Return one line of ASCII JSON without a newline. `loads` restores an equal Result."""
    return json.dumps(result.to_dict(), allow_nan=False, separators=(",", ":"))


def loads(line: str | bytes, *, place: str = "result") -> record.Result:
    """Parse one line of a results file.

    Raises:
        ConfigError: The line is invalid. Names ``place`` and the field.
    """
    data = line if isinstance(line, bytes) else line.encode()
    return decode_record(data, _decode, place=place, expected=_WHAT)


def append(path: str | os.PathLike[str], result: record.Result) -> None:
    """Append a line atomically and sync the file to disk; see `append_lines`.

    Raises:
        ConfigError: The file cannot be written. Its contents are unchanged.
    """
    append_lines(path, (dumps(result) + "\n").encode("ascii"))


def read(path: str | os.PathLike[str]) -> list[record.Result]:
    """Return all results of a file, in file order.

    An incomplete last line is dropped with a `TornLineWarning`.

    Raises:
        ConfigError: A line is invalid. Names file and line.
    """
    return [each.record for each in read_records(path, _decode, expected=_WHAT)]


def from_values(values: dict[str, Any], *, place: str = "result") -> record.Result:
    """Return the Result from the JSON values of `Result.to_dict`.

    Raises:
        ConfigError: The values are invalid. Names ``place`` and the field.
    """
    return decode_record(values, _from_values, place=place, expected=_WHAT)


def _decode(line: bytes) -> record.Result:
    return _from_values(_DECODER.decode(line))


def _from_values(values: dict[str, Any]) -> record.Result:
    values = dict(values)
    schema = values.pop("schema", None)
    if schema != record.SCHEMA or isinstance(schema, bool):
        names = record.KEYS[record.Result].values()
        unknown = ", ".join(sorted(map(repr, values.keys() - names))) or "none"
        raise ConfigError(
            f"schema {schema!r}; allowed: {record.SCHEMA} (unknown fields: {unknown})"
        )
    values = _checked_fields(record.Result, values)
    record.check_choices(values)
    return msgspec.convert(values, record.Result)


def _checked_fields(kind: type, values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a record's values by field.

    Raises:
        ConfigError: A key is unknown, or a key of a field that is not ``ADDED_LATER`` is missing.
    """
    keys = record.KEYS[kind]
    if unknown := sorted(values.keys() - set(keys.values())):
        listed = ", ".join(repr(prefix + name) for name in unknown)
        raise ConfigError(f"unknown field {listed}; {allowed(keys.values())}")
    fields = dataclasses.fields(kind)
    required = [keys[each.name] for each in fields if not each.metadata.get("added_later")]
    if missing := [repr(prefix + name) for name in required if name not in values]:
        raise ConfigError(f"missing field {', '.join(missing)}")
    found = from_keys(values, keys)
    for name in found.keys() & _PARTS.keys():
        part, place = found[name], f"{prefix}{keys[name]}"
        if isinstance(part, dict):
            found[name] = _checked_fields(_PARTS[name], part, f"{place}.")
        elif isinstance(part, list | tuple):
            found[name] = [
                _checked_fields(_PARTS[name], each, f"{place}[{index}].")
                if isinstance(each, dict)
                else each
                for index, each in enumerate(part)
            ]
    return found
