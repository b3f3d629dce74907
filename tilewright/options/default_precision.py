"""Default precision for a model. Reads headers and file sizes only."""

from __future__ import annotations

import contextlib
import glob
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.compiler.devices import CPU_BACKENDS
from tilewright.compiler.precision import PrecisionConfig, choose_precision, load_precision
from tilewright.models import FoundModel, ShapeName, model_files

_PART = re.compile(r"(.+)-\d{5}(-of-\d{5})")


@dataclass(frozen=True, slots=True)
class ChosenPrecision:
    """A configuration and the reason for it."""

    precision: PrecisionConfig
    reason: str


def default_precision(
    found: FoundModel, types: Sequence[str], target: str, *, is_auto: bool
) -> tuple[ChosenPrecision, ChosenPrecision | None]:
    """Return the configuration for ``auto``.

    The second value replaces it if ONNX Runtime runs the target cpu. None: the same.
    ``types``: stored block types of the weights. ``is_auto``: the backend is chosen later, and
    native kernels are expected.
    """
    num_bytes = _file_bytes(found)
    targets = (CPU_BACKENDS["native"], target) if is_auto else (target,)
    chosen = [choose_precision(types, each, num_bytes) for each in targets]
    first, *others = [ChosenPrecision(load_precision(name), why) for name, why in chosen]
    return first, next((each for each in others if each != first), None)


def _file_bytes(found: FoundModel) -> int | None:
    """Return the bytes of a model's file, all parts included. None: a directory or a shape."""
    if not isinstance(found, Path) or not found.is_file():
        return None
    part = _PART.fullmatch(found.stem)
    if part is None:
        return found.stat().st_size
    number = "[0-9]" * 5
    pattern = f"{glob.escape(part[1])}-{number}{part[2]}{found.suffix}"
    return sum(each.stat().st_size for each in found.parent.glob(pattern))


def known_types(found: FoundModel) -> tuple[str, ...] | None:
    """Return `quantised_types` from the start index, without reading the file's header."""
    if isinstance(found, ShapeName):
        return None
    from tilewright.compiler.artifacts.start import DamagedStartError, StartIndex

    index = StartIndex.default()
    key = index.key_of(found.name, model_files(found))
    with contextlib.suppress(DamagedStartError):
        record = None if key is None else index.record(key)
        return None if record is None else record.stored_types
    return None
