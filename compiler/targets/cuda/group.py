"""A rank's place among the others of a group: what ends a step whose logits are dealt over ranks.

Rank 0 alone draws and answers; the likeliest token is found by all at once, by keys.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tilewright.compiler.errors import ExchangeError
from tilewright.compiler.targets.cuda.kernels.choose import best_keys, choose
from tilewright.compiler.targets.cuda.kernels.exchange import EMPTY, SLOTS, Exchange

if TYPE_CHECKING:
    from tilewright.compiler.distributed.group import Peers as Met
    from tilewright.compiler.targets.cuda.peers import Peers

WARMUP_SECONDS = 120.0
"""How long ranks wait for each other at least until a first step was captured, and while others
are.
"""

_PART_BYTES = 8 << 20
_ROOT = 0


class Group:
    """All ranks call its methods in the same order. ``sizes``: the columns of the logits that each
    rank has; none where every rank has them all.
    """

    def __init__(
        self, exchange: Exchange, sizes: tuple[int, ...], *, peers: Peers | None = None
    ) -> None:
        self.exchange, self.sizes, self._peers = exchange, sizes, peers
        self.limit_s, self._patience = WARMUP_SECONDS, 0
        self.rank, self.count = exchange.rank, exchange.count
        self.first = sum(sizes[: self.rank])

    @property
    def leads(self) -> bool:
        """Whether this is the rank that draws and answers."""
        return self.rank == _ROOT

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """Let ranks wait longer for each other while kernels are compiled and captured."""
        self._patience += 1
        self.exchange.set_limit(max(self.limit_s, WARMUP_SECONDS))
        try:
            yield
        finally:
            self._patience -= 1
            if not self._patience:
                self.exchange.set_limit(self.limit_s)

    def check(self) -> None:
        """Raise what a kernel of this rank reported.

        Raises:
            ExchangeError: naming the rank that it waited for in vain.
        """
        failure = self.exchange.failure()
        if failure is not None:
            raise ExchangeError(f"did not answer exchange {failure.index}", failure.peer)

    def take_likeliest(
        self,
        tokens: Tensor,
        why: Tensor,
        logits: Tensor,
        *,
        width: int,
        end_tokens: Tensor,
        scratch: Tensor,
        positions: Tensor | None,
    ) -> None:
        """:func:`.kernels.choose.choose` from the first ``width`` columns of all ranks' ``logits``,
        of which ``[B, V]`` are this one's.
        """
        if not self.sizes:
            logits = logits[:, :width]
            choose(tokens, why, logits, end_tokens=end_tokens, scratch=scratch, positions=positions)
        else:
            own = max(0, min(width - self.first, logits.shape[1]))
            keys = best_keys(scratch, logits[:, :own])
            self.exchange.choose_best(
                tokens, why, keys, end_tokens=end_tokens, first_column=self.first,
                positions=positions,
            )  # fmt: skip
        self.exchange.end_step()

    def whole(self, logits: Tensor) -> Tensor:
        """On rank 0 the logits ``[R, sum of sizes]`` of all ranks' columns; on the others what lies
        in their place.
        """
        if not self.sizes:
            return logits
        num_rows, widest = len(logits), -(-max(self.sizes) // 4) * 4
        padded = logits
        if logits.shape[1] < widest or not logits.is_contiguous():
            padded = logits.new_zeros(num_rows, widest)
            padded[:, : logits.shape[1]] = logits
        most = max(1, self.exchange.part_bytes // (4 * widest))
        parts = []
        for first in range(0, num_rows, most):
            rows = padded[first : first + most]
            found = rows.new_empty(self.count, *rows.shape)
            self.exchange.deliver(found, rows, senders=-1, receivers=1 << _ROOT)
            each = [found[rank, :, :size] for rank, size in enumerate(self.sizes)]
            parts.append(torch.cat(each, 1))
        self.exchange.end_step()
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def share(self, tokens: Tensor, why: Tensor | None = None) -> None:
        """Rank 0's ``tokens [R]`` (int64), and ``why [R]`` (uint8), become those of all ranks."""
        words = torch.zeros(len(tokens), 4, dtype=torch.int32, device=tokens.device)
        words[:, 0] = tokens
        if why is not None:
            words[:, 1] = why
        found = words.new_empty(self.count, *words.shape)
        self.exchange.deliver(found, words, senders=1 << _ROOT, receivers=-1)
        self.exchange.end_step()
        if not self.leads:
            tokens.copy_(found[_ROOT, :, 0])
            if why is not None:
                why.copy_(found[_ROOT, :, 1])

    def close(self) -> None:
        """Free what peers write to; no rank may begin another step."""
        if self._peers is not None:
            self._peers.close()


def alone(rank: int, count: int, sizes: tuple[int, ...], device: torch.device) -> Group:
    """A rank whose own values stand in for those of all others: every kernel runs at its real
    shape, and only the way between GPUs is missing. What it computes means nothing.
    """
    words = SLOTS * count * _PART_BYTES // 4
    memory = torch.full((words,), EMPTY - 2**32, dtype=torch.int32, device=device)
    own = memory.data_ptr()
    # what is meant for a rank lands where that rank's own part is awaited
    addresses = [own + (each - rank) * _PART_BYTES for each in range(count)]
    exchange = Exchange(addresses, rank, part_bytes=_PART_BYTES, device=device, kept=memory)
    return Group(exchange, sizes)


def meet(met: Met, sizes: tuple[int, ...], device: torch.device) -> Group:
    """Let this rank's GPU and those of the others reach each other; all ranks call it.

    Raises:
        CompileError: where one does not reach another.
    """
    from tilewright.compiler.targets.cuda.peers import Peers, check_access

    number = torch.cuda.current_device() if device.index is None else device.index
    check_access([int(each) for each in met.all_gather(str(number).encode())])
    num_bytes = SLOTS * met.size * _PART_BYTES
    peers = Peers(met.rank, num_bytes, device, met.all_gather, fill=EMPTY)
    exchange = Exchange(peers.addresses, met.rank, part_bytes=_PART_BYTES, device=device)
    group = Group(exchange, sizes, peers=peers)
    group.limit_s = met.limit_s
    exchange.set_limit(max(met.limit_s, WARMUP_SECONDS))
    return group
