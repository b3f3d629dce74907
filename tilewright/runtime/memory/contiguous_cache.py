"""Contiguous slot cache. A later prompt continues a finished slot, or a copy of a slot.

Only tokens and slot numbers are stored here. The executable owns the state's bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from tilewright.compiler.targets.interface.base import Capabilities
from tilewright.compiler.targets.interface.step import CloseSlot, CopyState, Slot
from tilewright.runtime.memory.cache_manager import NOTHING, CacheManager, PrefixMatch, StateBytes
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig

_WORTH_COPYING = 8
"""Minimum positions for a copy of a slot's state, or half of a short prompt."""


@dataclass(frozen=True, slots=True)
class CachedSlot:
    """A cached slot.

    Attributes:
        tokens: Tokens in the state.
        reached: Maximum number of positions the state ever had.
        salt: Cache salt. Only requests with the same salt may use the slot.
        num_bytes: The state's size in bytes.
    """

    tokens: tuple[int, ...]
    reached: int
    salt: str
    num_bytes: int


class CachedSlots:
    """The cached slots by last use.

    Args:
        size_of: Returns the state bytes for a position count.
        most: Maximum total bytes.
    """

    def __init__(self, size_of: Callable[[int], int], most: int) -> None:
        self._size_of, self._most = size_of, most
        self._num_bytes = 0
        self._kept: OrderedDict[Slot, CachedSlot] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def __iter__(self) -> Iterator[tuple[Slot, CachedSlot]]:
        """Yield slots, least recently used first."""
        return iter(self._kept.items())

    def keep(self, slot: Slot, tokens: tuple[int, ...], salt: str, *, reached: int) -> list[Slot]:
        """Add a finished sequence's slot with ``tokens``. Return evicted slots, least recently
        used first.

        The new slot may itself be evicted.
        """
        kept = CachedSlot(tokens, reached, salt, self._size_of(len(tokens)))
        self._kept[slot] = kept
        self._num_bytes += kept.num_bytes
        left = []
        while self._num_bytes > self._most:
            left.append(self.take_oldest())
        return left

    def touch(self, slot: Slot) -> None:
        """Mark a slot as most recently used."""
        self._kept.move_to_end(slot)

    def take(self, slot: Slot) -> Slot:
        """Remove a slot from the cache."""
        self._num_bytes -= self._kept.pop(slot).num_bytes
        return slot

    def take_oldest(self, *, besides: Slot | None = None) -> Slot:
        """Remove the least recently used slot. ``besides`` is taken only if it is the last slot."""
        slots = iter(self._kept)
        slot = next(slots)
        if slot == besides:
            slot = next(slots, slot)
        return self.take(slot)

    def forget(self) -> list[Slot]:
        """Remove and return all slots."""
        slots = list(self._kept)
        self._kept.clear()
        self._num_bytes = 0
        return slots


