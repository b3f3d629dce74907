"""Runs two independent parts of a pass concurrently on a device."""

from __future__ import annotations

from collections.abc import Callable

import torch


class SideStream:
    """A second CUDA stream, for memory-bound work during matmuls.

    On a CPU, the parts run in sequence.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def run(self, first: Callable[[], None], second: Callable[[], None]) -> None:
        """Run both parts after the current stream's work. Later work waits for both.

        Neither may write memory that the other uses. Memory allocated by either returns to its own
        stream, so the other cannot get the memory meanwhile. Graphs may capture both.
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
