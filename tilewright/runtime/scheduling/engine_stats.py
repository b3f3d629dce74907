"""Step time histograms, counted in the engine loop and sent with every heartbeat. Imports no
torch.
"""

from __future__ import annotations

from bisect import bisect_left

import msgspec

SECONDS = (
    *(0.00005, 0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05),
    *(0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

STEP, HOST, IDLE, SIZE = "step_seconds", "host_seconds", "device_idle_seconds", "iteration_tokens"
"""Names of statistics. A kind and a part follow `STEP` and `HOST`."""

_BOUNDS: dict[str, tuple[float, ...]] = {SIZE: TOKENS}


def bounds_of(name: str) -> tuple[float, ...]:
    """Return the counts' upper bounds. The last count has no bound."""
    return _BOUNDS.get(name, SECONDS)


class HistogramCounts(msgspec.Struct):
    """``counts`` of values up to each bound and beyond the last, and the sum of all."""

    counts: list[int]
    total: float = 0.0


class EngineStats:
    """Histograms of an engine since its start, by name, or by name and kind with a slash."""

    def __init__(self) -> None:
        self.found: dict[str, HistogramCounts] = {}

    def add(self, name: str, value: float, kind: str = "") -> None:
        """Count a value in the histogram of this name and kind."""
        key = f"{name}/{kind}" if kind else name
        bounds = bounds_of(name)
        tally = self.found.get(key)
        if tally is None:
            tally = self.found[key] = HistogramCounts([0] * (len(bounds) + 1))
        tally.counts[bisect_left(bounds, value)] += 1
        tally.total += value
