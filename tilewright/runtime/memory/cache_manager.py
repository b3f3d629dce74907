"""Seats, and what of a prompt somebody has computed before: what all executables share of it."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tilewright.compiler.targets.interface.base import Capabilities
from tilewright.compiler.targets.interface.step import (
    Back,
    Close,
    Edit,
    HostPlace,
    Load,
    Open,
    Out,
    Seat,
    Snapshot,
)
from tilewright.runtime.memory.pages import chain_keys
from tilewright.runtime.memory.snapshots import GRAIN, Snapshots, places_worth, spacing
from tilewright.runtime.scheduling.request_state import Policy, RequestState

StateBytes = Callable[[int, int], int]
"""Bytes that so many positions of so many sequences take."""


@dataclass(frozen=True, slots=True)
class Found:
    """What of a prompt need not be computed: its first ``length`` positions.

    Attributes:
        pages: cached pages that hold them. seat: one, kept or running, that holds them.
        snapshot: the per-sequence state behind them; None where there is no such state, or where
            the seat is continued as it is.
        junction: positions that are there but of no use, for want of the state behind them; 0
            where there are none.
        reached: the most positions that the seat's state has had; see `Capabilities.can_cut`.
    """

    length: int = 0
    pages: tuple[int, ...] = ()
    seat: Seat | None = None
    snapshot: Snapshot | None = None
    junction: int = 0
    reached: int = 0


NOTHING = Found()


class Seating(ABC):
    """Deals seats, and what they hold, to requests; collects the edits that tell the executable.

    ``seated``: who has a seat, in the order of admission; ``by_seat``: the same, by seat.
    ``num_present``: running and waiting requests at the last admission.
    """

    def __init__(self, capabilities: Capabilities, policy: Policy, state_bytes: StateBytes) -> None:
        self.capabilities, self.policy = capabilities, policy
        self.seated: dict[RequestState, None] = {}
        self.by_seat: list[RequestState] = []
        self.num_present = 0
        self.edits: list[Edit] = []
        self.snapshots = Snapshots(capabilities.num_snapshots if policy.reuses else 0)
        self.grain = capabilities.page_size or min(GRAIN, capabilities.cell)
        self._has_state = capabilities.has_sequence_state
        self._state_bytes = state_bytes
        self._free = list(range(capabilities.max_seats))

    def name(self, request: RequestState) -> None:
        """Make the names of a prompt's pages, where they are of use to anybody."""
        if self.policy.reuses and not request.is_private and self._wants_keys:
            request.page_keys = tuple(chain_keys(request.prompt, self.grain, request.cache_salt))

    @property
    def _wants_keys(self) -> bool:
        return not self.snapshots.is_empty

    @property
    def has_seat(self) -> bool:
        """Whether anybody could sit down now, as far as seats go."""
        return bool(self._free)

    @abstractmethod
    def find(self, request: RequestState) -> Found:
        """Find how much of a request's prompt was computed already and can be shared."""

    @abstractmethod
    def shared_with(self, request: RequestState, other: RequestState) -> int:
        """Positions of a prompt that could be shared, once a running one has computed them."""

    @abstractmethod
    def fits(self, request: RequestState, found: Found) -> bool:
        """Whether there is room for a request to begin; there is a seat."""

    @abstractmethod
    def sit(self, request: RequestState, found: Found) -> None:
        """Give a seat to a request, which must fit."""

    @abstractmethod
    def follow(self, leader: RequestState, request: RequestState) -> bool:
        """Another choice for the prompt that ``leader`` ends with the next step gets a seat, into
        which the leader's state is copied; False where there is no room.
        """

    @abstractmethod
    def grow(self, running: RequestState) -> bool:
        """Make room for one more position of a request; False where there is none."""

    @abstractmethod
    def leave(self, running: RequestState, *, may_keep: bool) -> None:
        """Free a seat for others; ``may_keep``: what it holds may be of use to them."""

    @abstractmethod
    def note(self, running: RequestState) -> None:
        """Note that a step was planned that computes up to ``running.num_computed`` of a prompt."""

    def can_return(self, running: RequestState) -> bool:
        """Whether there is room for one whose state is in host memory."""
        raise AssertionError(f"{running}: seats without pages are not given up")

    def put_out(self, running: RequestState, place: HostPlace) -> None:
        """The state of a seat goes to host memory, and the seat to others."""
        self.edits.append(Out(running.seat, place))
        self.leave(running, may_keep=False)

    def take_back(self, running: RequestState, place: HostPlace) -> None:
        """One for whom there is room gets a seat and its state again."""
        running.seat = self._take_seat()
        self._open(running.seat, running)
        self._deal(running)
        self.edits.append(Back(running.seat, place))
        self._take_in(running)

    def _deal(self, running: RequestState) -> None:  # noqa: B027 (seats may stay)
        """Pages for what a running request holds, where there are pages."""

    def waits_for(
        self, request: RequestState, found: Found, pending: Iterable[RequestState]
    ) -> bool:
        """Whether a request should wait for prompts that are being computed, because that saves
        it a piece of its own; never for those of a worse priority.
        """
        if not self.policy.reuses or request.is_private:
            return False
        for other in pending:
            if other.is_private or other.cache_salt != request.cache_salt:
                continue
            if other.priority > request.priority:
                continue
            shared = self.shared_with(request, other)
            if shared > other.num_computed and shared - found.length >= self.capabilities.cell:
                if self._has_state:
                    other.saves.add(shared)
                    other.partings.add(shared)
                return True
        return False

    def saves(
        self, running: RequestState, start: int, end: int
    ) -> tuple[tuple[int, Snapshot], ...]:
        """The snapshots to be taken while the positions from ``start`` to ``end`` of a prompt are
        computed.
        """
        if not running.saves:
            return ()
        passed = sorted(at for at in running.saves if start < at <= end)
        running.saves.difference_update(passed)
        found, keys = [], []
        for at in passed:
            key = running.page_keys[at // self.grain - 1]
            snapshot = self.snapshots.take(key)
            if snapshot is not None:
                found.append((at, snapshot))
                keys.append(key)
            if key not in self.snapshots:
                continue
            if at in running.partings:
                self.snapshots.use(key, 2)
            if not running.saves and at == passed[-1]:
                self._go_on(running, key)
            elif at % spacing(self.grain) == 0:
                self.snapshots.supersede(key)
        self.snapshots.fill(keys)
        return tuple(found)

    def _go_on(self, running: RequestState, key: bytes) -> None:
        """A sequence has a snapshot further on than its latest."""
        if running.latest is not None and running.latest != key:
            self.snapshots.supersede(running.latest)
        running.latest = key

    def take_edits(self) -> tuple[Edit, ...]:
        """The edits of the step that is planned now, which has all its pieces of prompts."""
        edits = tuple(self.edits)
        self.edits.clear()
        self.snapshots.end_step()
        return edits

    def forget(self) -> None:
        """The executable holds nothing any more, and nobody has a seat."""
        assert not self.seated
        self.snapshots.forget()
        self.edits.clear()

    def size_of(self, num_positions: int) -> int:
        """The bytes of state that one sequence takes."""
        return self._state_bytes(num_positions, 1)

    def _open(self, seat: Seat, request: RequestState, keeps: int = 0) -> None:
        sampling = request.sampling
        wants_prompt = sampling.is_penalised or sampling.min_tokens
        self.edits.append(Open(seat, sampling, request.prompt if wants_prompt else (), keeps))

    def _load(self, running: RequestState, found: Found) -> None:
        """The state of what was found into a seat, where it is a snapshot's."""
        if found.snapshot is not None:
            self.edits.append(Load(running.seat, found.snapshot))
            running.latest = running.page_keys[found.length // self.grain - 1]
            self.snapshots.use(running.latest)

    def _begin(self, request: RequestState, seat: Seat, found: Found) -> None:
        request.take_slot(seat, num_cached=found.length, max_num_computed=found.reached)
        request.page_capacity = self.capabilities.max_context
        if self._has_state and request.page_keys and not self.snapshots.is_empty:
            known, junction = found.length, found.junction
            ends = request.sampling.stop_token_ids
            request.saves = places_worth(
                request.prompt, self.grain, ends, known=known, junction=junction
            )
            request.partings = {junction}
        self._take_in(request)

    def _begin_copy(self, leader: RequestState, request: RequestState, seat: Seat) -> None:
        """Another choice: its prompt is the leader's, whose last piece is in the next step."""
        length = len(request.prompt)
        reached = max(leader.max_num_computed, length)
        self._begin(request, seat, Found(length, reached=reached))
        request.saves.clear()
        request.num_scheduled = 1

    def _take_in(self, running: RequestState) -> None:
        self.seated[running] = None
        insort(self.by_seat, running, key=lambda each: each.seat)

    def _take_out(self, running: RequestState) -> None:
        del self.seated[running]
        self.by_seat.remove(running)

    def _take_seat(self) -> Seat:
        return Seat(heapq.heappop(self._free))

    def _give_seat(self, seat: Seat) -> None:
        self.edits.append(Close(seat))
        heapq.heappush(self._free, seat)


def common_keys(one: Sequence[bytes], other: Sequence[bytes]) -> int:
    """How many first keys two chains share; a key names all that stands before it."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[middle - 1] == other[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
