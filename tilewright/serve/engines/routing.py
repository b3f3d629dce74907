"""Which of several engines a request goes to: the one that has its beginning, or the least busy.

Knows keys of pages, numbers of tokens and slots; nothing of processes, texts or clocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

_TOO_BUSY = 2
"""How many times the least load an engine may have and still get what begins as it knows."""


@dataclass(slots=True)
class _RoutedRequest:
    """A request, and how many tokens of it its engine still has to read and to write."""

    engine: int
    prompt_left: int
    answer_left: int

    @property
    def left(self) -> int:
        return self.prompt_left + self.answer_left


@dataclass(slots=True)
class _Known:
    """An engine as its front sees it.

    ``keys``: of the pages it has computed, the least recently used first. ``count``: of its
    requests. ``load``: tokens that they still take. ``turn``: when it was chosen last.
    """

    keys: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    count: int = 0
    load: int = 0
    turn: int = 0

    def depth(self, keys: Sequence[bytes]) -> int:
        """How many of a prompt's first pages are here."""
        for count, key in enumerate(keys):
            if key not in self.keys:
                return count
        return len(keys)

    def note(self, keys: Sequence[bytes], most: int) -> None:
        """Note that these pages are here from now on; beyond ``most`` the oldest are forgotten, and
        of a prompt the last page first: without it the others are still of use.
        """
        for key in reversed(keys):
            self.keys[key] = None
            self.keys.move_to_end(key)
        while len(self.keys) > most:
            self.keys.popitem(last=False)


class ReplicaRouter:
    """Places requests on engines, which are numbered from 0, and knows what each has to do.

    A request goes where a slot is free: one that waits behind requests that have nearly ended
    would leave another engine's slot empty for as long as its own answer takes. Of those engines,
    or of all where none has a slot free, it goes where most of its first pages are, unless with it
    that engine would have more than twice as much to do as the least busy one: then, or where
    nobody knows its beginning, to that one; of equals to the one that was chosen least recently.
    """

    def __init__(self, num_engines: int) -> None:
        self._known = [_Known() for _ in range(num_engines)]
        self._placed: dict[int, _RoutedRequest] = {}
        self._turn = 0

    def __contains__(self, request_id: object) -> bool:
        """Whether a request is on an engine now."""
        return request_id in self._placed

    @property
    def loads(self) -> list[int]:
        """The tokens that each engine's requests still take."""
        return [known.load for known in self._known]

    def engine_of(self, request_id: int) -> int | None:
        """The number of the engine that has a request; None where none has it."""
        placed = self._placed.get(request_id)
        return placed.engine if placed is not None else None

    def place(
        self,
        request_id: int,
        keys: Sequence[bytes],
        *,
        num_prompt: int,
        num_answer: int,
        usable: Sequence[int],
        num_slots: int,
        most_keys: int,
        like: int | None = None,
    ) -> int | None:
        """Choose an engine for a request that is nowhere yet; None where none is usable.

        Args:
            keys: of the full pages of its prompt; see :func:`chain_keys`.
            num_answer: the most tokens of its answer.
            num_seats: how many requests run on an engine at a time.
            most_keys: how many pages an engine holds.
            like: an earlier request for the same prompt: they stay together, and the prompt is
                computed once.
        """
        assert request_id not in self._placed, f"request {request_id} is placed already"
        if not usable:
            return None
        first = self._placed.get(like) if like is not None else None
        if first is not None and first.engine in usable:
            engine, num_prompt = first.engine, 0
        else:
            free = [each for each in usable if self._known[each].count < num_slots]
            engine = self._choose(keys, num_prompt + num_answer, free or usable)
        known = self._known[engine]
        known.note(keys, most_keys)
        known.count += 1
        known.load += num_prompt + num_answer
        self._turn += 1
        known.turn = self._turn
        self._placed[request_id] = _RoutedRequest(engine, num_prompt, num_answer)
        return engine

    def _choose(self, keys: Sequence[bytes], size: int, usable: Sequence[int]) -> int:
        known = self._known
        least = min(usable, key=lambda each: (known[each].load, known[each].turn))
        depths = {each: known[each].depth(keys) for each in usable}
        most = max(depths.values())
        if not most:
            return least
        holder = min(
            (each for each in usable if depths[each] == most),
            key=lambda each: (known[each].load, known[each].turn),
        )
        is_busy = known[holder].load + size > _TOO_BUSY * (known[least].load + size)
        return least if is_busy else holder

    def advance(self, request_id: int, count: int) -> None:
        """Note that so many tokens of an answer have come: its prompt has been read."""
        placed = self._placed.get(request_id)
        if placed is not None:
            count = min(count, placed.answer_left)
            self._known[placed.engine].load -= placed.prompt_left + count
            placed.prompt_left = 0
            placed.answer_left -= count

    def leave(self, request_id: int) -> int | None:
        """A request has ended. Returns where it was; None where it was nowhere."""
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return None
        known = self._known[placed.engine]
        known.load -= placed.left
        known.count -= 1
        return placed.engine

    def lose(self, engine: int) -> list[int]:
        """An engine is gone with all it held. Returns its requests, which are nowhere now."""
        lost = [each for each, placed in self._placed.items() if placed.engine == engine]
        for request_id in lost:
            del self._placed[request_id]
        self._known[engine] = _Known(turn=self._known[engine].turn)
        return lost

    def forget(self) -> None:
        """Forget what every engine has computed: none shares it with requests that come from now
        on.
        """
        for known in self._known:
            known.keys.clear()
