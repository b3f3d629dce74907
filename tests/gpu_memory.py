"""Budget of GPU memory that the workers of a test run share. Excludes the tests' own allocations.

A test declares its memory: ``@pytest.mark.gpu(memory_gb=48)``. The default is `DEFAULT_GB`. The
budget is a folder of slot files, which the tests lock. The locks of a dead process are free.
"""

from __future__ import annotations

import fcntl
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

DEFAULT_GB = 4.0
"""Memory of a test that declares none, with the workspace that the CUDA target demands."""

_SLOT_GB, _CONTEXT_GB = 2.0, 1.0
_PAUSE_SECONDS = 0.02


def num_slots(total_bytes: int, num_workers: int) -> int:
    """Return the slots of a GPU beside the CUDA contexts of all workers; at least 1."""
    return max(1, int((total_bytes / 1e9 - _CONTEXT_GB * num_workers) / _SLOT_GB))


@contextmanager
def gpu_memory(folder: Path, total_slots: int, memory_gb: float) -> Iterator[int]:
    """Hold the slots for ``memory_gb``, or all slots if there are fewer; yield their number.

    One waiting test at a time collects slots, in any order. A large test is not overtaken.
    """
    count = min(total_slots, math.ceil(memory_gb / _SLOT_GB))
    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as held:
        with _locked(folder / "turn"):
            number = taken = 0
            while taken < count:
                taken += _try_lock(folder / f"slot-{number}", held)
                number = (number + 1) % total_slots
                if number == 0 and taken < count:
                    time.sleep(_PAUSE_SECONDS)
        yield count


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _try_lock(path: Path, held: ExitStack) -> bool:
    file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return False
    held.enter_context(file)
    return True
