"""Folders where a front and its engine meet: one for each front, none left by those that died."""

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
_MAX_PATH = 100  # of a socket
_YOUNG_SECONDS = 60.0


class MeetingFolder:
    """A folder of mode 0700 in the temporary one, locked for as long as this process lives.

    Making one removes those of this user whose process is gone.

    Raises:
        ConfigError: where its name is too long for a socket in it, or it cannot be made.
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
        """Remove the folder and all that is in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            self._lock.close()


def remove_stale() -> None:
    """Remove the folders of this user's fronts that are gone; their locks are free."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = path.lstat()
            if not path.is_dir() or path.is_symlink() or found.st_uid != os.getuid():
                continue
            is_young = time.time() - found.st_mtime < _YOUNG_SECONDS
            if is_young and not (path / _LOCK).exists():
                continue  # it is being made
            if (lock := _lock(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                lock.close()


def _lock(path: Path) -> IO[bytes] | None:
    """The folder's lock, held until it is closed; None where another process has it."""
    file = (path / _LOCK).open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        return None
    return file
