"""Opening files that others name: only regular ones, so that no read blocks or goes on forever.

The same as `tilewright.compiler.files`, which models may not import.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path


def open_regular(path: Path) -> io.BufferedReader:
    """``path`` for reading; its size is what there is to read.

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
