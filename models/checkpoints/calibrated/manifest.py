"""A calibrated folder's manifest: model, precision, tensors. Imports no torch."""

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
NORM_EPOCHS = "norm_epochs"
"""The setting of tuned norms: passes over the text."""
_TYPE = "type"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a calibrated folder.

    Attributes:
        shape: Shape in the checkpoint.
        format: Number format, or the safetensors type for a tensor without codes.
        file: File name.
        axis: ``in`` or ``out``: the block axis. Empty without blocks.
        parts: Half-open row ranges, in order, counted over all axes but the last.
    """

    shape: tuple[int, ...]
    format: str
    file: str
    axis: str = ""
    parts: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class CalibrationFacts:
    """A calibrated folder's origin.

    Attributes:
        model: Model name.
        original: The original checkpoint's content hash.
        precision: Configuration name or heading.
        precision_id: The configuration's id on this model.
        block_axis: Block axis, ``in`` or ``out``.
        method: ``rtn``, ``imatrix`` or ``gptq``.
        text: Text name.
        text_sha256: SHA-256 over its token ids, or over an imatrix file.
        num_tokens: Text token count.
        sequence_length: Tokens in a sequence.
        settings: Method settings, by name.
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

    @property
    def code_settings(self) -> dict[str, float]:
        """The settings that change codes: all but those of norms."""
        return {name: value for name, value in self.settings.items() if name != NORM_EPOCHS}

    @property
    def text_line(self) -> str:
        """The method and its text, for tables: ``gptq, 32,768 tokens (1a2b3c4d)``."""
        if self.method == "rtn":
            return self.method
        size = f"{self.num_tokens:,} tokens" if self.num_tokens else "imatrix file"
        norms = " and norms" if NORM_EPOCHS in self.settings else ""
        return f"{self.method}{norms}, {size} ({self.text_sha256[:8]})"


@dataclass(frozen=True, slots=True)
class CalibrationManifest:
    """A calibrated folder's manifest without its version."""

    facts: CalibrationFacts
    config: dict[str, Any]
    tensors: dict[str, StoredTensor]
    notes: tuple[str, ...] = ()


def is_calibrated(path: Path) -> bool:
    """Return whether ``path`` is a calibrated folder, complete or not."""
    return path.is_dir() and ((path / MANIFEST).is_file() or (path / PARTIAL).is_file())


def read_manifest(folder: Path) -> CalibrationManifest:
    """Read a calibrated folder's manifest.

    Raises:
        CheckpointError: for an unfinished calibration, or a damaged manifest.
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
        raise CheckpointError(
            f"{path}: not a calibration manifest: {error}; allowed: that of tilewright calibrate"
        ) from None


def manifest_json(manifest: CalibrationManifest) -> bytes:
    """Return a manifest as file bytes."""
    body = {"version": VERSION, **dataclasses.asdict(manifest)}
    return (json.dumps(body, indent=1) + "\n").encode()


def read_partial(folder: Path) -> dict[str, Any] | None:
    """Return an unfinished calibration's settings. None: no unfinished calibration."""
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
    """Return the configuration for plain values.

    Raises:
        CheckpointError: for an unknown configuration.
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
            raise CheckpointError(
                f"{where}: config: unknown {_TYPE} {value.get(_TYPE)!r:.80}; allowed: a "
                "configuration of this version"
            )
        try:
            return kind(**{name: build(each) for name, each in value.items() if name != _TYPE})
        except TypeError as error:
            fields = (field.name for field in dataclasses.fields(kind))
            raise CheckpointError(f"{where}: config: {error}; {allowed(fields)}") from None

    found = build(dict(values))
    if not isinstance(found, configs.ModelConfig):
        raise CheckpointError(f"{where}: config: {allowed(['a model configuration'])}")
    return found
