"""Ranks of the CUDA target in threads of one process, without a GPU: what `Exchange` does by peer
memory is done here by the references, from one meeting of the threads to the next.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from tilewright.compiler.ops.collectives import all_reduce_group
from tilewright.compiler.targets.cuda.kernels.sampling.argmax import choose

T = TypeVar("T")
SECONDS = 60.0


class Meeting:
    """Where threads hand their values to each other; between meetings one of them runs at a time,
    for Triton's interpreter has one place for all.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._barrier = threading.Barrier(count, timeout=SECONDS)
        self._values: list[Any] = [None] * count
        self.turn = threading.Lock()

    def gather(self, rank: int, value: T) -> list[T]:
        self._values[rank] = value
        self.turn.release()
        try:
            self._barrier.wait()
            found = list(self._values)
            self._barrier.wait()
        finally:
            self.turn.acquire()
        return found

    def abort(self) -> None:
        self._barrier.abort()


class ThreadExchange:
    """A rank's exchange; ``steps`` counts the exchanges of every step."""

    part_bytes = 1 << 20

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.count, self._meeting = rank, meeting.count, meeting
        self.steps: list[int] = []
        self._num = 0
        self.limit = 0.0

    def set_limit(self, seconds: float) -> None:
        self.limit = seconds

    def failure(self) -> None:
        return None

    def end_step(self) -> None:
        if self._num:
            self.steps.append(self._num)
        self._num = 0

    def all_reduce(self, out: Tensor, x: Tensor, *, wire: str) -> None:
        out.copy_(all_reduce_group(self._gather(x), wire)[self.rank])

    def all_reduce_add(
        self,
        x: Tensor,
        stream: Tensor,
        *,
        wire: str,
        out: Tensor | None = None,
        norm: Tensor | None = None,
        eps: float = 0.0,
    ) -> None:
        stream += all_reduce_group(self._gather(x), wire)[self.rank]
        if out is not None:
            out.copy_(torch.nn.functional.rms_norm(stream, (x.shape[1],), norm, eps))

    def choose_best(
        self,
        tokens: Tensor,
        why: Tensor,
        keys: Tensor,
        *,
        end_tokens: Tensor,
        first_column: int,
        positions: Tensor | None = None,
    ) -> None:
        least = torch.full((len(tokens), 1), -(2**62))
        best = torch.cat((keys, least), 1).amax(1) - first_column
        best = torch.stack(self._gather(best)).amax(0)
        width = 1 + int((0xFFFFFFFF - (best & 0xFFFFFFFF)).max())
        logits = torch.full((len(tokens), width), float("-inf"))
        order = (best >> 32).to(torch.int32)
        bits = torch.where(order < 0, order ^ 0x7FFFFFFF, order)
        at = (0xFFFFFFFF - (best & 0xFFFFFFFF)).unsqueeze(1)
        logits.scatter_(1, at, bits.view(torch.float32).unsqueeze(1))
        scratch = torch.empty(len(tokens), 1 + width // 1024, dtype=torch.int64)
        choose(tokens, why, logits, end_tokens=end_tokens, scratch=scratch, positions=positions)

    def deliver(self, out: Tensor, x: Tensor, *, senders: int, receivers: int) -> None:
        found = self._gather(x)
        if receivers >> self.rank & 1:
            for rank in range(self.count):
                if senders >> rank & 1:
                    out[rank] = found[rank]

    def _gather(self, x: Tensor) -> list[Tensor]:
        self._num += 1
        return self._meeting.gather(self.rank, x.clone())


def together(meeting: Meeting, run: Callable[[int], T]) -> list[T]:
    """What each rank's thread makes of its rank; the first that fails ends the others."""
    found: list[Any] = [None] * meeting.count
    failed: list[BaseException] = []

    def one(rank: int) -> None:
        try:
            with meeting.turn:
                found[rank] = run(rank)
        except BaseException as error:
            failed.append(error)
            meeting.abort()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(meeting.count)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failed:
        raise failed[0]
    return found
