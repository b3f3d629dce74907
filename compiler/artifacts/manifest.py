"""``manifest.json`` in a compiled directory: model, options, versions, and file hashes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import msgspec

from tilewright.compiler.artifacts.paths import MANIFEST
from tilewright.compiler.precision import PrecisionSummary
from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.errors import CheckpointError, one_line
from tilewright.utils.files import read_regular

_MAX_NAME = 255
FORMAT = 1
"""Version of the manifest. Increment it if older directories become unreadable."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Metadata for commands without access to the checkpoint.

    Attributes:
        name: Model name.
        content_hash: The checkpoint's hash.
        num_layers: Decoder layer count.
        max_positions: Maximum context in tokens.
        weights: The weights' origin. Older manifests lack this field and mean checkpoints.
        calibration: Calibration method and text. Empty without calibration.
        original: Checkpoint hash before calibration. Empty without calibration.
    """

    name: str
    content_hash: str
    num_layers: int
    max_positions: int
    weights: Literal["checkpoint", "random"] = "checkpoint"
    calibration: str = ""
    original: str = ""


@dataclass(frozen=True, slots=True)
class FileFacts:
    """A file's size in bytes and SHA-256."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The ranks for a compiled directory. Fields are as in `ParallelConfig`.

    ``sources`` is the SHA-256 of the sharding code. Running the program requires the same code.
    """

    tensor: int
    expert: int | None
    shares: tuple[int, ...]
    wire: str
    sources: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """Contents of ``manifest.json``.

    Attributes:
        model: Model metadata.
        precision: The configuration and its resolved table.
        target: Target name.
        compute: Arithmetic option.
        contract: Numeric contract of the target.
        notes: Messages from passes.
        versions: Package versions.
        commit: Commit of the compiler's checkout, or None.
        created: Creation time in UTC.
        files: Size and hash by relative path, without the manifest itself.
        format: Manifest version.
        group: The ranks, for a directory with a program per rank. None: a single program.
    """

    model: ModelFacts
    precision: PrecisionSummary
    target: str
    compute: str
    contract: NumericContract
    notes: tuple[str, ...]
    versions: dict[str, str]
    commit: str | None
    created: str
    files: dict[str, FileFacts] = field(default_factory=dict)
    format: int = FORMAT
    group: GroupFacts | None = None


def manifest_json(manifest: Manifest) -> bytes:
    """Encode a manifest as JSON for its file."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """Read and check a directory's manifest.

    Raises:
        CheckpointError: The manifest is missing, invalid, or has another version.
    """
    path = folder / MANIFEST
    try:
        data = read_regular(path)
        version = msgspec.json.decode(data, type=_Version).format
        if version != FORMAT:
            raise CheckpointError(f"{path}: format {version}; allowed: {FORMAT}; compile again")
        manifest = msgspec.json.decode(data, type=Manifest)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(f"{path}: not a manifest: {one_line(error)}") from None
    for name in manifest.files:
        parts = Path(name).parts
        is_name = name.isprintable() and len(name) <= _MAX_NAME and parts
        if not is_name or Path(name).is_absolute() or ".." in parts:
            raise CheckpointError(f"{path}: file {name[:80]!r}; allowed: paths inside the folder")
    return manifest


@dataclass(frozen=True, slots=True)
class _Version:
    format: int
