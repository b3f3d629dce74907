"""Block types of a model in the start index, without a look at its header."""

from __future__ import annotations

import contextlib

from tilewright.models import FoundModel, ShapeName, model_files


def known_types(found: FoundModel) -> tuple[str, ...] | None:
    """`quantised_types` of a model that the start index has, whose header was read before."""
    if isinstance(found, ShapeName):
        return None
    from tilewright.compiler.artifacts.start import DamagedStartError, StartIndex

    index = StartIndex.default()
    key = index.key_of(found.name, model_files(found))
    with contextlib.suppress(DamagedStartError):
        record = None if key is None else index.record(key)
        return None if record is None else record.stored_types
    return None
