"""Pinned memory for sampled tokens that the device sends. Excludes sampling."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from tilewright.compiler.targets.cuda.kernels.common import driver
from tilewright.compiler.targets.cuda.outputs.sampling_batch import SamplingBatch, num_why_words
from tilewright.compiler.targets.interface.step import END_TOKEN, GOES_ON, SampledTokens

Ends = Mapping[int, Collection[int]]
"""End tokens by index, if the device has no capacity for them."""

_NUM_BUFFERS = 16
"""Transfers in flight: two steps, with decode rows and several prompts each."""


@dataclass(slots=True)
class _PinnedBuffer:
    """Pinned memory for a forward's results.

    Attributes:
        array: The memory, int64.
        event: Follows the last copy.
        address, handle: Address of ``array``, and the driver's handle of the event.
        read: Returns the last results. None: unused.
    """

    array: np.ndarray
    event: torch.cuda.Event
    address: int
    handle: int
    read: Callable[[], SampledTokens] | None = None

    @classmethod
    def empty(cls, num_words: int) -> _PinnedBuffer:
        """Allocate the memory."""
        words, event = (
            torch.empty(num_words, dtype=torch.int64, pin_memory=True),
            torch.cuda.Event(),
        )
        event.record()  # torch makes the event at its first use
        return cls(words.numpy(), event, words.data_ptr(), event.cuda_event)


class PinnedRing:
    """Pinned buffers in turn. A buffer is read before its next use."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._max_rows = max_rows
        self._is_gpu, self._index = device.type == "cuda", device.index or 0
        self._buffers: list[_PinnedBuffer] = []
        self._next = 0

    def send(self, choice: SamplingBatch, count: int, ends: Ends) -> Callable[[], SampledTokens]:
        """Start the transfer of the first ``count`` tokens. Return their reader."""
        if not self._is_gpu:
            tokens, why = choice.tokens[:count].tolist(), choice.why[:count].tolist()
            found = _chosen(tokens, why, ends)
            return lambda: found
        if not self._buffers:
            size = num_why_words(self._max_rows) + self._max_rows
            self._buffers = [_PinnedBuffer.empty(size) for _ in range(_NUM_BUFFERS)]
        buffer = self._buffers[self._next]
        self._next = (self._next + 1) % _NUM_BUFFERS
        if buffer.read is not None:
            buffer.read()  # a late reader returns the results stored by this call
        assert choice.num_bytes <= buffer.array.nbytes  # a copy by addresses checks no sizes
        there = buffer.address, choice.address, choice.num_bytes
        driver.copy_to_host(*there, event=buffer.handle, device=self._index)
        first = choice.first
        kept: list[SampledTokens] = []

        def read() -> SampledTokens:
            if not kept:
                buffer.event.synchronize()
                tokens = buffer.array[first : first + count].tolist()
                why = buffer.array.view(np.uint8)[:count].tolist()
                kept.append(_chosen(tokens, why, ends))
            return kept[0]

        buffer.read = read
        return read


def _chosen(tokens: list[int], why: list[int], ends: Ends) -> SampledTokens:
    for row, more in ends.items():
        if why[row] == GOES_ON and tokens[row] in more:
            why[row] = END_TOKEN
    return SampledTokens(tokens, why)
