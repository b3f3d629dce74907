"""Scheduler: assigns slots, pages and prefill chunks to the next step. No tensors, no device.

Lengths and positions advance by known counts, so a step is planned before the previous tokens are
read. Only end tokens are known late. Their rows in flight are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import TypeAlias

from tilewright.compiler.targets.interface.base import Capabilities
from tilewright.compiler.targets.interface.step import (
    DropSwapped,
    OpenSlot,
    PrefillChunk,
    Slot,
    Step,
    SwapHandle,
)
from tilewright.errors import RequestError
from tilewright.images.prompt import PromptImage
from tilewright.runtime.memory.cache_manager import CacheManager, StateBytes
from tilewright.runtime.memory.contiguous_cache import ContiguousCacheManager
from tilewright.runtime.memory.image_cache import ImageCache
from tilewright.runtime.memory.paged_cache import PagedCacheManager
from tilewright.runtime.memory.swap_space import SwapSpace
from tilewright.runtime.request import CANCELLED, FAILED, LENGTH, STOPPED
from tilewright.runtime.scheduling.prefill_scheduler import PrefillScheduler
from tilewright.runtime.scheduling.request_state import (
    RequestState,
    SchedulerConfig,
    SchedulerOutput,
)
from tilewright.runtime.scheduling.step_cost_model import StepCostModel
from tilewright.runtime.scheduling.waiting_queue import WaitingQueue
from tilewright.runtime.speculative.draft_layer import DraftLayerClient
from tilewright.runtime.speculative.draft_model import DraftModel
from tilewright.runtime.speculative.speculator import Speculator

HOLD_SECONDS = 5.0
"""Seconds in which a blocked request stops later requests. Then one of them may pass."""


Rows: TypeAlias = dict[Slot, RequestState]
"""The state that gets the token of a slot."""

Drafts: TypeAlias = dict[RequestState, tuple[int, ...]]
"""Draft tokens by request."""

_ChunkOutput: TypeAlias = tuple[RequestState, Rows, PrefillChunk]
"""A chunk with its request, and the further choices that start with it."""


class Scheduler:
    """Admits, schedules and preempts requests. A scheduler owns its executable.

    Args:
        capabilities: the executable's limits.
        policy: options. None: the defaults.
        cost: measured step times.
        state_bytes: returns the bytes for positions and sequences.
        cross_key_bytes: bytes of a key and value for cross-attention. 0: embeddings.
        now: clock in seconds.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        *,
        policy: SchedulerConfig | None = None,
        cost: StepCostModel | None = None,
        state_bytes: StateBytes = lambda num_positions, num_sequences: 0,
        cross_key_bytes: int = 0,
        draft_model: DraftModel | DraftLayerClient | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capabilities = capabilities
        self.policy = policy or SchedulerConfig()
        kind: type[CacheManager] = (
            PagedCacheManager if capabilities.page_size else ContiguousCacheManager
        )
        self.cache_manager = kind(capabilities, self.policy, state_bytes)
        self.line = WaitingQueue()
        self.places = SwapSpace(self.policy.host_bytes)
        self.images = ImageCache(capabilities.hidden_size, cross_key_bytes=cross_key_bytes)
        self.num_arrived = self.num_preemptions = self.num_preempted = 0
        cost = cost or StepCostModel()
        self._prefill = PrefillScheduler(capabilities, self.policy, cost)
        self.speculator = Speculator(self.policy.speculative, capabilities, cost, draft_model)
        self._now = now
        self._swapped: set[RequestState] = set()
        self._blocked: RequestState | None = None
        self._blocked_since = 0.0
        self._decoding: list[RequestState] = []
        self._decode: tuple[Slot, ...] = ()
        self._rows: Rows = {}
        self._logprobs: int | None = None
        self._masked = False

    @property
    def running(self) -> list[RequestState]:
        """The requests with a slot, in the order of admission."""
        return list(self.cache_manager.running)

    @property
    def num_used_pages(self) -> int:
        """The used page count. 0 without pages."""
        cache_manager = self.cache_manager
        return cache_manager.pool.num_used if isinstance(cache_manager, PagedCacheManager) else 0

    @property
    def num_kept(self) -> int:
        """The cached slot count without a request."""
        return (
            len(self.cache_manager.kept)
            if isinstance(self.cache_manager, ContiguousCacheManager)
            else 0
        )

    @property
    def num_snapshots_used(self) -> int:
        """The stored snapshot count."""
        return len(self.cache_manager.snapshots)

    @property
    def num_swapped(self) -> int:
        """The request count with state in host memory."""
        return len(self._swapped)

    def check(self, request: RequestState) -> None:
        """Check that a request can be served.

        Raises:
            RequestError: for an empty prompt, or a prompt that does not fit with its output.
        """
        limits = self.capabilities
        if request.pooling is not None and not limits.hidden_size:
            raise RequestError("this target gives no hidden states; allowed: cpu, cuda, reference")
        if not request.prompt:
            raise RequestError("the prompt is empty; allowed: at least one token")
        if request.images:
            self.images.check(request.images)
        most = limits.max_context
        if limits.page_size:
            most = min(most, limits.num_pages * limits.page_size)
        if request.max_positions > most:
            raise RequestError(
                f"a prompt of {len(request.prompt)} tokens and {request.sampling.max_tokens} to "
                f"generate do not fit the context; allowed: {most + 1} together"
            )

    def add(self, request: RequestState) -> None:
        """Check and queue a request.

        Raises:
            RequestError: see `check`.
        """
        self.check(request)
        self.cache_manager.name(request)
        if self.speculator.max_drafts:
            self.speculator.on_arrival(request)
        if request.images:
            self.images.count(request.images)
        self.num_arrived += 1
        request.order = self.num_arrived
        if request.like is not None:
            request.like.choices.append(request)
        self.line.add(request)

    def has_work(self) -> bool:
        """Return whether a request waits or runs."""
        return bool(self.line or self.cache_manager.running)

    def schedule(self) -> SchedulerOutput | None:
        """Schedule the next step. Return None if a step must be read first.

        At most one earlier step may be in flight. Read it before the next call: a preempted request
        must know all its output tokens.
        """
        if self.line:
            self._admit()
        decoding = self._decode_rows()
        chunks = self._chunks(len(decoding))
        if not decoding and not chunks:
            return None
        drafts = self._drafts(decoding)
        forced, rows = self._advance(decoding, drafts)
        if chunks:
            rows = dict(rows)
            for running, copies, chunk in chunks:
                if chunk.chooses:
                    running.num_scheduled += 1
                    rows |= {chunk.slot: running, **copies}
        echoes = tuple(
            [(one, chunk.start) for one, _, chunk in chunks if chunk.echoes or chunk.pools]
        )
        asking = [request for request, _ in echoes]
        if self.images.num_images:
            self.images.end_step(self.cache_manager.edits, self._running_images())
        step = Step(
            decode=self._decode,
            prompts=tuple(chunk for _, _, chunk in chunks),
            edits=self.cache_manager.take_edits(),
            forced=forced,
            drafts={request.slot: tokens for request, tokens in drafts.items()},
            masked=_any_masked(rows) if chunks else self._masked,
            logprobs=_most_logprobs(rows, asking) if chunks else self._logprobs,
        )
        prompts = sum(len(chunk.tokens) for chunk in step.prompts)
        return SchedulerOutput(step, rows, prompts, self._prefill.weigh(step.prompts), echoes)

    def _drafts(self, decoding: list[RequestState]) -> Drafts:
        """Return a step's draft tokens."""
        if not self.speculator.max_drafts:
            return {}
        # A request that is swapped in has its slot after this step's edits.
        opened = {edit.slot for edit in self.cache_manager.edits if isinstance(edit, OpenSlot)}
        ready = [request for request in decoding if request.slot not in opened]
        drafts: Drafts = {}
        for request, tokens in self.speculator.propose(ready).items():
            num_rows = self.cache_manager.reserve(request, 1 + len(tokens))
            if num_rows > 1:
                drafts[request] = tokens[: num_rows - 1]
        return drafts

    def _advance(
        self, decoding: list[RequestState], drafts: Drafts
    ) -> tuple[dict[Slot, int], Rows]:
        """Advance the decoding requests by a token. Return forced tokens and sampled rows."""
        forced: dict[Slot, int] = {}
        is_same = decoding == self._decoding
        if not is_same:
            self._decoding = decoding
            self._decode = tuple([state.slot for state in decoding])
        for state in decoding:
            state.num_computed += 1
            if state.replay_tokens:
                forced[state.slot] = state.replay_tokens.popleft()
                if state.replay_tokens:
                    continue
            state.num_scheduled += 1
        for request, tokens in drafts.items():
            request.expect(len(tokens))
        if forced or not is_same:
            self._rows = {state.slot: state for state in decoding if not state.replay_tokens}
            self._logprobs = _most_logprobs(self._rows)
            self._masked = _any_masked(self._rows)
        return forced, self._rows

    def closing(self) -> Step | None:
        """Return a step that frees the finished request slots, if no request runs."""
        if not self.cache_manager.edits or self.cache_manager.running:
            return None
        return Step(edits=self.cache_manager.take_edits())

    def finish(self, request: RequestState, reason: str) -> None:
        """Finish a request. Its slot and pages are free in the next step."""
        if request.finish_reason is not None:
            return
        request.finish_reason = reason
        if request in self.cache_manager.running:
            self.cache_manager.leave(request, may_keep=reason != FAILED)
            return
        self.line.leave(request)
        if request in self._swapped:
            self.cache_manager.edits.append(DropSwapped(self._give_place_back(request)))

    def settle(self, request: RequestState, num_emitted: int) -> None:
        """Take the number of emitted tokens of a step that was read, before the tokens."""
        num_drafts = request.num_unread_rows - 1
        if num_drafts > 0:
            self.speculator.record(request, num_drafts, num_emitted - 1)
        request.settle(num_emitted)

    def take(self, request: RequestState, token: int, *, is_end: bool) -> bool:
        """Take a sampled token. Return whether its request was unfinished."""
        if request.finish_reason is not None:
            return False
        request.output.append(token)
        if is_end or len(request.output) >= request.max_output:
            self.finish(request, STOPPED if is_end else LENGTH)
        return True

    def take_all(
        self,
        rows: Mapping[Slot, RequestState],
        slots: Sequence[Slot],
        tokens: Sequence[int],
        *,
        now: float,
    ) -> tuple[list[RequestState], int]:
        """Take a sampled token per slot. None is an end token.

        Return the requests with a new token, and the number of finished requests.
        """
        served: list[RequestState] = []
        num_finished = 0
        for slot, token in zip(slots, tokens, strict=True):
            request = rows.get(slot)
            if request is None:
                continue
            if request.finish_reason is not None:
                num_finished += 1
                continue
            output = request.output
            output.append(token)
            request.token_times.append(now)
            if len(output) >= request.max_output:
                self.finish(request, LENGTH)
            served.append(request)
        return served, num_finished

    def cancel(self, request: RequestState) -> None:
        """Cancel a request."""
        self.finish(request, CANCELLED)

    def evacuate(self) -> None:
        """Remove all requests from the executable. They wait, and are computed again."""
        for running in self.running:
            self.cache_manager.leave(running, may_keep=False)
            self.line.put_back(running)
        for request in self._swapped:
            request.place = None
        self._swapped.clear()
        self.places.forget()
        self.cache_manager.forget()
        self.images.forget()
        self._forget_rows()

    def _forget_rows(self) -> None:
        """Forget the last step's rows, because slots have changed."""
        self._decoding, self._decode, self._rows = [], (), {}

    def _admit(self) -> None:
        """Admit waiting requests in order, as slots and pages allow."""
        cache_manager = self.cache_manager
        if not cache_manager.has_slot:
            return
        cache_manager.num_present = len(cache_manager.running) + len(self.line)
        admitted: list[RequestState] = []
        is_passing = False
        for request in self.line:
            if not cache_manager.has_slot:
                break
            fits = self._slot(request)
            if fits is None:
                continue
            if fits:
                admitted.append(request)
                if is_passing:
                    self._blocked_since = self._now()
                    break
            elif not is_passing:
                if self._holds_back(request):
                    break
                is_passing = True
        for request in admitted:
            self.line.leave(request)

    def _slot(self, request: RequestState) -> bool | None:
        """Give a slot to a request. Return False without capacity.

        Return None if the request waits for another prompt. Then it does not block the queue.
        """
        cache_manager = self.cache_manager
        if request in self._swapped:
            if not cache_manager.can_return(request):
                return False
            cache_manager.take_back(request, self._give_place_back(request))
            self._forget_rows()  # the same request may decode on another slot
            return True
        if self._is_copied_later(request):
            return None
        if request.images and not self.images.fits(request.images, self._running_images()):
            return False
        match = cache_manager.find(request)
        pending = [each for each in cache_manager.running if each.prompt_left]
        if pending and cache_manager.waits_for(request, match, pending):
            return None
        if not cache_manager.fits(request, match):
            return False
        cache_manager.admit(request, match)
        if request.num_preemptions:
            self._forget_rows()  # see above
        return True

    def _running_images(self) -> Iterator[tuple[PromptImage, ...]]:
        """Yield the images of running requests, and of requests that continue after a swap."""
        for request in chain(self.cache_manager.running, self._swapped):
            if request.images:
                yield request.images

    def _is_copied_later(self, request: RequestState) -> bool:
        """Return whether the first choice still has to compute the common prompt."""
        first = request.like
        if first is None or request.output or first.output or first.finish_reason is not None:
            return False
        return first not in self.cache_manager.running or first.prompt_left > 0

    def _holds_back(self, request: RequestState) -> bool:
        """Return whether a blocked request stops later requests.

        It stops them for `HOLD_SECONDS`. Then one later request may pass, and the time restarts.
        Large requests get their turn, and do not block the queue for long.
        """
        now = self._now()
        if self._blocked is not request:
            self._blocked, self._blocked_since = request, now
        return now - self._blocked_since < HOLD_SECONDS

    def _decode_rows(self) -> list[RequestState]:
        """Return the decoding requests by slot, each with a page for its token."""
        if self.policy.prompts_first and any(
            request.prompt_left for request in self.cache_manager.by_slot
        ):
            return []
        decoding = self._wanting()
        growing = [request for request in decoding if request.num_computed == request.page_capacity]
        if not growing:
            return decoding
        for running in growing:
            while running in self.cache_manager.running and not self.cache_manager.grow(running):
                self._preempt(max(self.cache_manager.running, key=_rank))
        decoding = [state for state in decoding if state in self.cache_manager.running]
        self.cache_manager.grow_soon(decoding)
        return decoding

    def _wanting(self) -> list[RequestState]:
        """Return the requests with a computed prompt that need another token."""
        wanting = [
            request
            for request in self.cache_manager.by_slot
            if (request.num_scheduled < request.max_output or request.replay_tokens)
            and not (request.prompt_left or request.num_unread_rows)
        ]
        if not self.speculator.max_drafts:
            return wanting
        return [request for request in wanting if not self.speculator.must_wait(request)]

    def _preempt(self, request: RequestState) -> None:
        """Preempt a request. It waits before all new requests of its priority.

        Its state is swapped to host memory, or its tokens are replayed later.
        """
        self.num_preemptions += 1
        self.num_preempted += not request.num_preemptions
        request.num_preemptions += 1
        request.place = self.places.take(self.cache_manager.size_of(request.num_computed))
        if request.place is None:
            self.cache_manager.leave(request, may_keep=False)
        else:
            self.cache_manager.put_out(request, request.place)
            self._swapped.add(request)
        self.line.put_back(request)

    def _give_place_back(self, request: RequestState) -> SwapHandle:
        handle, request.place = request.place, None
        assert handle is not None
        self._swapped.remove(request)
        self.places.give_back(handle)
        return handle

    def _chunks(self, num_decoding: int) -> list[_ChunkOutput]:
        pending = [request for request in self.cache_manager.running if request.prompt_left]
        if not pending:
            return []
        chunks = self._prefill.deal(pending, num_decoding)
        return [self._chunk(running, count) for running, count in chunks]

    def _chunk(self, request: RequestState, count: int) -> _ChunkOutput:
        """Return a prompt's next chunk, and the requests that copy its end state."""
        start = request.num_computed
        request.num_computed += count
        request.prompt_left -= count
        end, pooling, is_last = request.num_computed, request.pooling, not request.prompt_left
        chooses = is_last and not request.output and pooling is None
        copies = self._copies(request) if chooses and request.choices else {}
        self.cache_manager.note(request)  # after the copies, because it counts open sequences
        echoes = request.sampling.prompt_logprobs is not None and not request.output
        placed, edits = request.images, self.cache_manager.edits
        chunk = PrefillChunk(
            request.slot,
            start,
            request.prompt[start:end],
            chooses=chooses,
            saves=self.cache_manager.saves(request, start, end),
            echoes=echoes,
            next_token=request.prompt[end] if echoes and not is_last else None,
            also=tuple(copies),
            pools=pooling is not None and pooling.needs(is_last=is_last),
            images=self.images.rows(placed, start, end, edits) if placed else (),
            visible=self.images.visible(placed, start, end, edits) if placed else (),
            rotary=request.rotary_of(start, end),
        )
        return request, copies, chunk

    def _copies(self, leader: RequestState) -> Rows:
        """Admit the other choices of a prompt that ends in this step, as capacity allows."""
        copies: Rows = {}
        for request in leader.choices:
            if request.finish_reason is None and request not in self.cache_manager.running:
                if not self.cache_manager.follow(leader, request):
                    break
                self.line.leave(request)
                copies[request.slot] = request
        return copies


def _rank(running: RequestState) -> tuple[int, int]:
    """Return a sort key for preemption: lowest priority and newest request last."""
    return running.priority, running.order


def _any_masked(rows: Mapping[Slot, RequestState]) -> bool:
    """Return whether a row with a new token has a grammar."""
    return any(request.matcher is not None for request in rows.values())


def _most_logprobs(
    rows: Mapping[Slot, RequestState], echoes: Sequence[RequestState] = ()
) -> int | None:
    """Return the maximum log probability count for the rows and echoes."""
    asks = [request.sampling.logprobs for request in rows.values()]
    asks += [request.sampling.prompt_logprobs for request in echoes]
    return max((count for count in asks if count is not None), default=None)
