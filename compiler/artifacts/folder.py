"""Compiled folders: made beside their place and moved there whole, checked before they are used."""

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
    """Hash every file in ``folder`` and write the manifest, last."""
    files = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != MANIFEST:
            facts = FileFacts(path.stat().st_size, file_digest(path, memory))
            files[path.relative_to(folder).as_posix()] = facts
    write_file(folder / MANIFEST, manifest_json(replace(manifest, files=files)))


def make_folder(path: Path) -> None:
    """Make a folder inside an artifact's.

    Raises:
        NoRoomError: when it cannot be.
    """
    try:
        path.mkdir()
    except OSError as error:
        raise NoRoomError(
            f"{path}: cannot be made ({error.strerror}); allowed: a folder with room for it"
        ) from None


def write_file(path: Path, data: bytes) -> None:
    """Write one file of an artifact's folder.

    Raises:
        NoRoomError: when it cannot be.
    """
    try:
        path.write_bytes(data)
    except OSError as error:
        raise NoRoomError(
            f"{path}: cannot be written ({error.strerror}); allowed: a folder with room for it"
        ) from None


def read_file(path: Path) -> bytes:
    """The bytes of one file of a folder.

    Raises:
        CheckpointError: when it cannot be read.
    """
    try:
        return read_regular(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def open_folder(folder: Path, memory: Path, rank: int = 0) -> Manifest:
    """The manifest of a compiled folder whose files are all as they were written; of programs for
    several ranks, those that ``rank`` reads.

    Raises:
        CheckpointError: for a folder that is none, or one with a missing, changed or added file.
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
    """A folder to fill, which becomes ``path`` when the block ends well and is removed otherwise.

    Raises:
        ConfigError: when ``path`` exists and is not an empty folder, or cannot be made.
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
