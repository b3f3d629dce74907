"""How fast this machine reads memory now: several threads stream over a buffer beyond the caches.

The bound of decoding: a step reads every weight once. Needs NumPy alone.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

BUFFER_BYTES = 1 << 30
_PASSES = 3


def read_bandwidth(num_threads: int, *, num_bytes: int = BUFFER_BYTES) -> float:
    """Bytes a second that ``num_threads`` together read at best, out of three passes.

    Each thread adds up its own part of the buffer as int64, which NumPy does outside Python's lock
    and with vector instructions; the buffer is written first, so that its pages are really there.
    """
    assert num_threads >= 1 and num_bytes >= 8 * num_threads
    parts = np.array_split(np.full(num_bytes // 8, 1, dtype=np.int64), num_threads)
    total = sum(part.nbytes for part in parts)
    best = 0.0
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(_PASSES):
            started = time.perf_counter()
            sums = list(pool.map(np.add.reduce, parts))
            best = max(best, total / (time.perf_counter() - started))
            assert sum(int(each) for each in sums) == total // 8
    return best
