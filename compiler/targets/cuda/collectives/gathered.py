"""Collectives for ranks that cannot access their peers' memory.

A library gathers the messages of all ranks. Each rank adds them with the kernels for peer memory,
so both methods give the same bits. Uses only the library's all-gather.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.collectives.all_reduce import (
    EMPTY,
    MOST_RANKS,
    Failure,
    PeerAllReduce,
)

_LEAST = (-0x7F900000 << 32) + 0xFFFFFFFF
"""A value below all logit keys, as in all_reduce.cu."""


class Gathering(Protocol):
    """A communication library, as seen by ``rank`` of ``count``.

    Attributes:
        has_ended: The library was stopped and gathers no more data.
    """

    rank: int
    count: int
    has_ended: bool

    def all_gather(self, parts: Tensor) -> None:
        """Fill ``parts [count, ...]`` (contiguous) with the parts of all ranks.

        Each rank provides ``parts[rank]``. Runs on the current stream. CUDA graphs can capture it.
        """


class GatheredExchange(PeerAllReduce):
    """A `PeerAllReduce` over a communication library.

    Kernels run as rank 0 of a group whose messages are all present in slot 0. They never wait.
    Their own messages go to unused memory.
    """

    def __init__(self, gathering: Gathering, *, part_bytes: int, device: torch.device) -> None:
        """Allocate the buffers. ``part_bytes`` is a rank's maximum message size."""
        self._gathering, self._num_folds = gathering, 0
        count = gathering.count
        while count > MOST_RANKS:
            count, self._num_folds = math.ceil(count / 2), self._num_folds + 1
        shape = (gathering.count + 1, part_bytes)
        self._memory = torch.zeros(shape, dtype=torch.uint8, device=device)
        own, aside = self._memory[0].data_ptr(), self._memory[-1].data_ptr()
        addresses = [own, *[aside] * (count - 1)]
        super().__init__(addresses, 0, part_bytes=part_bytes, device=device)
        self.rank, self.count = gathering.rank, gathering.count

    def failure(self) -> Failure | None:
        """See `PeerAllReduce`. After the library has ended, all gathered data is invalid."""
        if self._gathering.has_ended:
            return Failure(self.rank, self.rank, 0)
        return super().failure()

    def all_reduce(self, out: Tensor, x: Tensor, *, wire: str, **how: int) -> None:
        """See `PeerAllReduce`."""
        x, wire = self._sent(x, wire)
        super().all_reduce(out, x, wire=wire, **how)

    def all_reduce_add(self, x: Tensor, stream: Tensor, *, wire: str, **how: Any) -> None:
        """See `PeerAllReduce`."""
        x, wire = self._sent(x, wire)
        super().all_reduce_add(x, stream, wire=wire, **how)

    def choose_best(
        self, tokens: Tensor, why: Tensor, keys: Tensor, *, first_column: int, **how: Any
    ) -> None:
        """See `PeerAllReduce`."""
        parts = self._room((len(tokens), 1), torch.int64)
        own = parts[self.rank]
        if keys.shape[1]:
            torch.amax(keys, 1, keepdim=True, out=own)
            own -= first_column
        else:
            own.fill_(_LEAST - first_column)
        best = self._gathered(parts, torch.maximum)
        super().choose_best(tokens, why, best, first_column=0, **how)

    def deliver(self, out: Tensor, x: Tensor, *, senders: int, receivers: int) -> None:
        """See `PeerAllReduce`."""
        assert x.is_contiguous() and out.is_contiguous() and out.numel() == self.count * x.numel()
        own = x.view(-1).view(torch.int32)
        parts = self._room((len(own),), torch.int32)
        _put(parts[self.rank], own)
        self._gathering.all_gather(parts)
        if receivers >> self.rank & 1:
            words = out.view(self.count, -1).view(torch.int32)
            for rank in range(self.count):
                if senders >> rank & 1:
                    words[rank].copy_(own if rank == self.rank else parts[rank])

    def end_step(self) -> None:
        """See `PeerAllReduce`. This class has no counter."""

    def _parts(self, x: Tensor, wire: str) -> Iterator[tuple[slice, Tensor]]:
        kind = torch.float32 if wire == "fp32" else torch.bfloat16
        for part, rows in super()._parts(x, wire):
            parts = self._room(rows.shape, kind)
            _put(parts[self.rank], rows)
            yield part, self._gathered(parts, torch.add)

    def _sent(self, x: Tensor, wire: str) -> tuple[Tensor, str]:
        """Return the message and its format. Folded messages are fp32, rounded to the message
        format.
        """
        if wire == "fp32" or not self._num_folds:
            return x, wire
        return x.bfloat16().float(), "fp32"

    def _room(self, shape: tuple[int, ...], kind: torch.dtype) -> Tensor:
        """Return a buffer ``[n, *shape]`` for the messages of all ranks."""
        num_bytes = self.count * math.prod(shape) * kind.itemsize
        assert num_bytes <= self.count * self.part_bytes
        return self._memory.view(-1)[:num_bytes].view(kind).view(self.count, *shape)

    def _gathered(self, parts: Tensor, join: Callable[..., Any]) -> Tensor:
        """Gather all messages and join neighbors until the kernels support their number.

        Return the first message. Kernels find the next messages after it in memory.
        """
        self._gathering.all_gather(parts)
        for _ in range(self._num_folds):
            pairs = len(parts) // 2
            join(parts[: 2 * pairs : 2], parts[1::2], out=parts[: 2 * pairs : 2])
            parts = parts[::2]
        self._group.part_bytes = parts.stride(0) * parts.element_size()
        return parts[0]

    def _launch(self, *arguments: Any) -> None:
        self._index = 0
        super()._launch(*arguments)


def _put(to: Tensor, x: Tensor) -> None:
    """Copy ``x`` to ``to`` as kernels send it: no word equals EMPTY."""
    if to.dtype == torch.float32:
        torch.add(x, 0.0, out=to)  # -0.0 becomes +0.0
        return
    to.copy_(x)
    words = to.view(torch.int32)
    words.masked_fill_(words == EMPTY - 2**32, 0)
