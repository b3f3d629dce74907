"""What the next step works on: seats, pages, pieces of prompts. No tensors, no device.

Lengths and positions advance by known counts, so a step is planned before the last one's tokens
have been read; only ends by an end token are learnt late, and their rows in flight are dropped.
"""

from __future__ import annotations

import heapq
from bisect import insort
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tilewright.compiler.errors import RequestError
from tilewright.compiler.runtime.kept import KeptSeats
from tilewright.compiler.runtime.pages import PagePool, chain_keys, pages_of
from tilewright.compiler.runtime.request import CANCELLED, FAILED, LENGTH, STOPPED, Request
from tilewright.compiler.targets.base import Capabilities
from tilewright.compiler.targets.step import (
    Chunk,
    Close,
    Edit,
    Open,
    Pages,
    Seat,
    Step,
)

STEP_MS = 20.0
"""Milliseconds that a piece of a prompt may take beside running streams."""

Cost = Callable[[int, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a user may choose of a scheduler.

    Attributes:
        step_ms: milliseconds for pieces of prompts while others decode; 0: no limit.
        step_tokens: tokens of prompts in one step; None: as many as the executable takes.
        reuses: whether prompts share what was computed for others with the same beginning: pages,
            or, on executables without them, the seats of sequences that have ended. Whoever
            measures has it off, so that no figure comes from a cache.
        prompts_first: whether streams wait while prompts are computed: right where all requests
            are there from the beginning and nobody listens.
    """

    step_ms: float = STEP_MS
    step_tokens: int | None = None
    reuses: bool = True
    prompts_first: bool = False


@dataclass(slots=True, eq=False)
class Running:
    """A request that has a seat.

    Attributes:
        computed: positions that launched steps have computed, or were found in the cache.
        asked: tokens of the answer that launched steps choose, or that are known.
        replay: known tokens of the answer that decode steps must still read, after preemption.
        num_named: full pages of the prompt that are in the prefix cache.
    """

    request: Request
    seat: Seat
    computed: int = 0
    asked: int = 0
    replay: deque[int] = field(default_factory=deque)
    pages: list[int] = field(default_factory=list)
    num_named: int = 0

    @property
    def num_left(self) -> int:
        """Tokens of the prompt that no step has taken yet."""
        return max(0, len(self.request.prompt) - self.computed)

    @property
    def wants_decode(self) -> bool:
        """Whether a next token is to be computed, and its predecessor is chosen or known."""
        wants = bool(self.replay) or self.asked < self.request.sampling.max_tokens
        return not self.num_left and wants


@dataclass(frozen=True, slots=True)
class Plan:
    """A step and what becomes of its tokens: ``rows`` names who gets the token of a seat; rows
    that only replay known tokens are not there.
    """

    step: Step
    rows: dict[Seat, Running]
    num_prompt_tokens: int


class Scheduler:
    """Admits, deals pages and pieces of prompts, preempts. One scheduler owns an executable."""

    def __init__(
        self, capabilities: Capabilities, *, policy: Policy | None = None, cost: Cost | None = None
    ) -> None:
        self.capabilities = capabilities
        self.policy = policy or Policy()
        self.pool = PagePool(capabilities.num_pages)
        self.kept = KeptSeats(whole=capabilities.has_sequence_state)
        self.waiting: list[tuple[int, int, Request]] = []
        self.running: list[Running] = []
        self.num_preemptions = 0
        self._cost = cost or (lambda rows, tokens: 0.0)
        # state that cannot be cut back is not where a shared page ends
        shares = self.policy.reuses and bool(capabilities.page_size)
        self._shares_pages = shares and not capabilities.has_sequence_state
        self._free_seats = list(range(capabilities.max_seats))
        self._edits: list[Edit] = []
        self._decode: tuple[Seat, ...] = ()
        self._num_arrived = 0
        self._shortest_next = False

    def check(self, request: Request) -> None:
        """Refuse a request that can never be served.

        Raises:
            RequestError: for an empty prompt, or one that could never fit with its answer.
        """
        limits = self.capabilities
        if not request.prompt:
            raise RequestError("the prompt is empty; allowed: at least one token")
        most = limits.max_context
        if limits.page_size:
            most = min(most, limits.num_pages * limits.page_size)
        if request.max_positions > most:
            raise RequestError(
                f"a prompt of {len(request.prompt)} tokens and {request.sampling.max_tokens} to "
                f"generate do not fit the context; allowed: {most + 1} together"
            )

    def add(self, request: Request) -> None:
        """Queue a request that :meth:`check` accepts.

        Raises:
            RequestError: for one that it refuses.
        """
        self.check(request)
        if self._shares_pages and not request.is_private:
            request.page_keys = tuple(chain_keys(request.prompt, self.capabilities.page_size))
        self._num_arrived += 1
        insort(self.waiting, (request.priority, self._num_arrived, request), key=lambda e: e[:2])

    def has_work(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self.waiting or self.running)

    def schedule(self) -> Plan | None:
        """The next step; None where nothing can be computed before a step is read."""
        self._admit()
        decoding = self._decode_rows()
        chunks = self._chunks(len(decoding))
        if not decoding and not chunks:
            return None
        seats = tuple(each.seat for each in decoding)
        if seats != self._decode:
            self._decode = seats
        rows: dict[Seat, Running] = {}
        forced = {}
        for each in decoding:
            each.computed += 1
            if each.replay:
                forced[each.seat] = each.replay.popleft()
            if not each.replay:
                rows[each.seat] = each
                each.asked += 1
        for each, chunk in chunks:
            if chunk.chooses:
                rows[each.seat] = each
                each.asked += 1
        asks = [each.request.sampling.logprobs for each in rows.values()]
        logprobs = max((n for n in asks if n is not None), default=None)
        step = Step(
            decode=self._decode,
            prompts=tuple(chunk for _, chunk in chunks),
            edits=tuple(self._edits),
            forced=forced,
            masked=any(each.request.matcher is not None for each in rows.values()),
            logprobs=logprobs,
        )
        self._edits = []
        return Plan(step, rows, sum(len(chunk.tokens) for _, chunk in chunks))

    def closing(self) -> Step | None:
        """What frees the seats of those who ended, where nothing else is to be computed."""
        if not self._edits or self.running:
            return None
        edits, self._edits = tuple(self._edits), []
        return Step(edits=edits)

    def finish(self, request: Request, reason: str) -> None:
        """A request has ended; its seat and pages go to others from the next step on."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        for each in self.running:
            if each.request is request:
                self._leave(each, may_keep=reason != FAILED)
                return
        self.waiting = [entry for entry in self.waiting if entry[2] is not request]

    def take(self, running: Running, token: int, *, is_end: bool) -> bool:
        """A token of a step has been read; whether its request wanted it."""
        request = running.request
        if request.finish_reason is not None:
            return False
        request.output.append(token)
        if is_end or len(request.output) >= request.sampling.max_tokens:
            self.finish(request, STOPPED if is_end else LENGTH)
        return True

    def evacuate(self) -> None:
        """Nothing is on the executable any more: all that ran waits again, and is replayed."""
        for running in reversed(list(self.running)):
            self._preempt(running)
        self.pool.forget()
        for seat in self.kept.forget():
            heapq.heappush(self._free_seats, seat)
        self._edits.clear()
        self._decode = ()

    def cancel(self, request: Request) -> None:
        """End a request early."""
        self.finish(request, CANCELLED)

    def _leave(self, running: Running, *, may_keep: bool = False) -> None:
        self.running.remove(running)
        request = running.request
        may_keep &= self.policy.reuses and not self.capabilities.page_size
        known = (*request.prompt, *request.output) if may_keep and not request.is_private else ()
        if not known or not self.kept.keep(running.seat, known, running.computed):
            self._edits.append(Close(running.seat))
            heapq.heappush(self._free_seats, running.seat)
        self.pool.release(running.pages)

    def _admit(self) -> None:
        while self.waiting and (self._free_seats or self.kept):
            request = self.waiting[0][2]
            shared, needed = self._wanted_pages(request)
            if self.capabilities.page_size and not self._has_room(shared, needed):
                return
            self.waiting.pop(0)
            self._seat(request, shared, needed)

    def _has_room(self, shared: Sequence[int], num_fresh: int) -> bool:
        """Whether there are so many pages, and one more for each that runs."""
        revived = sum(not self.pool.count(page) for page in shared)
        return num_fresh + revived + len(self.running) <= self.pool.num_available

    def _wanted_pages(self, request: Request) -> tuple[list[int], int]:
        """Cached pages of a request's prompt, and how many fresh ones it needs to begin with."""
        size = self.capabilities.page_size
        if not size:
            return [], 0
        usable = (len(request.prompt) - 1) // size  # the last token is always computed
        shared = self.pool.find(request.page_keys[:usable])
        most = min(request.max_positions, len(request.prompt) + 1)
        return shared, pages_of(most, size) - len(shared)

    def _seat(self, request: Request, shared: list[int], num_fresh: int) -> None:
        seat, keeps = self._choose_seat(request)
        choosing = request.sampling.choosing()
        running = Running(request, seat, asked=len(request.output), replay=deque(request.output))
        running.computed = request.num_cached = keeps
        wants_prompt = choosing.is_penalised or choosing.min_tokens
        self._edits.append(Open(seat, choosing, request.prompt if wants_prompt else (), keeps))
        if size := self.capabilities.page_size:
            self.pool.hold(shared)
            running.pages = [*shared, *self.pool.take(num_fresh)]
            running.num_named = len(shared)
            running.computed = request.num_cached = len(shared) * size
            self._edits.append(Pages(seat, 0, tuple(running.pages)))
        self.running.append(running)

    def _choose_seat(self, request: Request) -> tuple[Seat, int]:
        """The seat for a request, and how many first positions of its prompt that holds already."""
        prompt = () if request.is_private else request.prompt
        found = self.kept.take_best(prompt, are_others_free=bool(self._free_seats))
        if found is not None:
            return found
        if not self._free_seats:
            seat = self.kept.take_oldest()
            self._edits.append(Close(seat))
            return seat, 0
        return Seat(heapq.heappop(self._free_seats)), 0

    def _decode_rows(self) -> list[Running]:
        """Every seat that decodes, by seat; each has the page that its token is written to."""
        if self.policy.prompts_first and any(each.num_left for each in self.running):
            return []
        for running in [each for each in self.running if each.wants_decode]:
            if running in self.running:  # not preempted for another meanwhile
                self._grow(running, running.computed + 1)
        decoding = [each for each in self.running if each.wants_decode]
        return sorted(decoding, key=lambda each: each.seat)

    def _grow(self, running: Running, num_positions: int) -> None:
        size = self.capabilities.page_size
        missing = pages_of(num_positions, size) - len(running.pages) if size else 0
        if missing <= 0:
            return
        while self.pool.num_available < missing:
            victim = max(self.running, key=lambda each: (each.request.priority, self._age(each)))
            self._preempt(victim)
            if victim is running:
                return
        self._edits.append(
            Pages(running.seat, len(running.pages), tuple(fresh := self.pool.take(missing)))
        )
        running.pages += fresh

    def _age(self, running: Running) -> int:
        """Larger for those admitted later."""
        return self.running.index(running)

    def _preempt(self, running: Running) -> None:
        """Back to the queue, before all of its priority; what it has said is replayed later."""
        self._leave(running)
        self.num_preemptions += 1
        running.request.num_preemptions += 1
        entry = (running.request.priority, -self.num_preemptions, running.request)
        insort(self.waiting, entry, key=lambda e: e[:2])

    def _chunks(self, num_decoding: int) -> list[tuple[Running, Chunk]]:
        pending = [each for each in self.running if each.num_left]
        if not pending:
            return []
        budget = self._budget(num_decoding, max(each.num_left for each in pending))
        order: Sequence[Running] = pending
        if num_decoding and self._shortest_next:
            order = sorted(pending, key=lambda each: each.num_left)
        self._shortest_next = not self._shortest_next
        chunks: list[tuple[Running, Chunk]] = []
        for running in order:
            if len(chunks) == self.capabilities.max_prompts or budget <= 0:
                break
            count = self._piece(running, budget)
            if not count:
                break
            budget -= count
            chunks.append((running, self._chunk(running, count)))
        return chunks

    def _piece(self, running: Running, budget: int) -> int:
        """Tokens of the next piece: all that is left, or whole pages and cells of it."""
        if running.num_left <= budget:
            return running.num_left
        grain = max(self.capabilities.page_size, 1)
        return budget // grain * grain

    def _budget(self, num_decoding: int, most: int) -> int:
        """Tokens of prompts that the next step takes."""
        limits = self.capabilities
        whole = min(self.policy.step_tokens or limits.max_step_tokens, limits.max_step_tokens)
        if not num_decoding or not self.policy.step_ms:
            return whole
        allowed = max(self.policy.step_ms, self._cost(num_decoding, 0))
        budget = limits.cell
        while budget + limits.cell <= min(whole, most + limits.cell):
            spent = self._cost(num_decoding, budget + limits.cell) - self._cost(num_decoding, 0)
            if not 0.0 < spent <= allowed:
                break
            budget += limits.cell
        return budget

    def _chunk(self, running: Running, count: int) -> Chunk:
        request, start = running.request, running.computed
        running.computed += count
        ends = running.computed == len(request.prompt)
        tokens = request.prompt[start : running.computed]
        if size := self.capabilities.page_size:
            num_full = min(running.computed // size, len(request.page_keys))
            for index in range(running.num_named, num_full):
                # steps are in order: who finds the page computes behind the step that fills it
                self.pool.name(running.pages[index], request.page_keys[index])
                running.num_named = index + 1
        return Chunk(running.seat, start, tokens, chooses=ends and not request.output)
