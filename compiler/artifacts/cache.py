"""A cache for compiled programs and model metadata, keyed by their inputs, and therefore never
stale.

A single process builds an entry while others wait for its lock. Damaged entries are built again.
The least recently used entries are removed to free space.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tilewright.compiler.artifacts.digests import file_digest, sources_digest
from tilewright.compiler.artifacts.folder import open_folder
from tilewright.compiler.artifacts.manifest import FORMAT, Manifest, read_manifest
from tilewright.compiler.artifacts.paths import MANIFEST, cache_dir
from tilewright.errors import CheckpointError, ConfigError, NoRoomError, TilewrightError
from tilewright.utils.environment import versions

SIZE_VARIABLE = "TILEWRIGHT_CACHE_GB"
DEFAULT_GB = 20.0
_KEY_DIGITS = 32
_PARTIAL, _LOCK = ".partial", ".lock"


class CacheUnusableError(TilewrightError):
    """The cache directory cannot be created, locked or written."""


def program_key(
    files: Sequence[Path], *, target: str, compute: str, precision_id: str, memory: Path
) -> str:
    """Return a key for a program: a hash over the checkpoint's bytes, the options and the code.

    Raises:
        OSError: A file cannot be read.
    """
    parts = {
        "format": FORMAT,
        "files": [[path.name, file_digest(path, memory)] for path in files],
        "target": target,
        "compute": compute,
        "precision": precision_id,
        "sources": sources_digest(),
        "versions": versions(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:_KEY_DIGITS]


@dataclass(frozen=True, slots=True)
class ProgramCache:
    """A cache for compiled programs.

    Attributes:
        root: Directory.
        max_bytes: Total size limit in bytes.
    """

    root: Path
    max_bytes: int

    @classmethod
    def default(cls) -> ProgramCache:
        """Return the cache in :func:`cache_dir`, limited to ``TILEWRIGHT_CACHE_GB`` gigabytes.

        Raises:
            ConfigError: The variable is not a size.
        """
        text = os.environ.get(SIZE_VARIABLE, str(DEFAULT_GB))
        try:
            size = float(text)
        except ValueError:
            size = -1.0
        if not 0 <= size < 1e9:
            raise ConfigError(f"{SIZE_VARIABLE}={text!r}; allowed: gigabytes, 0 or more")
        return cls(cache_dir(), int(size * 1e9))

    @property
    def memory(self) -> Path:
        """Return the cached file digest directory."""
        return self.root / "digests"

    @contextmanager
    def entry(
        self, key: str, build: Callable[[Path], None], *, wait: Callable[[], None]
    ) -> Iterator[tuple[Path, Manifest]]:
        """Yield the entry ``key`` with its manifest. Call ``build(directory)`` unless a valid entry
        exists.

        Inside the block no other process builds or removes the entry. ``wait`` is called if another
        process has the lock.

        Raises:
            CacheUnusableError: The cache is not writable.
        """
        entry = self._programs / key
        partial = self._path(key, _PARTIAL)
        with contextlib.ExitStack() as stack:
            with _unusable(self.root):
                self._programs.mkdir(parents=True, exist_ok=True)
                stack.enter_context(_locked(self._path(key, _LOCK), wait))
            manifest = self._sound(entry)
            if manifest is None:
                with _unusable(self.root):
                    for leftover in (partial, entry):
                        _remove(leftover)
                    partial.mkdir()
                try:
                    build(partial)
                    with _unusable(self.root):
                        partial.rename(entry)
                except NoRoomError as error:
                    raise CacheUnusableError(f"the cache has no room: {error}") from None
                finally:
                    _remove(partial)
                self._make_room(key)
                manifest = read_manifest(entry)
            yield entry, manifest

    def entries(self) -> list[Path]:
        """Return the directories of all programs. Without a cache there are none."""
        with contextlib.suppress(OSError):
            return sorted(
                each
                for each in self._programs.iterdir()
                if each.is_dir() and each.suffix != _PARTIAL
            )
        return []

    def remove(self, key: str) -> None:
        """Remove a program.

        Raises:
            ConfigError: A process builds or loads the program.
            OSError: The files cannot be removed.
        """
        try:
            with _locked(self._path(key, _LOCK)):
                shutil.rmtree(self._programs / key)
        except BlockingIOError:
            raise ConfigError(f"program {key}: a process loads it; allowed: after that") from None

    @contextmanager
    def existing(
        self, key: str, *, wait: Callable[[], None]
    ) -> Iterator[tuple[Path, Manifest] | None]:
        """Yield an existing `entry`, or None without a valid entry."""
        entry = self._programs / key
        with contextlib.ExitStack() as stack:
            manifest = None
            with contextlib.suppress(OSError):
                stack.enter_context(_locked(self._path(key, _LOCK), wait))
                manifest = self._sound(entry)
            yield None if manifest is None else (entry, manifest)

    def _sound(self, entry: Path) -> Manifest | None:
        try:
            manifest = open_folder(entry, self.memory)
            os.utime(entry / MANIFEST)
        except (CheckpointError, OSError):
            return None
        return manifest

    @property
    def _programs(self) -> Path:
        return self.root / "programs"

    def _path(self, key: str, suffix: str) -> Path:
        return self._programs / f"{key}{suffix}"

    def _make_room(self, newest: str) -> None:
        """Remove the least recently used entries beyond ``max_bytes``, except ``newest``.

        Also remove incomplete entries of terminated processes.
        """
        entries = []
        for entry in self._programs.iterdir():
            with contextlib.suppress(OSError):
                if entry.suffix == _PARTIAL:
                    with _locked(self._path(entry.stem, _LOCK)):
                        _remove(entry)
                elif entry.is_dir():
                    size = sum(path.stat().st_size for path in entry.rglob("*"))
                    entries.append(((entry / MANIFEST).stat().st_mtime, entry, size))
        total = sum(size for _, _, size in entries)
        for _, entry, size in sorted(entries):
            if total <= self.max_bytes:
                break
            if entry.name != newest:
                with contextlib.suppress(OSError), _locked(self._path(entry.name, _LOCK)):
                    shutil.rmtree(entry)
                    total -= size


def _remove(path: Path) -> None:
    """Remove a directory or file, if it exists."""
    with contextlib.suppress(OSError):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


@contextmanager
def _unusable(root: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CacheUnusableError(f"the cache {root} cannot be used ({error.strerror})") from None


@contextmanager
def _locked(path: Path, wait: Callable[[], None] | None = None) -> Iterator[None]:
    """Take an exclusive lock on ``path``. If it is locked, call ``wait``, or raise without
    ``wait``.
    """
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if wait is None:
                raise
            wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