class ContiguousCacheManager(CacheManager):
    """Keeps the slots of finished sequences, and evicts the least recently used.

    A prompt that continues a whole cached slot takes the slot. A prompt that shares a part of a
    cached or running slot gets a copy. Without a further slot, it takes the cached slot and
    truncates it. State that cannot be truncated continues at its end, or from a snapshot.
    """

    def __init__(
        self, capabilities: Capabilities, policy: SchedulerConfig, state_bytes: StateBytes
    ) -> None:
        super().__init__(capabilities, policy, state_bytes)
        self.kept = CachedSlots(self.size_of, policy.host_bytes)

    @property
    def has_slot(self) -> bool:
        return bool(self._free) or bool(self.kept)

    def find(self, request: RequestState) -> PrefixMatch:
        if not self.policy.reuses or request.is_private:
            return NOTHING
        best = NOTHING
        usable = request.cache_tokens[:-1]  # the last token is always computed
        for slot, tokens, reached, is_kept in self._holders(request.cache_salt):
            if tokens[: best.length + 1] != usable[: best.length + 1]:
                continue
            common = request.whole_images(common_length(tokens, usable))
            if common <= best.length:
                continue
            is_whole = is_kept and common == len(tokens)
            match = self._use_of(request, slot, common, reached, is_whole=is_whole)
            if match.length > best.length or (
                not best.length and match.branch_point > best.branch_point
            ):
                best = match
        return best

    def _holders(self, salt: str) -> Iterator[tuple[Slot, tuple[int, ...], int, bool]]:
        """Yield the slots with shareable tokens, most recently used first.

        Each entry has the slot, its tokens, its largest length, and whether it is cached.
        """
        for slot, kept in reversed(list(self.kept)):
            if kept.salt == salt:
                yield slot, kept.tokens, kept.reached, True
        for request in self.running:
            if not request.is_private and request.cache_salt == salt:
                tokens, reached = (
                    request.cache_tokens[: request.num_computed],
                    self._reached(request),
                )
                yield request.slot, tokens, reached, False

    def _use_of(
        self, request: RequestState, slot: Slot, common: int, reached: int, *, is_whole: bool
    ) -> PrefixMatch:
        """Return a prompt's match with a slot that shares ``common`` positions."""
        can_cut = self.capabilities.can_cut
        if is_whole or not self._has_state:
            is_reusable = is_whole or can_cut(reached, common)
            return PrefixMatch(common, slot=slot, reached=reached) if is_reusable else NOTHING
        snapshot = self.snapshots.find(request.page_keys, common // self.grain)
        branch_point = common // self.grain * self.grain
        if snapshot is None or not can_cut(reached, snapshot[0] * self.grain):
            return PrefixMatch(branch_point=branch_point)
        length = snapshot[0] * self.grain
        branch_point = branch_point if branch_point > length else 0
        return PrefixMatch(
            length, slot=slot, snapshot=snapshot[1], branch_point=branch_point, reached=reached
        )

    @staticmethod
    def _reached(running: RequestState) -> int:
        """Return the largest length of a running sequence's slot."""
        return max(running.max_num_computed, running.num_computed)

    def shared_with(self, request: RequestState, other: RequestState) -> int:
        common = common_length(request.cache_tokens[:-1], other.cache_tokens)
        common = request.whole_images(common)
        if not self.capabilities.can_cut(len(other.prompt), common):
            return 0
        if not self._has_state:
            return common
        return common // self.grain * self.grain if self.snapshots.size else 0

    def fits(self, request: RequestState, match: PrefixMatch) -> bool:
        return True

    def admit(self, request: RequestState, match: PrefixMatch) -> None:
        source = match.slot
        slot, is_copied = self._choose(request, match)
        if source is not None and not is_copied and slot != source:
            match = NOTHING
        in_place = match.length > 0 and not is_copied
        self._open(slot, request, match.length if in_place else 0)
        if is_copied:
            assert source is not None
            self.edits.append(CopyState(source, slot, match.length))
        self._begin(request, slot, match)
        self._load(request, match)

    def _choose(self, request: RequestState, match: PrefixMatch) -> tuple[Slot, bool]:
        """Return a slot, and whether the match is copied into it."""
        source = match.slot
        if source is None:
            return self._fresh_slot(), False
        kept = dict(self.kept)
        if source in kept:
            is_end = len(kept[source].tokens) == match.length
            is_alone = not self._free and len(kept) == 1
            if is_end or is_alone:
                return self.kept.take(source), False
            self.kept.touch(source)
        is_worth = match.length >= min(_WORTH_COPYING, len(request.prompt) // 2)
        return self._fresh_slot(besides=source), is_worth

    def _fresh_slot(self, besides: Slot | None = None) -> Slot:
        """Return an empty slot. Evict the oldest cached slot if no slot is free."""
        if self._free:
            return self._take_slot()
        slot = self.kept.take_oldest(besides=besides)
        self.edits.append(CloseSlot(slot))
        return slot

    def follow(self, leader: RequestState, request: RequestState) -> bool:
        if not self.has_slot:
            return False
        slot = self._fresh_slot()
        self._open(slot, request)
        self._begin_copy(leader, request, slot)
        return True

    def grow(self, running: RequestState) -> bool:
        raise AssertionError(f"{running}: a slot has room for a whole context")

    def leave(self, running: RequestState, *, may_keep: bool) -> None:
        self._take_out(running)
        slot = running.slot
        known = (*running.cache_tokens, *running.output)[: running.num_computed]
        may_keep &= self.policy.reuses and not running.is_private and len(known) > 0
        may_keep &= self.capabilities.can_cut(running.num_computed, len(known))
        # Positions after a cancellation are unknown, and state cannot be truncated.
        if not may_keep or (self._has_state and running.num_computed > len(known)):
            self._give_slot(slot)
            return
        reached = self._reached(running)
        for left in self.kept.keep(slot, known, running.cache_salt, reached=reached):
            self._give_slot(left)

    def note(self, running: RequestState) -> None:
        """Do nothing: matches are found through the slots."""

    def forget(self) -> None:
        super().forget()
        for slot in self.kept.forget():
            self._free.append(slot)
        self._free.sort()


def common_length(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Return the length of two sequences' common prefix."""
    low, high = 0, min(len(one), len(other))
    step = 32
    while low < high:
        middle = min(high, low + step)
        if one[low:middle] == other[low:middle]:
            low, step = middle, 2 * step
        elif middle == low + 1:
            break
        else:
            high, step = middle, max(1, (middle - low) // 2)
    return low
