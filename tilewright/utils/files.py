"""Safe reading and writing: only regular files are opened, and files are written whole."""

from __future__ import annotations

import errno
import io
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tilewright.errors import ConfigError, one_line

CACHE_VARIABLE = "TILEWRIGHT_CACHE"


def cache_dir() -> Path:
    """Return the directory for recomputable data (``TILEWRIGHT_CACHE``).

    Raises:
        ConfigError: The variable is not a path.
    """
    named = os.environ.get(CACHE_VARIABLE)
    try:
        return Path(named).expanduser() if named else Path.home() / ".cache" / "tilewright"
    except RuntimeError as error:
        raise ConfigError(f"{CACHE_VARIABLE}={named!r}: no such place ({error})") from None


def check_fresh(path: Path) -> None:
    """Check that a new directory can be created at ``path``.

    Raises:
        ConfigError: The path is invalid, or exists and is not an empty directory.
    """
    try:
        is_taken = path.exists() and not (path.is_dir() and not any(path.iterdir()))
    except OSError as error:
        raise ConfigError(f"{str(path)[:200]}: cannot be made ({error.strerror})") from None
    if is_taken:
        raise ConfigError(f"{path}: exists and is not empty; allowed: a new or empty folder")


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file for reading. The file has a definite size.

    Raises:
        OSError: The file cannot be opened, or is a directory, pipe or device.
        ValueError: The path is invalid.
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
    """Return all bytes of ``path``. Raise as `open_regular`."""
    with open_regular(path) as file:
        return file.read()


def read_text(
    path: Path, where: str = "", *, hint: str = "a text file", limit: int | None = None
) -> str:
    """Return a regular UTF-8 file's text.

    Args:
        where: Start of an error's message. Empty: the path.
        hint: The allowed files.
        limit: Maximum size in bytes. None: any.

    Raises:
        ConfigError: The file cannot be opened, is too large or is not UTF-8.
    """
    where = where or str(path)
    try:
        with open_regular(path) as file:
            data = file.read(-1 if limit is None else limit + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {_reason(error)}; allowed: {hint}") from None
    if limit is not None and len(data) > limit:
        raise ConfigError(f"{where} is too large; allowed: {limit} bytes or fewer")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{where} is not valid UTF-8 at byte {error.start}; allowed: UTF-8 text"
        ) from None


def write_file(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Write a file atomically, and create its directory. A link keeps its name.

    Args:
        mode: See `replace_file`.

    Raises:
        ConfigError: The file cannot be written. It is then unchanged.
    """
    try:
        target = path.resolve()
        target.parent.mkdir(parents=True, exist_ok=True)
        replace_file(target, data, mode=mode)
    except (OSError, ValueError) as error:
        reason = f"{path}: {_reason(error)}; allowed: a path that can be written"
        raise ConfigError(reason) from None


def _reason(error: OSError | ValueError) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or one_line(error)


def mode_of_new(mode: int) -> int:
    """Return the permissions of a new file or directory after the umask."""
    mask = os.umask(0)
    os.umask(mask)
    return mode & ~mask


def replace_file(path: Path, data: bytes, *, mode: int | None = None) -> None:
    """Replace a file's contents atomically. On failure the file is unchanged.

    Args:
        mode: Permissions. None: those of the file, or of a new file.

    Raises:
        OSError, ValueError: The file cannot be written.
    """
    if mode is None:
        mode = path.stat().st_mode & 0o777 if path.exists() else mode_of_new(0o666)
    with _beside(path, data, mode) as temporary:
        os.replace(temporary, path)


def create_file(path: Path, data: bytes) -> None:
    """Create a file atomically. Never replace an existing file.

    Raises:
        FileExistsError: The file exists.
        OSError, ValueError: The file cannot be written.
    """
    with _beside(path, data, mode_of_new(0o666)) as temporary:
        os.link(temporary, path)


@contextmanager
def _beside(path: Path, data: bytes, mode: int) -> Iterator[Path]:
    """Yield a complete temporary file in the directory of ``path``. Remove it afterwards."""
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
