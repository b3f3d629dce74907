"""Base class of cache managers: slots, prefix matches and snapshots."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tilewright.compiler.targets.interface.base import Capabilities
from tilewright.compiler.targets.interface.step import (
    CloseSlot,
    LoadState,
    OpenSlot,
    Slot,
    StateSnapshot,
    StateUpdate,
    SwapHandle,
    SwapIn,
    SwapOut,
)
from tilewright.runtime.memory.pages import chain_keys
from tilewright.runtime.memory.snapshots import GRAIN, SnapshotPool, places_worth, spacing
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig

StateBytes = Callable[[int, int], int]
"""Returns the bytes for a number of positions in a number of sequences."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """The first ``length`` positions of a prompt, which are already computed.

    Attributes:
        length: position count.
        pages: their cached pages.
        slot: a cached or running slot with these positions.
        snapshot: per-sequence state after them. None: the model has no such state, or the slot is
            continued.
        branch_point: computed positions that are useless without a snapshot. 0: none.
        reached: largest length of the slot's state, see `Capabilities.can_cut`.
    """

    length: int = 0
    pages: tuple[int, ...] = ()
    slot: Slot | None = None
    snapshot: StateSnapshot | None = None
    branch_point: int = 0
    reached: int = 0


NOTHING = PrefixMatch()


class CacheManager(ABC):
    """Assigns slots and cache to requests, and collects state updates for the executable.

    Attributes:
        running: requests with a slot, in the order of admission.
        by_slot: the same requests, sorted by slot.
        num_present: number of running and waiting requests at the last admission.
    """

    def __init__(
        self, capabilities: Capabilities, policy: SchedulerConfig, state_bytes: StateBytes
    ) -> None:
        self.capabilities, self.policy = capabilities, policy
        self.running: dict[RequestState, None] = {}
        self.by_slot: list[RequestState] = []
        self.num_present = 0
        self.edits: list[StateUpdate] = []
        self.snapshots = SnapshotPool(capabilities.num_snapshots if policy.reuses else 0)
        self.grain = capabilities.page_size or min(GRAIN, capabilities.cell)
        self._has_state = capabilities.has_sequence_state
        self._state_bytes = state_bytes
        self._free = list(range(capabilities.max_num_seqs))

    def name(self, request: RequestState) -> None:
        """Compute the keys of a prompt's pages, if they are useful."""
        if self.policy.reuses and not request.is_private and self._wants_keys:
            request.page_keys = tuple(
                chain_keys(request.cache_tokens, self.grain, request.cache_salt)
            )

    @property
    def _wants_keys(self) -> bool:
        return self.snapshots.size > 0

    @property
    def has_slot(self) -> bool:
        """Return whether a slot is free."""
        return bool(self._free)

    @abstractmethod
    def find(self, request: RequestState) -> PrefixMatch:
        """Find the computed prefix of a request's prompt."""

    @abstractmethod
    def shared_with(self, request: RequestState, other: RequestState) -> int:
        """Return a prompt's common positions with a running request."""

    @abstractmethod
    def fits(self, request: RequestState, match: PrefixMatch) -> bool:
        """Return whether the cache has capacity for a request. A slot is free."""

    @abstractmethod
    def admit(self, request: RequestState, match: PrefixMatch) -> None:
        """Give a slot to a request, which must fit."""

    @abstractmethod
    def follow(self, leader: RequestState, request: RequestState) -> bool:
        """Admit another choice with the prompt of ``leader``, which ends in the next step.

        The leader's state is copied. Return False without capacity.
        """

    @abstractmethod
    def grow(self, running: RequestState) -> bool:
        """Add capacity for another position of a request. Return False without capacity."""

    def reserve(self, running: RequestState, count: int) -> int:
        """Add pages for the next ``count`` positions, without preemption.

        Return the number of these positions with a page.
        """
        return count

    def grow_soon(self, decoding: Iterable[RequestState]) -> None:  # noqa: B027 (slots may stay)
        """Add the next pages of sequences that need them soon, so that fewer steps have updates.

        A page stays available for every request that may need it.
        """

    @abstractmethod
    def leave(self, running: RequestState, *, may_keep: bool) -> None:
        """Free a slot. ``may_keep``: its state may be cached for later prompts."""

    @abstractmethod
    def note(self, running: RequestState) -> None:
        """Note a scheduled step that computes a prompt up to ``running.num_computed``."""

    def can_return(self, running: RequestState) -> bool:
        """Return whether a swapped request fits."""
        raise AssertionError(f"{running}: slots without pages are not given up")

    def put_out(self, running: RequestState, place: SwapHandle) -> None:
        """Swap a slot's state to host memory, and free the slot."""
        self.edits.append(SwapOut(running.slot, place))
        self.leave(running, may_keep=False)

    def take_back(self, running: RequestState, place: SwapHandle) -> None:
        """Swap a request in. It must fit."""
        running.slot = self._take_slot()
        self._open(running.slot, running)
        self._deal(running)
        self.edits.append(SwapIn(running.slot, place))
        self._take_in(running)

    def _deal(self, running: RequestState) -> None:  # noqa: B027 (slots may stay)
        """Add pages for a swapped request, if the cache has pages."""

    def waits_for(
        self, request: RequestState, match: PrefixMatch, pending: Iterable[RequestState]
    ) -> bool:
        """Return whether a request should wait for a prompt that is being computed.

        It waits if this saves a chunk. It never waits for a lower priority request.
        """
        if not self.policy.reuses or request.is_private:
            return False
        for other in pending:
            if other.is_private or other.cache_salt != request.cache_salt:
                continue
            if other.priority > request.priority:
                continue
            shared = self.shared_with(request, other)
            if shared > other.num_computed and shared - match.length >= self.capabilities.cell:
                if self._has_state:
                    other.saves.add(shared)
                    other.branch_points.add(shared)
                return True
        return False

    def saves(
        self, running: RequestState, start: int, end: int
    ) -> tuple[tuple[int, StateSnapshot], ...]:
        """Return the snapshots to take between ``start`` and ``end`` of a prompt."""
        if not running.saves:
            return ()
        passed = sorted(at for at in running.saves if start < at <= end)
        running.saves.difference_update(passed)
        positions, keys = [], []
        for at in passed:
            key = running.page_keys[at // self.grain - 1]
            snapshot = self.snapshots.take(key)
            if snapshot is not None:
                positions.append((at, snapshot))
                keys.append(key)
            if key not in self.snapshots:
                continue
            if at in running.branch_points:
                self.snapshots.use(key, 2)
            if not running.saves and at == passed[-1]:
                self._go_on(running, key)
            elif at % spacing(self.grain) == 0:
                self.snapshots.supersede(key)
        self.snapshots.fill(keys)
        return tuple(positions)

    def _go_on(self, running: RequestState, key: bytes) -> None:
        """Replace a sequence's latest snapshot by a later snapshot."""
        if running.latest is not None and running.latest != key:
            self.snapshots.supersede(running.latest)
        running.latest = key

    def take_edits(self) -> tuple[StateUpdate, ...]:
        """Return and clear the scheduled step's state updates."""
        edits = tuple(self.edits)
        self.edits.clear()
        if self.snapshots.size:
            self.snapshots.end_step()
        return edits

    def forget(self) -> None:
        """Clear the state after a reset of the executable. No request has a slot."""
        assert not self.running
        self.snapshots.forget()
        self.edits.clear()

    def size_of(self, num_positions: int) -> int:
        """Return the state bytes for a sequence with ``num_positions`` positions."""
        return self._state_bytes(num_positions, 1)

    def _open(self, slot: Slot, request: RequestState, keeps: int = 0) -> None:
        sampling = request.sampling
        wants_prompt = sampling.is_penalised or sampling.min_tokens
        prompt = request.prompt if wants_prompt else ()
        self.edits.append(OpenSlot(slot, sampling, prompt, keeps, request.rotary_delta))

    def _load(self, running: RequestState, match: PrefixMatch) -> None:
        """Load the matched snapshot, if any, into a slot."""
        if match.snapshot is not None:
            self.edits.append(LoadState(running.slot, match.snapshot))
            running.latest = running.page_keys[match.length // self.grain - 1]
            self.snapshots.use(running.latest)

    def _begin(self, request: RequestState, slot: Slot, match: PrefixMatch) -> None:
        request.take_slot(slot, num_cached=match.length, max_num_computed=match.reached)
        request.page_capacity = self.capabilities.max_context
        if self._has_state and request.page_keys and self.snapshots.size:
            known, branch_point = match.length, match.branch_point
            ends = request.sampling.stop_token_ids
            request.saves = places_worth(
                request.prompt, self.grain, ends, known=known, branch_point=branch_point
            )
            request.branch_points = {branch_point}
        self._take_in(request)

    def _begin_copy(self, leader: RequestState, request: RequestState, slot: Slot) -> None:
        """Start another choice with the leader's prompt, which ends in the next step."""
        length = len(request.prompt)
        reached = max(leader.max_num_computed, length)
        self._begin(request, slot, PrefixMatch(length, reached=reached))
        request.saves.clear()
        request.num_scheduled = 1

    def _take_in(self, running: RequestState) -> None:
        self.running[running] = None
        insort(self.by_slot, running, key=lambda each: each.slot)

    def _take_out(self, running: RequestState) -> None:
        del self.running[running]
        self.by_slot.remove(running)

    def _take_slot(self) -> Slot:
        return Slot(heapq.heappop(self._free))

    def _give_slot(self, slot: Slot) -> None:
        self.edits.append(CloseSlot(slot))
        heapq.heappush(self._free, slot)


def common_keys(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """Return the common first key count. A key covers its whole prefix."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
