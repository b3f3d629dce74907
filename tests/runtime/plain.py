"""A plain model of slots, for random scheduler operations.

Compares every written token with its request's sequence, and every page, slot, snapshot and host
buffer with a plain count.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any

from tests.runtime.plain_device import PlainDevice
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.base import Capabilities
from tilewright.compiler.targets.interface.step import (
    Slot,
    Step,
)
from tilewright.runtime.memory.cache_manager import CacheManager
from tilewright.runtime.memory.contiguous_cache import ContiguousCacheManager
from tilewright.runtime.memory.paged_cache import PagedCacheManager
from tilewright.runtime.memory.pages import PagePool
from tilewright.runtime.memory.snapshots import SnapshotPool
from tilewright.runtime.request import FAILED
from tilewright.runtime.scheduling.request_state import (
    RequestState,
    SchedulerConfig,
    SchedulerOutput,
)
from tilewright.runtime.scheduling.scheduler import Scheduler
from tilewright.runtime.speculative.config import SpeculativeConfig

CONTEXT, CELL = 48, 4


class Operations:
    """A scheduler, its plain model, and random operations.

    Attributes: truth: tokens by request, extended by each step. flight: unread steps.
    """

    def __init__(self, rng: random.Random, **changes: Any) -> None:
        self.rng = rng
        self.limits = Capabilities(**{**draw_limits(rng), **changes})
        self.policy = SchedulerConfig(
            step_ms=rng.choice((0.0, 1e-9, 5.0)),
            step_tokens=rng.choice((None, 6, 16)),
            reuses=rng.random() < 0.8,
            cache_replies=rng.random() < 0.3,
            host_bytes=rng.choice((0, 40, 10_000)),
            speculative=SpeculativeConfig(
                max_drafts=rng.randint(1, 6), max_lookup=2, min_lookup=rng.choice((1, 2))
            ),
        )
        self.now = 0.0
        self.scheduler = Scheduler(
            self.limits,
            policy=self.policy,
            state_bytes=lambda num_positions, num_sequences: num_positions,
            now=lambda: self.now,
        )
        self.device = PlainDevice(self.limits)
        self.truth: dict[RequestState, list[int]] = {}
        self.flight: deque[tuple[SchedulerOutput, dict[Slot, list[int]]]] = deque()
        self.live: list[RequestState] = []
        self.num_operations = self.num_requests = 0
        self.oldest: tuple[RequestState, tuple[int, int], int] | None = None

    def operate(self) -> None:
        """Run a random operation and check all invariants."""
        self.num_operations += 1
        self.now += self.rng.random()
        kind = self.rng.random()
        if kind < 0.12 and len(self.live) < 16:
            self.add()
        elif kind < 0.15 and self.live:
            self.scheduler.cancel(self.rng.choice(self.live))
        elif kind < 0.151:
            self.fail()
        elif kind < 0.58 or not self.flight:
            self.launch()
        else:
            self.read()
        self.check()

    def add(self) -> None:
        """Add a request. Prompts share prefixes, and some requests have several choices."""
        rng, count = self.rng, 1 if self.rng.random() < 0.85 else self.rng.randint(2, 4)
        size = self.limits.page_size * self.limits.num_pages or CONTEXT
        room = min(CONTEXT, size)
        prompt = [rng.randrange(2)] * rng.randint(0, room // 2)
        prompt += [rng.randrange(3) for _ in range(rng.randint(1, max(1, room // 3)))]
        prompt = prompt[: room - 1]
        wanted = rng.randint(1, max(1, min(12, room - len(prompt))))
        ends = (1,) if rng.random() < 0.2 else ()
        first = None
        for _ in range(count):
            self.num_requests += 1
            request = RequestState(
                self.num_requests,
                tuple(prompt),
                SamplingParams(max_tokens=wanted, stop_token_ids=ends),
                priority=rng.choice((0, 0, 0, 1)),
                client=rng.choice("ab"),
                is_private=rng.random() < 0.05,
                cache_salt=rng.choice(("", "", "s")),
                like=first,
            )
            first = first or request
            self.scheduler.add(request)
            self.truth[request] = list(prompt)
            self.live.append(request)

    def fail(self) -> None:
        """Lose the device's state and all steps in flight."""
        self.scheduler.evacuate()
        self.device.clear()
        self.flight.clear()
        for request, tokens in self.truth.items():
            del tokens[len(request.prompt) + len(request.output) :]
        self.oldest = None

    def launch(self) -> None:
        """Schedule and launch a step if at most one step is unread."""
        if len(self.flight) == 2:
            return self.read()
        before = self._first()
        plan = self.scheduler.schedule()
        if plan is None:
            closing = self.scheduler.closing()
            for edit in () if closing is None else closing.edits:
                self.device.apply(edit)
            assert self.flight or not self.scheduler.has_work(), "idle while there is work"
            return self.read() if self.flight else None
        self._check_step(plan.step)
        for edit in plan.step.edits:
            self.device.apply(edit)
        self.flight.append((plan, self._run(plan)))
        self._check_progress(before)
        return None

    def _run(self, plan: SchedulerOutput) -> dict[Slot, list[int]]:
        """Return the sampled tokens by slot, after a check of all written tokens."""
        step, found = plan.step, dict[Slot, list[int]]()
        of_slot = {each.slot: each for each in self.scheduler.running}
        for slot in step.decode:
            held = self.device.slots[slot]
            token = step.forced.get(slot, held.holds)
            assert token is not None, "a slot that holds no token is stepped"
            self._write(of_slot[slot], token)
            held.holds = None
            if slot in plan.rows:
                found[slot] = [self._choose(plan.rows[slot])]
                self._verify(plan.rows[slot], step.drafts.get(slot, ()), found[slot])
        for chunk in self.rng.sample(step.prompts, len(step.prompts)):  # targets may reorder them
            running, held = of_slot[chunk.slot], self.device.slots[chunk.slot]
            assert chunk.start == len(held.tokens), "a gap, or computed twice"
            for at, token in enumerate(chunk.tokens, chunk.start + 1):
                self._write(running, token, also=chunk.also)
                for position, snapshot in chunk.saves:
                    if position == at:
                        self.device.snapshots[snapshot] = list(held.tokens)
            held.holds = None
            for slot in (chunk.slot, *chunk.also) if chunk.chooses else ():
                if slot != chunk.slot:
                    self.device.copy(chunk.slot, slot, chunk.end)
                found[slot] = [self._choose(plan.rows[slot])]
        return found

    def _verify(self, running: RequestState, drafts: tuple[int, ...], chosen: list[int]) -> None:
        """Verify drafts up to the first wrong draft. All drafts must fit."""
        held, size = self.device.slots[running.slot], self.limits.page_size
        end = len(held.tokens) + len(drafts)
        assert len(drafts) <= self.limits.max_drafts and end <= running.max_positions
        if size and drafts:
            pages = held.pages[(end - len(drafts)) // size : (end - 1) // size + 1]
            assert len(held.pages) * size >= end, "drafts without pages"
            assert all(self.device.users[page] == 1 for page in pages)
        for draft in drafts:
            if draft != chosen[-1]:
                break
            self._write(running, draft)
            chosen.append(self._choose(running))

    def _write(self, running: RequestState, token: int, also: Sequence[Slot] = ()) -> None:
        slot, truth = self.device.slots[running.slot], self.truth[running]
        at = len(slot.tokens)
        assert truth[at] == token, f"{token} at {at} is not the token of this request"
        cache_manager = self.scheduler.cache_manager
        if isinstance(cache_manager, PagedCacheManager):
            page = slot.pages[at // self.limits.page_size]
            assert running.pages[at // self.limits.page_size] == page
            assert cache_manager.pool.count(page) == self.device.users[page]
        self.device.write(running.slot, token, also=also)
        if at + 1 == len(truth) or at % 7 == 0:
            assert slot.tokens == truth[: at + 1], "what a slot reads is not its own past"

    def _choose(self, running: RequestState) -> int:
        request, slot = running, self.device.slots[running.slot]
        truth = self.truth[request]
        assert slot.tokens == truth, "a token is chosen twice, or behind another past"
        token = self.rng.randrange(3)
        truth.append(token)
        slot.holds = token
        return token

    def read(self) -> None:
        """Read the oldest step in flight."""
        plan, found = self.flight.popleft()
        for slot, running in plan.rows.items():
            request, tokens = running, found[slot]
            if slot in plan.step.drafts:
                self.scheduler.settle(request, len(tokens))
            if request.finish_reason is None and self.rng.random() < 0.002:
                self.scheduler.finish(request, FAILED)
                continue
            ends = request.sampling.stop_token_ids
            taken = [self.scheduler.take(running, each, is_end=each in ends) for each in tokens]
            if any(taken):
                assert (
                    request.output
                    == self.truth[request][len(request.prompt) :][: len(request.output)]
                ), "a token is missing, or came twice"

    def drain(self) -> None:
        """Finish all requests without new requests. All memory must be free."""
        for _ in range(4000):
            if not self.scheduler.has_work() and not self.flight:
                break
            self.now += 1.0
            self.launch()
            if self.flight and (len(self.flight) == 2 or self.rng.random() < 0.5):
                self.read()
            self.check()
        assert not self.scheduler.has_work(), "somebody is never served"
        self.launch()
        self.check()
        assert not self.scheduler.cache_manager.running and not self.scheduler.num_swapped
        assert not self.scheduler.num_used_pages and not self.device.away
        assert len(self.device.slots) == self.scheduler.num_kept

    def _first(self) -> RequestState | None:
        running = self.scheduler.running
        key = lambda each: (each.priority, each.order)  # noqa: E731
        return min(running, key=key, default=None)

    def _check_progress(self, before: RequestState | None) -> None:
        """The oldest request in the highest priority must advance at least every second step."""
        if before is None or before.finish_reason is not None:
            return
        assert before in self.scheduler.cache_manager.running, "the oldest was preempted"
        if self._first() is not before:  # a request with a higher priority arrived
            self.oldest = None
            return
        if self.oldest is not None and self.oldest[0] is before:
            _, computed, waited = self.oldest
            is_done = not before.prompt_left and before.num_scheduled >= before.max_output
            waited = 0 if _progress(before) != computed or is_done else waited + 1
            assert waited < 2, "the oldest does not go on"
            self.oldest = before, _progress(before), waited
        else:
            self.oldest = before, _progress(before), 0

    def _check_step(self, step: Step) -> None:
        """Check that slots are distinct and the prefill chunks are within the limit."""
        busy = [*step.decode, *(slot for c in step.prompts for slot in (c.slot, *c.also))]
        assert len(set(busy)) == len(busy), "a slot twice in a step"
        assert len(step.prompts) <= self.limits.max_prompts
        tokens = sum(len(chunk.tokens) for chunk in step.prompts)
        most = min(self.policy.step_tokens or 1 << 20, self.limits.max_step_tokens)
        if step.decode and self.policy.step_ms:
            most = CELL  # no measurements: the minimum chunk
        assert tokens <= max(most, CELL), "more tokens of prompts than the budget"
        grain = self.limits.page_size or 1
        ends = {each.slot: not each.prompt_left for each in self.scheduler.running}
        assert all(ends[c.slot] or c.end % grain == 0 for c in step.prompts), "cut within a page"

    def check(self) -> None:
        """Check all owners with plain counts."""
        scheduler, cache_manager = self.scheduler, self.scheduler.cache_manager
        self.live = [each for each in self.live if each.finish_reason is None]
        if len(self.truth) > 4 * len(self.live) + 40:
            rows = {each for plan, _ in self.flight for each in plan.rows.values()}
            keep = {*self.live, *rows}
            self.truth = {each: self.truth[each] for each in self.truth if each in keep}
        waiting = list(scheduler.line)
        assert len(waiting) == len(scheduler.line) == len(set(waiting))
        assert {*waiting, *cache_manager.running} == set(self.live)
        assert len(waiting) + len(cache_manager.running) == len(self.live)
        assert [each.slot for each in cache_manager.by_slot] == sorted(
            each.slot for each in cache_manager.running
        )
        kept = (
            [slot for slot, _ in cache_manager.kept]
            if isinstance(cache_manager, ContiguousCacheManager)
            else []
        )
        slots = [*cache_manager._free, *kept, *(each.slot for each in cache_manager.by_slot)]
        assert sorted(slots) == list(range(self.limits.max_num_seqs)), (
            "each slot is somewhere, once"
        )
        if isinstance(cache_manager, PagedCacheManager):
            check_pool(cache_manager.pool, cache_manager)
        check_snapshots(cache_manager.snapshots, cache_manager)


def _progress(running: RequestState) -> tuple[int, int]:
    return running.num_computed, len(running.output)


def check_pool(pool: PagePool, cache_manager: PagedCacheManager) -> None:
    """Check that every page is free, cached or used, with correct reference counts."""
    counts = Counter(page for each in cache_manager.by_slot for page in each.pages)
    assert all(pool.count(page) == counts[page] for page in range(pool.num_pages))
    free, idle, held = set(pool._free), set(pool._idle), set(counts)
    assert len(pool._free) == len(free) and not free & idle and not (free | idle) & held
    assert len(free) + len(idle) + len(held) == pool.num_pages
    assert pool._key_of.keys() >= idle and not free & pool._key_of.keys()
    assert len(pool._page_of) == len(pool._key_of)
    growing = [each for each in cache_manager.by_slot if each.page_capacity < each.max_positions]
    assert cache_manager._num_growing == len(growing)


def check_snapshots(snapshots: SnapshotPool, cache_manager: CacheManager) -> None:
    """Check that every snapshot is free, cached or borrowed."""
    lent = [each.reply[1] for each in cache_manager.by_slot if each.reply is not None]
    places = [*snapshots._free, *snapshots._of_key.values(), *lent]
    count = cache_manager.capabilities.num_snapshots if cache_manager.policy.reuses else 0
    assert sorted(places) == list(range(count)) and snapshots._num_borrowed == len(lent)
    assert not snapshots._uses.keys() - snapshots._of_key.keys()


def draw_limits(rng: random.Random) -> dict[str, Any]:
    """Draw random capabilities."""
    found: dict[str, Any] = {
        "max_num_seqs": rng.randint(1, 6),
        "max_context": CONTEXT,
        "cell": CELL,
        "max_prompts": rng.randint(1, 3),
        "max_step_tokens": rng.choice((8, 24, 64)),
        "passes": rng.choice(((), ((2, (4, 12)), (9, (4, 8))))),
        "far": rng.choice((0, 0, 10)),
        "max_drafts": rng.choice((0, 2, 4)),
    }
    if rng.random() < 0.7:
        found |= {"page_size": 4, "num_pages": rng.randint(6, 40)}
    if rng.random() < 0.4:
        found |= {"has_sequence_state": True, "num_snapshots": rng.randint(0, 5)}
    return found
