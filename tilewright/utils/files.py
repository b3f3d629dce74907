"""Files read and written with care: only regular ones are opened, whole ones are left behind."""

from __future__ import annotations

import errno
import io
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewright.errors import ConfigError

CACHE_VARIABLE = "TILEWRIGHT_CACHE"


def cache_dir() -> Path:
    """Where Tilewright keeps what it can compute again (``TILEWRIGHT_CACHE``).

    Raises:
        ConfigError: when the variable is no path.
    """
    named = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(named).expanduser() if named else Path.home() / ".cache" / "tilewright"
    except RuntimeError as error:
        raise ConfigError(f"{CACHE_VARIABLE}={named!r}: no such place ({error})") from None


def check_fresh(path: Path) -> None:
    """Refuse a place that no new folder can take.

    Raises:
        ConfigError: where there is something other than an empty folder, or the name is none.
    """
    try:
        is_taken = path.exists() and not (path.is_dir() and not any(path.iterdir()))
    except OSError as error:
        raise ConfigError(f"{str(path)[:200]}: cannot be made ({error.strerror})") from None
    if is_taken:
        raise ConfigError(f"{path}: exists and is not empty; allowed: a new or empty folder")


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading; its size is what there is to read.

    Raises:
        OSError: for what cannot be opened, a folder, a pipe, a device.
        ValueError: for a path that no file can have.
    """
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is no regular file", str(path))


def read_regular(path: Path) -> bytes:
    """All bytes of ``path``; raises as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def mode_of_new(mode: int) -> int:
    """What is left of a new file's or folder's permissions by the umask of this process."""
    mask = os.umask(0)
    os.umask(mask)
    return mode & ~mask


def replace_file(path: Path, data: bytes) -> None:
    """Make ``data`` the content of ``path`` in one step, with the mode it had, or leave it alone.

    Raises:
        OSError, ValueError: where it cannot be written.
    """
    mode = path.stat().st_mode & 0o777 if path.exists() else mode_of_new(0o666)
    with _beside(path, data, mode) as temporary:
        os.replace(temporary, path)


def create_file(path: Path, data: bytes) -> None:
    """Make a file of ``data``, whole or not at all, and never in the place of another.

    Raises:
        FileExistsError: when there is one.
        OSError, ValueError: where it cannot be written.
    """
    with _beside(path, data, mode_of_new(0o666)) as temporary:
        os.link(temporary, path)


@contextmanager
def _beside(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    """A complete file in the folder of ``path``, on disk; gone afterwards if it is still there."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
    temporary = Path(name)
    try:
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.chmod(mode)
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)
