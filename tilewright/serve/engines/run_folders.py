"""Directories for the sockets of API server and engines, removed after a server's death."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import IO

from tilewright.errors import ConfigError

PREFIX = "tilewright-serve-"
_LOCK = "lock"
_MAX_PATH = 100  # limit for a socket's path
_YOUNG_SECONDS = 60.0


class MeetingFolder:
    """A temporary directory of mode 0700, locked until this process ends.

    The constructor removes this user's directories of dead processes.

    Raises:
        ConfigError: if the path is too long for a socket, or cannot be created.
    """

    def __init__(self) -> None:
        remove_stale()
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
            self._lock = _lock(self.path)
        except OSError as error:
            where = tempfile.gettempdir()
            raise ConfigError(f"{where}: {error.strerror}; allowed: a TMPDIR to write") from None
        if len(str(self.path)) > _MAX_PATH - 8:
            said = f"{self.path}: too long for a socket; allowed: a shorter TMPDIR"
            self.remove()
            raise ConfigError(said)

    def remove(self) -> None:
        """Remove the directory and its contents."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def remove_stale() -> None:
    """Remove this user's directories with free locks, because their servers have ended."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            if not path.is_dir() or path.is_symlink() or status.st_uid != os.getuid():
                continue
            is_young = time.time() - status.st_mtime < _YOUNG_SECONDS
            if is_young and not (path / _LOCK).exists():
                continue  # another process creates it
            if (lock := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                lock.close()


def _lock(path: Path) -> IO[bytes] | None:
    """Return the directory's lock, or None if another process has it."""
    file = (path / _LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
