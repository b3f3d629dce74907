"""Two parts of a pass that need nothing of each other, at once on one device."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SideStream:
    """A second stream of a device: what reads memory there runs beside what multiplies here.

    On a CPU, one runs after the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both behind what the current stream has, and what comes behind both. Neither may
        write what the other reads or writes; memory that one takes for itself is given back to its
        own stream, so that the other cannot be given it meanwhile. It may be captured.
        """
        if self._stream is None:
            first()
            second()
            return
        here = torch.cuda.current_stream(self._stream.device)
        before = here.record_event()
        first()
        self._stream.wait_event(before)
        with torch.cuda.stream(self._stream):
            second()
        here.wait_stream(self._stream)
