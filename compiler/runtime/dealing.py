"""How many tokens of whose prompt the next step takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tilewright.compiler.runtime.cost import StepCost
from tilewright.compiler.runtime.running import Policy, Running
from tilewright.compiler.targets.base import Capabilities
from tilewright.compiler.targets.step import Chunk

_MAX_ECHOED = 512
"""Tokens of a piece whose rows of logits are all wanted: they go to the host, 64 MB of 32k each."""

_UNMEASURED = 4
"""Cells of a prompt in one step, while it is not known how long they take."""

_ENDLESS = 1 << 62


class PromptDealer:
    """Deals the prompt tokens of a step to the oldest prompt and to the one with least left, in
    turn: short ones pass long ones, and long ones get every second piece all the same.
    """

    def __init__(self, capabilities: Capabilities, policy: Policy, cost: StepCost) -> None:
        self._limits, self._policy, self._cost = capabilities, policy, cost
        most = capabilities.max_step_tokens
        self._most = min(policy.step_tokens or most, most)
        self._is_shortest_next = False

    def deal(self, pending: list[Running], num_decoding: int) -> list[tuple[Running, int]]:
        """Prompts and how many tokens of each are next; there is at least one, and all of them
        have tokens left.
        """
        pending.sort(key=lambda each: (each.request.priority, each.request.order))
        order: Sequence[Running] = pending
        if len(pending) > 1:
            if num_decoding and self._is_shortest_next:
                order = sorted(pending, key=lambda each: (each.request.priority, each.left))
            self._is_shortest_next = not self._is_shortest_next
        room = self.budget(num_decoding, order[0].computed)
        weight = self._weight_beside(num_decoding) if self._is_timed(num_decoding) else math.inf
        dealt: list[tuple[Running, int]] = []
        for running in order:
            count = self._piece(running, room, weight, is_first=not dealt)
            if not count or len(dealt) == self._limits.max_prompts:
                break
            room -= count
            weight -= weight_of(running.computed, count, self._limits.far)
            dealt.append((running, count))
        return dealt

    def weigh(self, chunks: Sequence[Chunk]) -> float:
        """Tokens at the beginning of a sequence that would take as long as these pieces."""
        far = self._limits.far
        return sum(weight_of(chunk.start, len(chunk.tokens), far) for chunk in chunks)

    def _piece(self, running: Running, room: int, weight: float, *, is_first: bool) -> int:
        """Tokens of the next piece: all that is left, or whole pages of it, and where there are no
        pages whole cells: a part of one takes as long. Where steps are smaller, whole steps.
        """
        limits, most = self._limits, self._most
        if running.request.sampling.prompt_logprobs is not None:
            most = min(most, _MAX_ECHOED)
        within = min(room, most)  # the first piece's context is known to the room already
        if not is_first:
            within = max(0, min(within, _count_within(running.computed, weight, limits.far)))
        if running.left <= within:
            return running.left
        grain = limits.page_size or min(limits.cell, most)
        count = within // grain * grain
        return count or (min(grain, running.left) if is_first else 0)

    def _is_timed(self, num_decoding: int) -> bool:
        """Whether streams wait for the step's prompts, and shall not for long."""
        return bool(num_decoding and self._policy.step_ms)

    def budget(self, num_decoding: int, start: int = 0) -> int:
        """Tokens of prompts, the first of them at ``start``, that the next step takes: beside
        streams, and where the loop must be heard of between steps, as many whole cells as are
        expected to take no longer than they may; with rows in one pass, cells of both together,
        for products are made of such pieces. Behind a long context it is a cell: of fewer tokens
        attention leaves the device idle, and takes as long.
        """
        limits, cell = self._limits, self._limits.cell
        if self._is_timed(num_decoding):
            riding = num_decoding if limits.mixes else 0
            is_near = not limits.far or start <= limits.far
            least = cell // 4 if limits.mixes and is_near else cell
            tokens = _count_within(start, self._weight_beside(num_decoding), limits.far)
            if tokens < least:
                return min(self._most, cell)
            cells = (riding + tokens) // cell * cell - riding
            return min(self._most, cells if cells >= cell // 2 else tokens)
        if self._policy.beat_ms and not limits.runs_ahead:
            within = self._cost.tokens_within(self._policy.beat_ms)
            within = _UNMEASURED * cell if within is None else within
            return max(cell, min(within, self._most) // cell * cell)
        return self._most

    def _weight_beside(self, num_decoding: int) -> int:
        """Tokens at the beginning of a sequence that are expected to take no longer than prompts
        may behind so many rows, but at least as long as these, and a cell; or which share a pass
        with them, the whole of which is to take no longer, but they at least half as long as the
        rows, and half a cell.
        """
        cost, cell, step_ms = self._cost, self._limits.cell, self._policy.step_ms
        if self._limits.mixes:
            rows_ms = cost.beside(num_decoding)
            allowed, least = max(step_ms - rows_ms, rows_ms / 2), max(cell // 2, 1)
        else:
            allowed, least = max(step_ms, cost.decode(num_decoding)), cell
        return max(cost.tokens_within(allowed) or 0, least)


def weight_of(start: int, count: int, far: int) -> float:
    """Tokens that take as long as ``count`` of them from position ``start`` on if no context is
    before them: each counts once more for every ``far`` positions (0: never).
    """
    return count * (1.0 + (start + count / 2) / far) if far else float(count)


def _count_within(start: int, weight: float, far: int) -> int:
    """The most tokens from ``start`` on whose :func:`weight_of` is no more than ``weight``."""
    if weight <= 0:
        return 0
    if weight == math.inf:
        return _ENDLESS
    if not far:
        return int(weight)
    first = 1.0 + start / far
    return int(far * (math.sqrt(first * first + 2 * weight / far) - first) + 1e-6)
