"""``manifest.json`` of a compiled folder: what was compiled, how and by what, and every hash."""

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
"""Raised when a folder written before can no longer be read."""


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What commands ask of a model when its checkpoint is not there.

    ``weights``: where they came from; folders written before it was there are of checkpoints.
    """

    name: str
    content_hash: str
    num_layers: int
    max_positions: int
    weights: Literal["checkpoint", "random"] = "checkpoint"


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Size in bytes and SHA-256 of one file."""

    num_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """The ranks that a folder was compiled for, as `Parallel` has them; ``sources``: SHA-256 of the
    code that dealt the model to them, which is to run it.
    """

    tensor: int
    expert: int | None
    shares: tuple[int, ...]
    wire: str
    sources: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a compiled folder says of itself; ``files`` are relative paths, this file apart.

    ``notes``: what the passes had to say. ``created``: when, UTC. ``commit``: of the compiler's
    checkout, if it was one. ``group``: of a folder with a program for every rank of one.
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
    """Encode a manifest as the JSON that its file holds."""
    return msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n"


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of the artifact in ``folder``.

    Raises:
        CheckpointError: when it is missing, not a manifest, or of another format.
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
