"""Removes unsupported annotations from JSON schemas. Imports no grammar library."""

from __future__ import annotations

from typing import Any

import msgspec

ENFORCED_FORMATS = frozenset(
    (
        *("date", "date-time", "time", "duration"),
        *("email", "hostname", "ipv4", "ipv6", "uri", "uuid", "unknown"),
    )
)
"""String formats that llguidance enforces. The JSON schema standard makes others annotations."""

_VALUES = frozenset(("enum", "const", "default", "example", "examples"))
_NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))


def without_annotations(text: str) -> str:
    """Return a schema's text without unenforced formats.

    Text that is not JSON is returned unchanged.
    """
    if '"format"' not in text:
        return text
    try:
        schema = msgspec.json.decode(text)
        return msgspec.json.encode(schema).decode() if drop_annotations(schema) else text
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text


def drop_annotations(schema: Any) -> int:
    """Remove unenforced formats from ``schema``, in place. Return their number.

    Values of ``enum`` or ``const`` and properties named ``format`` stay.
    """
    count = 0
    schemas = [schema]
    while schemas:
        found = schemas.pop()
        if isinstance(found, list):
            schemas += found
        if not isinstance(found, dict):
            continue
        form = found.get("format")
        if isinstance(form, str) and form not in ENFORCED_FORMATS:
            del found["format"]
            count += 1
        for key, value in found.items():
            if key in _NAMED and isinstance(value, dict):
                schemas += value.values()
            elif key not in _VALUES:
                schemas.append(value)
    return count
