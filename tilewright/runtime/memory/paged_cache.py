"""Page cache. Prompts share full pages, and snapshots of per-sequence state."""

from __future__ import annotations

from collections.abc import Iterable

from tilewright.compiler.targets.interface.base import Capabilities
from tilewright.compiler.targets.interface.step import AssignPages, SaveState
from tilewright.runtime.memory.cache_manager import (
    NOTHING,
    CacheManager,
    PrefixMatch,
    StateBytes,
    common_keys,
)
from tilewright.runtime.memory.pages import PagePool, chain_keys, pages_of
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig

_MARGINS_PER_PAGE = 4
"""Margins in a page. A sequence within the margin of a page's end may get the next page early."""


class PagedCacheManager(CacheManager):
    """Shares full pages by key.

    A prompt page enters the prefix cache when a step that fills it is scheduled. It is not written
    after that step. Steps run in order, so a request that finds the page runs after it. Output
    pages enter when the request has finished and all tokens are known.
    """

    def __init__(
        self, capabilities: Capabilities, policy: SchedulerConfig, state_bytes: StateBytes
    ) -> None:
        super().__init__(capabilities, policy, state_bytes)
        self.pool = PagePool(capabilities.num_pages)
        self._num_growing = 0

    @property
    def _wants_keys(self) -> bool:
        # Without snapshots, shared pages are useless for per-sequence state.
        return not self._has_state or self.snapshots.size > 0

    def find(self, request: RequestState) -> PrefixMatch:
        usable = (len(request.prompt) - 1) // self.grain  # the last token is always computed
        is_small = not self._shares_passes(max(self.num_present, len(self.running) + 1))
        pages = self.pool.find(request.page_keys[:usable], is_invariant=is_small)
        pages = pages[: self._whole_images(request, len(pages))]
        if not pages:
            return NOTHING
        if not self._has_state:
            return PrefixMatch(len(pages) * self.grain, tuple(pages))
        found = self.snapshots.find(request.page_keys, len(pages))
        if found is None:
            return PrefixMatch(branch_point=len(pages) * self.grain)
        count, snapshot = found
        branch_point = len(pages) * self.grain if count < len(pages) else 0
        return PrefixMatch(count * self.grain, tuple(pages[:count]), None, snapshot, branch_point)

    def shared_with(self, request: RequestState, other: RequestState) -> int:
        usable = (len(request.prompt) - 1) // self.grain
        common = min(common_keys(request.page_keys, other.page_keys), usable)
        return self._whole_images(request, common) * self.grain

    def _whole_images(self, request: RequestState, num_pages: int) -> int:
        """Return the number of pages without a cut in a bidirectional image."""
        while (whole := request.whole_images(num_pages * self.grain)) < num_pages * self.grain:
            num_pages = whole // self.grain
        return num_pages

    def fits(self, request: RequestState, match: PrefixMatch) -> bool:
        return self._has_room(match.pages, self._num_fresh(request, match))

    def admit(self, request: RequestState, match: PrefixMatch) -> None:
        fresh = self._num_fresh(request, match)
        slot = self._take_slot()
        self._open(slot, request, match.length)
        self.pool.hold(match.pages)
        self._begin(request, slot, match)
        self._give_pages(request, [*match.pages, *self.pool.take(fresh)])
        request.num_named = len(match.pages)
        request.is_invariant = self.pool.are_invariant(match.pages)
        self._load(request, match)

    def follow(self, leader: RequestState, request: RequestState) -> bool:
        num_full = len(request.prompt) // self.grain
        fresh = self._num_first(request) - num_full
        if not self._free or not self._has_room((), fresh):
            return False
        slot = self._take_slot()
        self._open(slot, request)
        shared = leader.pages[:num_full]
        self.pool.hold(shared)
        self._begin_copy(leader, request, slot)
        self._give_pages(request, [*shared, *self.pool.take(fresh)])
        request.num_named = num_full
        request.is_invariant = leader.is_invariant
        return True

    def grow(self, running: RequestState) -> bool:
        if not self.pool.num_available:
            return False
        self._add_page(running)
        if self._has_state and self._names_reply(running):
            self._keep_state(running)
        return True

    def reserve(self, running: RequestState, count: int) -> int:
        # A page stays available for every request that may need it.
        while running.page_capacity < running.num_computed + count:
            if self.pool.num_available <= self._num_growing:
                break
            self._add_page(running)
        return min(count, running.page_capacity - running.num_computed)

    def grow_soon(self, decoding: Iterable[RequestState]) -> None:
        if self._has_state and self.policy.cache_replies:
            return  # `grow` also saves the state at the page's first position
        margin = self.grain // _MARGINS_PER_PAGE
        for running in decoding:
            is_soon = running.page_capacity - running.num_computed <= margin
            if is_soon and _grows(running) and self.pool.num_available > self._num_growing:
                self._add_page(running)

    def _add_page(self, running: RequestState) -> None:
        (page,) = self.pool.take(1)
        self.edits.append(AssignPages(running.slot, len(running.pages), (page,)))
        running.pages.append(page)
        self._num_growing -= _grows(running)
        running.page_capacity += self.grain
        self._num_growing += _grows(running)

    def _keep_state(self, running: RequestState) -> None:
        """Save the state at the end of full output pages, in place of the earlier snapshot."""
        place = running.reply[1] if running.reply else self.snapshots.borrow()
        if place is not None:
            self.edits.append(SaveState(running.slot, place))
            running.reply = running.num_computed, place

    def leave(self, running: RequestState, *, may_keep: bool) -> None:
        self._take_out(running)
        keys = self._name_reply(running) if may_keep and self._names_reply(running) else []
        if running.reply is not None:
            self._name_state(running, keys)
        self._give_slot(running.slot)
        self.pool.release(running.pages)
        self._num_growing -= _grows(running)
        running.pages = []

    def note(self, running: RequestState) -> None:
        keys = running.page_keys
        if self._shares_passes(len(self.running)):
            running.is_invariant = False
        num_full = min(running.num_computed // self.grain, len(keys))
        for index in range(running.num_named, num_full):
            self.pool.name(running.pages[index], keys[index], is_invariant=running.is_invariant)
        running.num_named = max(running.num_named, num_full)

    def can_return(self, running: RequestState) -> bool:
        return self._has_room((), self._num_again(running))

    def _deal(self, running: RequestState) -> None:
        self._give_pages(running, self.pool.take(self._num_again(running)))
        running.num_named = 0  # new pages, which are not cached

    def forget(self) -> None:
        super().forget()
        self.pool.forget()

    def _give_pages(self, running: RequestState, pages: list[int]) -> None:
        running.pages, running.page_capacity = pages, len(pages) * self.grain
        self._num_growing += _grows(running)
        self.edits.append(AssignPages(running.slot, 0, tuple(pages)))

    def _num_first(self, request: RequestState) -> int:
        """Return the pages for a prompt and the first position after it, if needed."""
        return pages_of(min(request.max_positions, len(request.prompt) + 1), self.grain)

    def _num_again(self, running: RequestState) -> int:
        """Return the pages for a preempted request. Its prompt may be incomplete."""
        num_now = pages_of(min(running.max_positions, running.num_computed + 1), self.grain)
        return max(num_now, self._num_first(running))

    def _num_fresh(self, request: RequestState, match: PrefixMatch) -> int:
        return self._num_first(request) - len(match.pages)

    def _has_room(self, shared: tuple[int, ...], num_fresh: int) -> bool:
        """Return whether the pages are available, with a reserve for every growing request."""
        revived = sum(not self.pool.count(page) for page in shared)
        return num_fresh + revived + self._num_growing <= self.pool.num_available

    def _names_reply(self, running: RequestState) -> bool:
        """Return whether the full pages of an output enter the prefix cache."""
        policy, is_private = self.policy, running.is_private
        return policy.cache_replies and policy.reuses and self._wants_keys and not is_private

    def _name_reply(self, running: RequestState) -> list[bytes]:
        """Add the full output pages to the prefix cache. Return all keys of the sequence."""
        known = (*running.cache_tokens, *running.output)[: running.num_computed]
        keys = chain_keys(known, self.grain, running.cache_salt, running.page_keys)
        is_invariant = not self.capabilities.invariant_rows  # decode kernels wrote these pages
        for index in range(running.num_named, len(keys)):
            self.pool.name(running.pages[index], keys[index], is_invariant=is_invariant)
        return keys

    def _shares_passes(self, num_sequences: int) -> bool:
        limits = self.capabilities
        return bool(limits.invariant_rows) and limits.shares_passes(num_sequences)

    def _name_state(self, running: RequestState, keys: list[bytes]) -> None:
        """Give the output's snapshot its key, if the position is known.

        Positions after an end token or a cancellation are unknown.
        """
        assert running.reply is not None
        (position, place), running.reply = running.reply, None
        at = position // self.grain
        key = keys[at - 1] if at <= len(keys) else None
        self.snapshots.give_back(place, key)
        if key is not None:
            self._go_on(running, key)


def _grows(running: RequestState) -> bool:
    """Return whether a request may need more pages."""
    return running.page_capacity < running.max_positions
