"""The private memory of a test's process."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PAGES = Path("/proc/self/smaps_rollup")
"""Sums over page tables. The counters of /proc/self/status lag behind."""


def resident_bytes() -> int:
    """Return the bytes of private memory that the kernel holds for this process (Linux)."""
    found = re.search(r"^Anonymous: +(\d+) kB$", PAGES.read_text(encoding="ascii"), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


@contextmanager
def collected() -> Iterator[None]:
    """Collect garbage and return freed memory before, and disable collection inside.

    Otherwise, a measurement can include what earlier tests have left.
    """
    gc.collect()
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):  # glibc
        libc.malloc_trim(0)
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
