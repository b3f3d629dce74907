"""Prefill scheduling: selects prompts and chunk sizes for the next step."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate

from tilewright.compiler.targets.interface.base import Capabilities
from tilewright.compiler.targets.interface.step import PrefillChunk
from tilewright.runtime.scheduling.request_state import RequestState, SchedulerConfig
from tilewright.runtime.scheduling.step_cost_model import StepCostModel

_MAX_ECHOED = 512
"""Maximum tokens of a chunk with logits for all rows: 64 MB for a vocabulary of 32k."""

_UNMEASURED = 4
"""Cells of a prompt in a step, before step times are known."""

_ENDLESS = 1 << 62

_CAPTURED = 2
"""Number of captured mixed batches instead of a batch without a graph, which occupies the host as
long, if the time is not limited.
"""
_WHOLE = 1.2
"""Maximum time of a mixed batch, relative to separate chunks."""
_SLACK = 1.25
"""Maximum cost of a chunk's context, relative to the first chunk."""


class PrefillScheduler:
    """Distributes a step's prompt tokens to the oldest and to the shortest prompt, in turn.

    Short prompts overtake long prompts, and long prompts still get every second chunk.
    """

    def __init__(
        self, capabilities: Capabilities, policy: SchedulerConfig, cost: StepCostModel
    ) -> None:
        self._limits, self._policy, self._cost = capabilities, policy, cost
        most = capabilities.max_step_tokens
        self._most = min(policy.step_tokens or most, most)
        self._is_shortest_next = False
        self._passes = capabilities.passes

    def _passes_of(self, num_sequences: int) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """Return the passes that a step may share while ``num_sequences`` sequences are open."""
        limits = self._limits
        return limits.passes if limits.shares_passes(num_sequences) else ()

    def deal(
        self, pending: list[RequestState], num_decoding: int
    ) -> list[tuple[RequestState, int]]:
        """Return the next prompts with a token count for each.

        ``pending`` has at least one request, and all of them have tokens left.
        """
        pending.sort(key=lambda each: (each.priority, each.order))
        order: Sequence[RequestState] = pending
        if len(pending) > 1:
            if num_decoding and self._is_shortest_next:
                order = sorted(pending, key=lambda each: (each.priority, each.prompt_left))
            self._is_shortest_next = not self._is_shortest_next
        self._passes = self._passes_of(num_decoding + len(pending))
        most = self._num_pieces(num_decoding, len(order))
        room, weight = self._room(order, num_decoding, most)
        num_rows, limit = num_decoding, self._max_rows(room)
        chunks: list[tuple[RequestState, int]] = []
        for running in order:
            count = self._piece(running, room, weight, is_first=not chunks)
            if num_decoding and self._passes:
                count = self._until_saved(running, count)
            num_rows += count == running.prompt_left
            if not count or len(chunks) == most or (chunks and num_rows > limit):
                break
            room = min(room, self._limits.most_shared) - self._rows_of(count)
            weight -= weight_of(running.num_computed, count, self._limits.far)
            chunks.append((running, count))
        return chunks

    def weigh(self, chunks: Sequence[PrefillChunk]) -> float:
        """Return the token count at position 0 with the same cost as these chunks."""
        far = self._limits.far
        return sum(weight_of(chunk.start, len(chunk.tokens), far) for chunk in chunks)

    def _piece(self, running: RequestState, room: int, weight: float, *, is_first: bool) -> int:
        """Return the next chunk's size.

        It is the rest of the prompt, or whole pages of it. Without pages it is whole cells, because
        a partial cell takes as long. Smaller steps take a whole step.
        """
        limits, most = self._limits, self._most
        if running.sampling.prompt_logprobs is not None:
            most = min(most, _MAX_ECHOED)
        within = min(room, most)  # the budget includes the first chunk's context
        if not is_first:
            within = max(0, min(within, _count_within(running.num_computed, weight, limits.far)))
        if running.prompt_left <= within:
            return running.prompt_left
        grain = limits.page_size or min(limits.cell, most)
        count = within // grain * grain
        count = count or (min(grain, running.prompt_left) if is_first else 0)
        return _with_whole_images(running, count, is_first=is_first)

    def _until_saved(self, running: RequestState, count: int) -> int:
        """Return ``count``, cut at the first snapshot that would split the chunk.

        A split chunk could not join a mixed batch, and the rest costs little in the next batch.
        """
        start, marks = running.num_computed, self._limits.marks
        places = sorted(at - start for at in running.saves if at > start)
        return min((count, *places[marks:]))

    def _is_timed(self, num_decoding: int) -> bool:
        """Return whether decode rows limit the time of the step's prompts."""
        return bool(num_decoding and self._policy.step_ms)

    def _num_pieces(self, num_decoding: int, num_pending: int) -> int:
        """Return the maximum chunk count in the next step.

        With decode rows in a mixed batch, all chunks must fit into the widest batch.
        """
        limits = self._limits
        is_small = limits.passes and not self._passes
        most = 1 if is_small else min(num_pending, limits.max_prompts)
        widest = self._passes[-1][0] if self._passes else 0
        return min(most, widest - num_decoding) if 0 < num_decoding < widest else most

    def _room(
        self, order: Sequence[RequestState], num_decoding: int, num_pieces: int
    ) -> tuple[int, float]:
        """Return the next step's budget in tokens and in weighted tokens."""
        start, sizes = order[0].num_computed, self._sizes(order[:num_pieces], num_decoding)
        waiting = sum(self._rows_of(request.prompt_left) for request in order[:num_pieces])
        if not self._is_timed(num_decoding):
            room, shared = self.budget(num_decoding, start), self._limits.most_shared
            is_short = self._rows_of(order[0].prompt_left) <= shared
            several = min(num_pieces, len(order)) > 1 and is_short
            may_share = room >= shared and (num_decoding or several)
            if sizes and (may_share or (num_decoding and waiting <= _CAPTURED * sizes[-1])):
                room = min(room, self._pass_of(sizes, waiting, is_alone=not num_decoding))
            return room, math.inf
        if not sizes:
            return self.budget(num_decoding, start), self._weight_beside(num_decoding)
        size = self.shared(num_decoding, sizes, waiting, start)
        return size, _SLACK * weight_of(start, size, self._limits.far)

    def _rows_of(self, count: int) -> int:
        """Return a chunk's share of the budget: its rows in a mixed batch."""
        alignment = self._limits.alignment if self._passes else 1
        return -(-count // alignment) * alignment

    def _sizes(self, order: Sequence[RequestState], num_decoding: int) -> tuple[int, ...]:
        """Return the batch sizes for decode rows and for the prompts that end in a batch.

        Includes the larger sizes of batches for more rows.
        """
        ends = [*accumulate(self._rows_of(request.prompt_left) for request in order)]
        merged: tuple[int, ...] = ()
        for rows, sizes in self._passes:
            for size in sizes:
                is_larger = not merged or size > merged[-1]
                if is_larger and num_decoding + bisect_right(ends, size) <= rows:
                    merged += (size,)
        return merged

    def _max_rows(self, count: int) -> int:
        """Return the maximum number of rows in a captured batch with ``count`` prompt tokens."""
        return max((rows for rows, sizes in self._passes if count <= sizes[-1]), default=_ENDLESS)

    def _pass_of(self, sizes: Sequence[int], num_waiting: int, *, is_alone: bool) -> int:
        """Select a batch size for ``num_waiting`` tokens.

        Return the smallest size that fits all tokens, else the largest. Two smaller batches are
        preferred if their total size is less. Without decode rows (``is_alone``), the second batch
        costs another cell, because the weights are read twice.
        """
        at = min(bisect_left(sizes, num_waiting), len(sizes) - 1)
        size, before = sizes[at], sizes[at - 1] if at else 0
        if before < self._limits.cell or num_waiting >= size:
            return size
        rest = sizes[bisect_left(sizes, num_waiting - before)]
        again = self._limits.cell if is_alone else 0
        return before if before + rest + again < size else size

    def shared(
        self, num_decoding: int, sizes: Sequence[int], num_waiting: int, start: int = 0
    ) -> int:
        """Select a batch size for decode rows and prompts with a time limit.

        It is the size for ``num_waiting`` tokens among the sizes within the time. Larger batches
        need less time per token. ``start`` is the first prompt's position.
        """
        policy, within = self._policy, list(sizes[:1])
        allowed = _WHOLE * max(policy.step_ms, self._cost.decode(num_decoding))
        for tokens in sizes[1:]:
            if within[-1] >= num_waiting:
                break
            ms = self._cost.shared(num_decoding, weight_of(start, tokens, self._limits.far))
            if tokens > self._limits.cell if ms is None else ms > allowed:
                break
            within.append(tokens)
        return min(self._most, self._pass_of(within, num_waiting, is_alone=False))

    def budget(self, num_decoding: int, start: int = 0) -> int:
        """Return the prompt token count in the next step. The first is at ``start``.

        With decode rows, or if the loop must answer between steps, the number is the whole cells
        within the expected time. After a long context it is a cell, because attention over fewer
        tokens leaves the device idle and takes as long.
        """
        limits, cell = self._limits, self._limits.cell
        if self._is_timed(num_decoding):
            tokens = _count_within(start, self._weight_beside(num_decoding), limits.far)
            return min(self._most, max(cell, tokens // cell * cell))
        if self._policy.beat_ms and not limits.runs_ahead:
            within = self._cost.tokens_within(self._policy.beat_ms)
            within = _UNMEASURED * cell if within is None else within
            return max(cell, min(within, self._most) // cell * cell)
        return self._most

    def _weight_beside(self, num_decoding: int) -> int:
        """Return the weighted tokens that fit the time with ``num_decoding`` decode rows.

        The allowed time includes these rows. The result is at least a cell.
        """
        allowed = max(self._policy.step_ms, self._cost.decode(num_decoding))
        return max(self._cost.tokens_within(allowed) or 0, self._limits.cell)


def _with_whole_images(request: RequestState, count: int, *, is_first: bool) -> int:
    """Return ``count`` without a cut in a bidirectional image.

    The first chunk may have an image over the token budget.
    """
    start = request.num_computed
    whole = request.whole_images(start + count) - start
    return whole or (request.image_end(start) - start if is_first and count else 0)


def weight_of(start: int, count: int, far: int) -> float:
    """Return the token count at position 0 with the same cost as ``count`` from ``start``.

    Each token counts once more for every ``far`` positions of its context. 0: never.
    """
    return count * (1.0 + (start + count / 2) / far) if far else float(count)


def _count_within(start: int, weight: float, far: int) -> int:
    """Return the maximum token count from ``start`` with a `weight_of` within ``weight``."""
    if weight <= 0:
        return 0
    if weight == math.inf:
        return _ENDLESS
    if not far:
        return int(weight)
    first = 1.0 + start / far
    return int(far * (math.sqrt(first * first + 2 * weight / far) - first) + 1e-6)
