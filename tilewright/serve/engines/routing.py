"""Selects an engine for a request, by cached prefix or by load.

Knows page keys, token counts and slots. Knows no processes, texts or clocks.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

_TOO_BUSY = 2
"""Maximum ratio to the least load for an engine with the cached prefix."""


@dataclass(slots=True)
class _RoutedRequest:
    """A request with its prompt and output tokens left on the engine."""

    engine: int
    prompt_left: int
    answer_left: int

    @property
    def left(self) -> int:
        return self.prompt_left + self.answer_left


@dataclass(slots=True)
class _Known:
    """The router's record for an engine.

    Attributes:
        keys: its computed pages, least recently used first.
        count: its requests.
        load: tokens left in its requests.
        turn: its latest selection.
    """

    keys: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    count: int = 0
    load: int = 0
    turn: int = 0

    def depth(self, keys: Sequence[bytes]) -> int:
        """Return how many of a prompt's first pages this engine has."""
        for count, key in enumerate(keys):
            if key not in self.keys:
                return count
        return len(keys)

    def note(self, keys: Sequence[bytes], most: int) -> None:
        """Add computed pages and drop the oldest above ``most``.

        A prompt's last page is dropped first, because its other pages remain useful.
        """
        for key in reversed(keys):
            self.keys[key] = None
            self.keys.move_to_end(key)
        while len(self.keys) > most:
            self.keys.popitem(last=False)


class ReplicaRouter:
    """Places requests on engines, numbered from 0, and counts their load.

    The candidates are the engines with a free slot, or all engines if none has one. A request that
    waits for a slot would leave another engine's slot empty. The candidate with the longest
    cached prefix is selected, unless its load would be over twice the least load. Else the least
    loaded candidate is selected. Ties go to the least recently selected engine.
    """

    def __init__(self, num_engines: int) -> None:
        self._known = [_Known() for _ in range(num_engines)]
        self._placed: dict[int, _RoutedRequest] = {}
        self._turn = 0

    def __contains__(self, request_id: object) -> bool:
        """Return whether a request is on an engine."""
        return request_id in self._placed

    @property
    def loads(self) -> list[int]:
        """Return the tokens left in each engine's requests."""
        return [known.load for known in self._known]

    def engine_of(self, request_id: int) -> int | None:
        """Return the number of a request's engine, or None."""
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
        """Select an engine for a new request. Return None if no engine is usable.

        Args:
            request_id: request number.
            keys: keys for its prompt's full pages, see :func:`chain_keys`.
            num_prompt: prompt token count.
            num_answer: maximum output token count.
            usable: the ready engines.
            num_slots: maximum running requests per engine.
            most_keys: pages per engine.
            like: earlier request with the same prompt. Both use the same engine, which computes
                the prompt once.
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
        depths = {engine: known[engine].depth(keys) for engine in usable}
        most = max(depths.values())
        if not most:
            return least
        holder = min(
            (engine for engine in usable if depths[engine] == most),
            key=lambda each: (known[each].load, known[each].turn),
        )
        is_busy = known[holder].load + size > _TOO_BUSY * (known[least].load + size)
        return least if is_busy else holder

    def advance(self, request_id: int, count: int) -> None:
        """Count new output tokens of a request. Its prompt is computed."""
        placed = self._placed.get(request_id)
        if placed is not None:
            count = min(count, placed.answer_left)
            self._known[placed.engine].load -= placed.prompt_left + count
            placed.prompt_left = 0
            placed.answer_left -= count

    def leave(self, request_id: int) -> int | None:
        """Remove a finished request. Return its engine, or None."""
        placed = self._placed.pop(request_id, None)
        if placed is None:
            return None
        known = self._known[placed.engine]
        known.load -= placed.left
        known.count -= 1
        return placed.engine

    def lose(self, engine: int) -> list[int]:
        """Remove a lost engine with its pages. Return its requests, which have no engine."""
        lost = [each for each, placed in self._placed.items() if placed.engine == engine]
        for request_id in lost:
            del self._placed[request_id]
        self._known[engine] = _Known(turn=self._known[engine].turn)
        return lost

    def forget(self) -> None:
        """Drop every engine's cached prefixes."""
        for known in self._known:
            known.keys.clear()
