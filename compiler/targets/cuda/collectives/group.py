"""A group of ranks: collective backend, timeouts, and token selection from sharded logits.

Only rank 0 samples and returns results. All ranks find the likeliest token together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.collectives.all_reduce import EMPTY, SLOTS, PeerAllReduce
from tilewright.compiler.targets.cuda.kernels.sampling.argmax import best_keys, choose
from tilewright.distributed.group import LOADING_SECONDS
from tilewright.distributed.parallel import MOST_GPUS, NCCL, PEERS
from tilewright.errors import ExchangeError

if TYPE_CHECKING:
    from tilewright.distributed.peers import SetupCollectives as Met

WARMUP_SECONDS = 120.0
"""Minimum timeout in seconds until a first step is captured, and during captures on peers."""

_NOTE = (
    "ranks exchange through NCCL ({}): a sum takes some 16 us, not 2.3 (two H200s), and a rank "
    "that lives but takes no part is missed after {:g} s"
)
_PART_BYTES = 8 << 20
_ROOT = 0


class CollectiveBackend(Protocol):
    """A collective backend."""

    def close(self) -> None:
        """Free the backend. No rank may start another step."""


class RankGroup:
    """A rank's view of its group. All ranks must call its methods in the same order.

    Attributes:
        sizes: Logit columns of each rank. Empty: every rank has all columns.
        notes: Messages for the user.
    """

    def __init__(
        self,
        exchange: PeerAllReduce,
        sizes: tuple[int, ...],
        *,
        way: CollectiveBackend | None = None,
        notes: tuple[str, ...] = (),
    ) -> None:
        self.exchange, self.sizes, self.notes, self._way = exchange, sizes, notes, way
        self.limit_s, self._patience = WARMUP_SECONDS, 0
        self.rank, self.count = exchange.rank, exchange.count
        self.first = sum(sizes[: self.rank])

    @property
    def leads(self) -> bool:
        """Whether this is the rank that samples and returns results."""
        return self.rank == _ROOT

    @contextlib.contextmanager
    def patiently(self) -> Iterator[None]:
        """Extend the timeout during compilation and capture of kernels."""
        self._patience += 1
        self.exchange.set_limit(max(self.limit_s, WARMUP_SECONDS))
        try:
            yield
        finally:
            self._patience -= 1
            if not self._patience:
                self.exchange.set_limit(self.limit_s)

    def check(self) -> None:
        """Raise an error if a kernel of this rank reported a timeout.

        Raises:
            ExchangeError: Names the missing rank.
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
        """Select the likeliest tokens from the first ``width`` logits of all ranks.

        See :func:`.argmax.choose`. ``logits [B, V]`` has this rank's columns.
        """
        if not self.sizes:
            logits = logits[:, :width]
            choose(tokens, why, logits, end_tokens=end_tokens, scratch=scratch, positions=positions)
        else:
            own = max(0, min(width - self.first, logits.shape[1]))
            keys = best_keys(scratch, logits[:, :own])
            self.exchange.choose_best(
                tokens,
                why,
                keys,
                end_tokens=end_tokens,
                first_column=self.first,
                positions=positions,
            )
        self.exchange.end_step()

    def whole(self, logits: Tensor) -> Tensor:
        """Gather the logits ``[R, sum of sizes]`` on rank 0. The result is undefined on
        followers.
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
        """Broadcast ``tokens [R]`` (int64) and ``why [R]`` (uint8) from rank 0."""
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
        """Free the backend. No rank may start another step, and no graph may use it."""
        if self._way is not None:
            self._way.close()


def alone(rank: int, count: int, sizes: tuple[int, ...], device: torch.device) -> RankGroup:
    """Return a group in which this rank's own values replace those of all peers.

    Every kernel runs at its real shape, without GPU links. Results are meaningless.
    """
    words = SLOTS * count * _PART_BYTES // 4
    memory = torch.full((words,), EMPTY - 2**32, dtype=torch.int32, device=device)
    own = memory.data_ptr()
    # The address for a peer is the place of this rank's own awaited message.
    addresses = [own + (each - rank) * _PART_BYTES for each in range(count)]
    exchange = PeerAllReduce(addresses, rank, part_bytes=_PART_BYTES, device=device, kept=memory)
    return RankGroup(exchange, sizes)


def meet(
    met: Met,
    sizes: tuple[int, ...],
    device: torch.device,
    *,
    requested: str | None = None,
    why_no_peers: str = "",
) -> RankGroup:
    """Connect this rank's GPU to those of its peers. All ranks must call it.

    Args:
        requested: An entry of `EXCHANGES`. None: peer memory if GPUs can access it, else NCCL.
        why_no_peers: Reason against CUDA C++ kernels, which peer memory needs. Empty: they run.

    Raises:
        CompileError: The ranks cannot communicate by the selected method.
    """
    from tilewright.compiler.targets.cuda.collectives.peer_memory import UnreachedError

    why = f"--collective-backend {NCCL}"
    if requested is None and met.size > MOST_GPUS:
        why = f"{met.size} ranks are more than {MOST_GPUS}"
    elif requested != NCCL:
        try:
            group = _through_memory(met, sizes, device, why_no_peers)
        except UnreachedError as error:
            if requested == PEERS:
                raise
            why = str(error)
        else:
            return _limited(group, met)
    return _limited(_through_nccl(met, sizes, device, why), met)


def _through_memory(
    met: Met, sizes: tuple[int, ...], device: torch.device, why_no_peers: str
) -> RankGroup:
    from tilewright.compiler.targets.cuda.collectives.peer_memory import PeerMemory, check_reached

    check_reached(device, met.all_gather, why_no_peers and f"all_reduce.cu: {why_no_peers}")
    num_bytes = SLOTS * met.size * _PART_BYTES
    peers = PeerMemory(met.rank, num_bytes, device, met.all_gather, fill=EMPTY)
    exchange = PeerAllReduce(peers.addresses, met.rank, part_bytes=_PART_BYTES, device=device)
    met.abort_with(exchange.stop, has_limit=True)
    return RankGroup(exchange, sizes, way=peers)


def _through_nccl(met: Met, sizes: tuple[int, ...], device: torch.device, why: str) -> RankGroup:
    from tilewright.compiler.targets.cuda.collectives.gathered import GatheredExchange
    from tilewright.compiler.targets.cuda.collectives.nccl import Nccl

    library = Nccl(met.rank, device, met.all_gather, check=met.check)
    met.abort_with(library.abort)
    library.warm_up()
    exchange = GatheredExchange(library, part_bytes=_PART_BYTES, device=device)
    return RankGroup(exchange, sizes, way=library, notes=(_NOTE.format(why, LOADING_SECONDS),))


def _limited(group: RankGroup, met: Met) -> RankGroup:
    group.limit_s = met.limit_s
    group.exchange.set_limit(max(met.limit_s, WARMUP_SECONDS))
    return group
