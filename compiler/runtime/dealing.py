"""How many tokens of whose prompt the next step takes."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.compiler.runtime.cost import StepCost
from tilewright.compiler.runtime.running import Policy, Running
from tilewright.compiler.targets.base import Capabilities

_MAX_ECHOED = 512
"""Tokens of a piece whose rows of logits are all wanted: they go to the host, 64 MB of 32k each."""

_UNMEASURED = 4
"""Cells of a prompt in one step, while it is not known how long they take."""


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
        budget = self.budget(num_decoding)
        dealt: list[tuple[Running, int]] = []
        for running in order:
            count = self._piece(running, budget)
            if not count or len(dealt) == self._limits.max_prompts:
                break
            budget -= count
            dealt.append((running, count))
        return dealt

    def _piece(self, running: Running, budget: int) -> int:
        """Tokens of the next piece: all that is left, or whole pages of it, and where there are no
        pages whole cells: a part of one takes as long. Where steps are smaller, whole steps.
        """
        most = self._most
        if running.request.sampling.prompt_logprobs is not None:
            most = min(most, _MAX_ECHOED)
            budget = min(budget, most)
        if running.left <= budget:
            return running.left
        grain = self._limits.page_size or min(self._limits.cell, most)
        return budget // grain * grain

    def budget(self, num_decoding: int) -> int:
        """Tokens of prompts that the next step takes: beside streams, and where the loop must be
        heard of between steps, as many whole cells as are expected to take no longer than they may.
        """
        limits, policy, whole = self._limits, self._policy, self._most
        tokens: int | None
        if num_decoding and policy.step_ms:
            allowed = max(policy.step_ms, self._cost.decode(num_decoding))
            tokens = self._cost.tokens_within(allowed) or 0
        elif policy.beat_ms and not limits.runs_ahead:
            tokens = self._cost.tokens_within(policy.beat_ms)
            tokens = _UNMEASURED * limits.cell if tokens is None else tokens
        else:
            return whole
        return max(limits.cell, min(tokens, whole) // limits.cell * limits.cell)
