"""A rank's program on the native library. Collectives inside a step use sockets.

Only rank 0 has logits. For greedy sampling, each rank sends only the argmax over its own tokens.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.compiler.targets.cpu.native.executable import NativeExecutable
from tilewright.compiler.targets.cpu.native.library import binding as lib
from tilewright.compiler.targets.cpu.native.program.bundle import MAX_TOKENS, Packed
from tilewright.compiler.targets.cpu.native.program.mapping import Mapped
from tilewright.compiler.targets.host.batch import Batch
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.step import OpenSlot, Slot, Step, StepOutput
from tilewright.distributed.channel import has_gone
from tilewright.distributed.peers import SetupCollectives
from tilewright.errors import ExchangeError

_NEVER = (1 << 63) - 1
_LEAST_LOOKS, _MOST_LOOKS = 4, 64
"""Number of socket polls (system calls) before a thread sleeps."""

_TRIALS, _TRIAL_ROWS = 9, 64
_WORTH = 1.25
"""Allowed time ratio for two hops, which halve the bytes: a link may be busier than now."""


class NativeRank(NativeExecutable):
    """A rank's engine."""

    def __init__(
        self,
        packed: Packed,
        mapped: Mapped,
        options: CompileOptions,
        contract: NumericContract,
        **named: Any,
    ) -> None:
        super().__init__(packed, mapped, options, contract, **named)
        self._num_threads = options.num_threads or 1
        self._reductions = packed.reductions
        self._widths = packed.logit_columns
        self._sockets: Mapping[int, socket.socket] = {}
        self._limit_s = 0.0
        self._wants_rows = True
        self._best: list[np.ndarray] = []
        self._likeliest = np.empty((0, 0), np.float32)

    def join(self, peers: SetupCollectives) -> None:
        self._sockets, self._limit_s = peers.connect(), peers.limit_s
        for each in self._sockets.values():
            each.setblocking(False)
        numbers = [self._sockets[r].fileno() if r != peers.rank else -1 for r in range(peers.size)]
        num_threads = sum(struct.unpack("<q", each)[0] for each in self._shared(peers))
        has_cores = num_threads <= len(os.sched_getaffinity(0))
        looks = _MOST_LOOKS if has_cores else _LEAST_LOOKS
        given = lib.TwPeers(
            rank=peers.rank,
            count=peers.size,
            limit_ms=max(1, int(1000 * self._limit_s)),
            looks=_LEAST_LOOKS,
            most_looks=looks,
            sockets=(ctypes.c_int32 * peers.size)(*numbers),
            logit_widths=(ctypes.c_int32 * peers.size)(*self._widths),
            two_hops_from=_NEVER,
        )
        refused = self._library.tw_join(self._opened(), ctypes.byref(given))
        assert not refused, "the ranks do not fit the program"
        hops = self._choose_hops(peers)
        wire = self._reductions[0][1] if self._reductions else "fp32"
        self.device_detail = f"{self.device_detail}, {peers.size} ranks, {wire} in {hops}"

    def step_for_followers(self, step: Step) -> Step:
        return replace(super().step_for_followers(step), want_logits=self._needs_rows(step))

    def step(self, step: Step) -> StepOutput:
        self._wants_rows = step.want_logits if self.follows else self._needs_rows(step)
        return super().step(step)

    def forward(self, batch: Batch) -> np.ndarray:
        self._best.clear()
        logits = super().forward(batch)
        if self.follows or self._wants_rows or not len(logits):
            return logits
        return self._rows_of(np.concatenate(self._best))

    def exchanged(self) -> lib.TwExchanged:
        """Return the collective count, the bytes sent by this rank, and the nanoseconds
        spent.
        """
        found = lib.TwExchanged()
        self._library.tw_exchanged(self._opened(), ctypes.byref(found))
        return found

    def all_reduce(self, values: np.ndarray, wire: str) -> None:
        """Sum the float32 ``[rows, width]`` over all ranks, in place, as in a step.

        Raises:
            ExchangeError: A rank disconnected or did not answer in time.
        """
        rows, width = values.shape
        number = lib.WIRES.index(wire)
        self._check(
            self._library.tw_all_reduce(self._opened(), values.ctypes.data, rows, width, number)
        )

    def set_hops(self, two_hops_from: int) -> None:
        """Set the size in bytes from which sums use two hops. All ranks need equal values."""
        self._library.tw_set_hops(self._opened(), two_hops_from)

    def close(self) -> None:
        super().close()
        for each in self._sockets.values():
            each.close()

    def _complete(self, step: lib.TwStep) -> None:
        step.num_choosable = self.num_choosable
        if not (self._wants_rows or self._is_hidden):
            self._best.append(np.zeros(step.num_rows, dtype=[("value", "f4"), ("token", "i4")]))
            step.best = self._best[-1].ctypes.data if step.num_rows else None

    def _check(self, failed: int) -> None:
        if failed == 2:
            found = self.exchanged()
            if has_gone(self._sockets[found.failed]):
                raise ExchangeError(f"left before exchange {found.number}", found.failed)
            said, after = f"did not answer exchange {found.number}", f"within {self._limit_s:g} s"
            raise ExchangeError(said, found.failed, after)
        super()._check(failed)

    def _needs_rows(self, step: Step) -> bool:
        """Return whether rank 0 needs more of a row than its argmax."""
        if not self._widths:  # a small vocabulary is whole on every rank
            return True
        if step.want_logits or step.masked or step.logprobs is not None:
            return True
        if any(chunk.echoes for chunk in step.prompts):
            return True
        opened = {each.slot: each.sampling for each in step.edits if isinstance(each, OpenSlot)}
        ends = [slot for chunk in step.prompts for slot in (chunk.slot, *chunk.also)]
        return any(not self._is_plain(slot, opened) for slot in (*step.decode, *ends))

    def _is_plain(self, slot: Slot, opened: Mapping[Slot, SamplingParams]) -> bool:
        sampling = opened[slot] if slot in opened else self._slot_states[slot].sampling
        return sampling.is_greedy and not sampling.changes_logits

    def _rows_of(self, best: np.ndarray) -> np.ndarray:
        """Return rows with the argmax token's logit and minus infinity for all other tokens."""
        if len(self._likeliest) < len(best):
            self._likeliest = np.empty((len(best), self.vocab_size), np.float32)
        rows = self._likeliest[: len(best)]
        rows.fill(-np.inf)
        rows[np.arange(len(best)), best["token"]] = best["value"]
        return rows

    def _shared(self, peers: SetupCollectives) -> list[bytes]:
        """Return the thread counts of all ranks on this machine, identified by host name."""
        own = socket.gethostname().encode()
        found = peers.all_gather(struct.pack("<q", self._num_threads) + own)
        return [each[:8] for each in found if each[8:] == own]

    def _choose_hops(self, peers: SetupCollectives) -> str:
        """Measure sums with one hop and with two. Rank 0's times decide. Return a description."""
        if peers.size == 2 or not self._reductions:
            return "one hop"
        width, wire = self._reductions[0]
        found = []
        for rows in (1, min(_TRIAL_ROWS, MAX_TOKENS)):
            times = [self._trial(rows, width, wire, hops) for hops in (_NEVER, 0)]
            found.append(times[1] < _WORTH * times[0])
        decode, prefill = struct.unpack("<2?", peers.all_gather(struct.pack("<2?", *found))[0])
        from_bytes = 0 if decode else width * 4 + 1 if prefill else _NEVER
        self.set_hops(from_bytes)
        return "two hops" if decode else "one hop, prompts in two" if prefill else "one hop"

    def _trial(self, rows: int, width: int, wire: str, two_hops_from: int) -> float:
        self.set_hops(two_hops_from)
        values, times = np.zeros((rows, width), np.float32), []
        for _ in range(_TRIALS):
            began = time.perf_counter()
            self.all_reduce(values, wire)
            times.append(time.perf_counter() - began)
        return min(times)  # other processes on the machines can only lengthen times
