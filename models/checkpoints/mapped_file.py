"""A checkpoint file mapped into memory. Its pages are released after they are read."""

from __future__ import annotations

import mmap
from pathlib import Path

from tilewright.errors import CheckpointError
from tilewright.utils.files import open_regular


def map_file(path: Path) -> mmap.mmap:
    """Map a regular file into memory. Its bytes are read from disk on access.

    Raises:
        CheckpointError: The file cannot be opened, or is empty.
    """
    try:
        with open_regular(path) as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or "it is empty"
        raise CheckpointError(
            f"{path}: cannot be read: {reason}; allowed: a readable file with content"
        ) from None


def release(mapped: mmap.mmap, start: int, nbytes: int) -> None:
    """Let the kernel drop the pages of these bytes, which have been copied and need not stay."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    start -= start % mmap.PAGESIZE
    mapped.madvise(mmap.MADV_DONTNEED, start, min(nbytes, len(mapped) - start))
