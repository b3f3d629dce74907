"""Compiled directories: written under a temporary name, renamed when complete, checked before
use.
"""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tilewright.compiler.artifacts.digests import file_digest
from tilewright.compiler.artifacts.manifest import FileFacts, Manifest, manifest_json, read_manifest
from tilewright.compiler.artifacts.paths import MANIFEST, is_of_another
from tilewright.errors import CheckpointError, ConfigError, NoRoomError
from tilewright.utils.files import check_fresh, mode_of_new, read_regular


def seal_folder(folder: Path, manifest: Manifest, memory: Path) -> None:
    """Hash all files in ``folder``, then write the manifest."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            facts = FileFacts(path.stat().st_size, file_digest(path, memory))
            files[path.relative_to(folder).as_posix()] = facts
    write_file(folder / MANIFEST, manifest_json(replace(manifest, files=files)))


def make_folder(path: Path) -> None:
    """Make a directory inside an artifact.

    Raises:
        NoRoomError: The directory cannot be made.
    """
    try:
        path.mkdir()
    except OSError as error:
        raise NoRoomError(
            f"{path}: cannot be made ({error.strerror}); allowed: a folder with room for it"
        ) from None


def write_file(path: Path, data: bytes) -> None:
    """Write a file in an artifact's directory.

    Raises:
        NoRoomError: The file cannot be written.
    """
    try:
        path.write_bytes(data)
    except OSError as error:
        raise NoRoomError(
            f"{path}: cannot be written ({error.strerror}); allowed: a folder with room for it"
        ) from None


def read_file(path: Path) -> bytes:
    """Return a file's bytes in an artifact's directory.

    Raises:
        CheckpointError: The file cannot be read.
    """
    try:
        return read_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def open_folder(folder: Path, memory: Path, rank: int = 0) -> Manifest:
    """Return a compiled directory's manifest after checking its file hashes.

    For a group of ranks, only the files for ``rank`` are hashed.

    Raises:
        CheckpointError: The manifest is missing or invalid, or a file is missing, changed or
            unknown.
    """
    manifest = read_manifest(folder)
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_dir() and name not in (MANIFEST, *manifest.files):
            shown = name if name.isprintable() else repr(name)
            raise CheckpointError(
                f"{folder}: holds {shown[:200]}, which is no file that was compiled; "
                "allowed: the files of its manifest"
            )
    for name, facts in manifest.files.items():
        if is_of_another(name, rank):
            continue
        path = folder / name
        try:
            sound = path.stat().st_size == facts.num_bytes
            sound = sound and file_digest(path, memory) == facts.sha256
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read ({error.strerror or error})") from None
        if not sound:
            raise CheckpointError(
                f"{path}: not the file that was compiled (its hash differs); compile again"
            )
    return manifest


@contextmanager
def fresh_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary directory. Rename it to ``path`` on success, else remove it.

    Raises:
        ConfigError: ``path`` exists and is not an empty directory, or it cannot be created.
    """
    check_fresh(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise ConfigError(f"{str(path)[:200]}: cannot be made ({error.strerror})") from None
    try:
        yield partial
        _put(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _put(partial: Path, path: Path) -> None:
    try:
        partial.chmod(mode_of_new(0o777))
        partial.replace(path)
    except OSError as error:
        reason = error.strerror
        if error.errno == errno.ENOTEMPTY:
            reason = "another process has written there meanwhile"
        raise ConfigError(f"{path}: cannot be written ({reason})") from None
