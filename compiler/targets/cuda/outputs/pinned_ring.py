"""The tokens of steps on their way to the host, each behind the step that makes them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import torch
from torch import Tensor

from tilewright.compiler.targets.interface.step import END_TOKEN, GOES_ON, Chosen

Ends = Mapping[int, Collection[int]]
"""End tokens of rows that have more than the device has room for."""

_NUM_PLACES = 16
"""Parts that may be under way: two steps, of decode rows and of several prompts each."""


class Readings:
    """Pinned places that are used in turn; a part is read before its place comes round again."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._device, self._max_rows = device, max_rows
        self._places: list[tuple[Tensor, Tensor]] = []
        self._readers: list[Callable[[], Chosen] | None] = [None] * _NUM_PLACES
        self._next = 0

    def of(self, tokens: Tensor, why: Tensor, ends: Ends) -> Callable[[], Chosen]:
        """What gives ``tokens [R]`` and ``why [R]`` (uint8) once they have arrived."""
        if self._device.type != "cuda":
            found = _chosen(tokens.tolist(), why.tolist(), ends)
            return lambda: found
        if not self._places:
            self._places = [
                (
                    torch.empty(self._max_rows, dtype=torch.int64, pin_memory=True),
                    torch.empty(self._max_rows, dtype=torch.uint8, pin_memory=True),
                )
                for _ in range(_NUM_PLACES)
            ]
        index = self._next % _NUM_PLACES
        self._next += 1
        if (earlier := self._readers[index]) is not None:
            earlier()  # whoever has not read it yet reads it from what this keeps
        places = tuple(place[: len(tokens)] for place in self._places[index])
        places[0].copy_(tokens, non_blocking=True)
        places[1].copy_(why, non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        kept: list[Chosen] = []

        def read() -> Chosen:
            if not kept:
                event.synchronize()
                kept.append(_chosen(places[0].tolist(), places[1].tolist(), ends))
            return kept[0]

        self._readers[index] = read
        return read


def _chosen(tokens: list[int], why: list[int], ends: Ends) -> Chosen:
    for row, more in ends.items():
        if why[row] == GOES_ON and tokens[row] in more:
            why[row] = END_TOKEN
    return Chosen(tokens, why)
