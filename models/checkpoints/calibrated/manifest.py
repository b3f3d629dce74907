"""The manifest of a calibrated folder: its model, its precision, its tensors. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from tilewright.errors import CheckpointError, allowed
from tilewright.models import config as configs
from tilewright.models.checkpoints.json_file import read_json
from tilewright.utils.files import read_regular

MANIFEST = "calibration.json"
PARTIAL = "calibration.partial.json"
TOKENIZER = "tokenizer"
VERSION = 1
_TYPE = "type"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a calibrated folder.

    Attributes:
        shape: Shape in the checkpoint.
        format: Name of its number format, or the safetensors type of a tensor without one.
        file: Name of the file with its parts.
        axis: ``in`` or ``out``: the axis of its blocks. Empty without blocks.
        parts: Half-open ranges of rows, in order, counted over all axes but the last.
    """

    shape: tuple[int, ...]
    format: str
    file: str
    axis: str = ""
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CalibrationFacts:
    """The origin of a calibrated folder.

    Attributes:
        model: Name of the model.
        original: Content hash of the checkpoint that was calibrated.
        precision: Name or heading of the configuration of the weights.
        precision_id: Id of that configuration on this model.
        block_axis: Axis of the blocks, ``in`` or ``out``.
        method: ``rtn``, ``imatrix`` or ``gptq``.
        text: Name of the calibration text.
        text_sha256: SHA-256 of its token ids, or of an imatrix file.
        num_tokens: Number of tokens of the text.
        sequence_length: Tokens of a sequence.
        settings: Further settings of the method, by name.
    """

    model: str
    original: str
    precision: str
    precision_id: str
    block_axis: str
    method: str
    text: str
    text_sha256: str
    num_tokens: int
    sequence_length: int
    settings: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CalibrationManifest:
    """Everything in a calibrated folder's manifest but its version."""

    facts: CalibrationFacts
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    notes: tuple[str, ...] = ()


def is_calibrated(path: Path) -> bool:
    """Return whether ``path`` is a calibrated folder, complete or not."""
    return path.is_dir() and ((path / MANIFEST).is_file() or (path / PARTIAL).is_file())


def read_manifest(folder: Path) -> CalibrationManifest:
    """Read the manifest of a calibrated folder.

    Raises:
        CheckpointError: for a folder whose calibration has not ended, or a damaged manifest.
    """
    path = folder / MANIFEST
    if not path.is_file():
        raise CheckpointError(
            f"{folder}: its calibration has not ended; allowed: the same tilewright calibrate "
            "command again, which resumes it"
        )
    values = read_json(path)
    if values.pop("version", None) != VERSION:
        raise CheckpointError(f"{path}: version; allowed: {VERSION}")
    try:
        return msgspec.convert(values, CalibrationManifest)
    except (msgspec.ValidationError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a calibration manifest: {error}") from None


def manifest_json(manifest: CalibrationManifest) -> bytes:
    """Return the bytes of a manifest's file."""
    body = {"version": VERSION, **dataclasses.asdict(manifest)}
    return (json.dumps(body, indent=1) + "\n").encode()


def read_partial(folder: Path) -> dict[str, Any] | None:
    """Return the settings of a calibration that has not ended; None if there is none."""
    try:
        found = json.loads(read_regular(folder / PARTIAL))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def config_values(config: Any) -> dict[str, Any]:
    """Return a configuration as plain values, each dataclass with its class name."""

    def plain(value: Any) -> Any:
        if dataclasses.is_dataclass(value):
            fields = {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return {_TYPE: type(value).__name__, **fields}
        return [plain(each) for each in value] if isinstance(value, tuple) else value

    found: dict[str, Any] = plain(config)
    return found


def config_of_values(values: Mapping[str, Any], where: Path) -> configs.ModelConfig:
    """Return the configuration of plain values.

    Raises:
        CheckpointError: for values of no known configuration.
    """
    from tilewright.models.architectures.table import architecture_of, check_model_type

    model_type = check_model_type(values.get("model_type"), f"{where}: config.model_type")
    own = architecture_of(model_type).config or configs.ModelConfig
    known = {**vars(configs), own.__name__: own}

    def build(value: Any) -> Any:
        if isinstance(value, list):
            return tuple(build(each) for each in value)
        if not isinstance(value, dict):
            return value
        kind = known.get(value.get(_TYPE, ""))
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise CheckpointError(f"{where}: config: unknown {_TYPE} {value.get(_TYPE)!r:.80}")
        try:
            return kind(**{name: build(each) for name, each in value.items() if name != _TYPE})
        except TypeError as error:
            raise CheckpointError(f"{where}: config: {error}") from None

    found = build(dict(values))
    if not isinstance(found, configs.ModelConfig):
        raise CheckpointError(f"{where}: config: {allowed(['a model configuration'])}")
    return found
