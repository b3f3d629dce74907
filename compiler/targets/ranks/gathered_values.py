"""Collectives between processes: every rank gathers all values and runs the reference itself.

They serve targets with node-by-node execution. Ranks in a common process use the same functions in
`ops.collectives`. Therefore both have equal bits.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.compiler.ops.collectives import GROUPS
from tilewright.distributed.peers import SetupCollectives
from tilewright.errors import ExchangeError

_TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_PIECE = 1 << 18
_LENGTH = struct.Struct("<q")


class SocketAllGather:
    """All-gather over sockets to all ranks. Calls are numbered from 1."""

    def __init__(self, rank: int, sockets: Mapping[int, socket.socket], limit_s: float) -> None:
        self.rank, self._sockets, self._limit_s = rank, dict(sockets), limit_s
        self.number = 0
        for each in self._sockets.values():
            each.setblocking(False)

    @classmethod
    def of(cls, peers: SetupCollectives) -> SocketAllGather:
        """Connect to every other rank. All ranks must call this method."""
        return cls(peers.rank, peers.connect(), peers.limit_s)

    def all_gather(self, data: bytes) -> list[bytes]:
        """Return all ranks' data in rank order.

        Raises:
            ExchangeError: A rank disconnected or did not answer in time. The error has its number.
        """
        self.number += 1
        frame = _LENGTH.pack(len(data)) + data
        unsent = {rank: memoryview(frame) for rank in self._sockets}
        found = {rank: bytearray() for rank in self._sockets}
        deadline = time.monotonic() + self._limit_s
        missing = set(found)
        while missing or unsent:
            reads = [self._sockets[rank] for rank in missing]
            writes = [self._sockets[rank] for rank in unsent]
            left = deadline - time.monotonic()
            ready = select.select(reads, writes, [], max(0.0, left))
            if not (ready[0] or ready[1]) and left <= 0:
                after = f"within {self._limit_s:g} s"
                said = f"did not answer exchange {self.number}"
                raise ExchangeError(said, min(missing or unsent), after)
            for rank in [each for each in unsent if self._sockets[each] in ready[1]]:
                unsent[rank] = unsent[rank][self._send(rank, unsent[rank]) :]
                if not unsent[rank]:
                    del unsent[rank]
            for rank in [each for each in missing if self._sockets[each] in ready[0]]:
                if self._receive(rank, found[rank]):
                    missing.discard(rank)
        own = {self.rank: data, **{rank: bytes(part[8:]) for rank, part in found.items()}}
        return [own[rank] for rank in sorted(own)]

    def close(self) -> None:
        """Close all sockets."""
        for each in self._sockets.values():
            each.close()

    def _send(self, rank: int, data: memoryview) -> int:
        try:
            return self._sockets[rank].send(data[:_PIECE])
        except BlockingIOError:
            return 0
        except OSError:
            self._give_up(rank)
        return 0

    def _receive(self, rank: int, found: bytearray) -> bool:
        """Read available bytes, but none after this message. Return whether the message is
        complete.
        """
        total = _LENGTH.unpack_from(found)[0] + 8 if len(found) >= 8 else 8
        try:
            data = self._sockets[rank].recv(min(_PIECE, total - len(found)))
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        if not data:
            self._give_up(rank)
        found += data
        return len(found) >= 8 and len(found) == _LENGTH.unpack_from(found)[0] + 8

    def _give_up(self, rank: int) -> None:
        raise ExchangeError(f"left before exchange {self.number}", rank)


class RankInterpreter(fx.Interpreter):
    """Runs a rank's graph. Its collectives use an exchange with all ranks."""

    def __init__(self, graph_module: fx.GraphModule, exchange: SocketAllGather) -> None:
        super().__init__(graph_module)
        self._exchange = exchange

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in GROUPS:
            return super().call_function(target, args, kwargs)
        gathered = self._exchange.all_gather(_pack(args[0]))
        calls = [(_unpack(each), *args[1:]) for each in gathered]
        return GROUPS[target](calls)[self._exchange.rank]


def has_collectives(graph_module: fx.GraphModule) -> bool:
    """Return whether a graph has collectives."""
    return any(node.target in GROUPS for node in graph_module.graph.nodes)


def _pack(x: Tensor) -> bytes:
    shape = struct.pack(f"<{2 + x.dim()}q", _TYPES.index(x.dtype), x.dim(), *x.shape)
    return shape + x.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def _unpack(data: bytes) -> Tensor:
    kind, dim = struct.unpack_from("<2q", data)
    shape = struct.unpack_from(f"<{dim}q", data, 16)
    if not math.prod(shape):
        return torch.empty(shape, dtype=_TYPES[kind])
    values = torch.frombuffer(bytearray(data[16 + 8 * dim :]), dtype=_TYPES[kind])
    return values.view(shape)
