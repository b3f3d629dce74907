"""Sampled token transfer to the scheduler: tokens from the device and deferred tokens.

The host selects deferred tokens, or the device does after masks arrive. Rank 0 returns tokens, and
the followers receive them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.collectives.group import RankGroup
from tilewright.compiler.targets.cuda.graphs.capture import Bucket
from tilewright.compiler.targets.cuda.graphs.draft_bucket import DraftRows
from tilewright.compiler.targets.cuda.outputs.accepted_drafts import accept_drafts
from tilewright.compiler.targets.cuda.outputs.deferred_sampling import (
    DeviceChoice,
    choice_of,
    needs_host,
)
from tilewright.compiler.targets.cuda.outputs.pinned_ring import Ends, PinnedRing
from tilewright.compiler.targets.cuda.outputs.pooled_states import read_pooled
from tilewright.compiler.targets.cuda.outputs.sampling_batch import (
    SamplingBatch,
    SamplingFilters,
    drawing_of,
)
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable
from tilewright.compiler.targets.host.choice import HostChoice, SlotState, log_probs
from tilewright.compiler.targets.interface.step import (
    PrefillChunk,
    SampledTokens,
    SamplerOutput,
    Slot,
    Step,
)
from tilewright.compiler.targets.interface.token_masks import NO_MASK, TokenMask


@dataclass(frozen=True, slots=True)
class _LeaderChoice:
    """Slots on a follower whose tokens rank 0 selects."""

    slots: tuple[Slot, ...]


class SampledTokenReader:
    """Collects a step's outputs.

    Args:
        leave: Writes a bucket's tokens back to the tables.
        width: Returns the selectable token count.
    """

    def __init__(
        self,
        table: SlotTable,
        slot_states: dict[Slot, SlotState],
        *,
        leave: Callable[[], None],
        width: Callable[[], int],
        max_rows: int,
    ) -> None:
        self._table, self._slot_states = table, slot_states
        self._leave, self._width = leave, width
        self._ring = PinnedRing(max_rows, table.device)
        self._ends: dict[Slot, frozenset[int]] = {}
        self._waiting: list[HostChoice | DeviceChoice | _LeaderChoice] = []
        self._is_one_pass = True
        self.group: RankGroup | None = None

    @property
    def follows(self) -> bool:
        """Whether this rank is a follower."""
        return self.group is not None and not self.group.leads

    @property
    def is_waiting(self) -> bool:
        """Whether a selection waits for masks."""
        return bool(self._waiting)

    @property
    def num_choosable(self) -> int:
        """Selectable token count."""
        return self._width()

    def open(self, slot: Slot, end_tokens: Sequence[int]) -> None:
        """Store a slot's end tokens if the device tables have no capacity for them."""
        if len(end_tokens) > self._table.num_ends:
            self._ends[slot] = frozenset(end_tokens)

    def close(self, slot: Slot) -> None:
        """Remove a finished slot."""
        self._ends.pop(slot, None)

    def forget(self) -> None:
        """Remove all slots and pending selections."""
        self._waiting.clear()
        self._ends.clear()

    def begin(self, num_passes: int) -> None:
        """Start a step with ``num_passes`` forwards. All forwards write logits to the same
        memory.
        """
        assert not self._waiting, "the last step's choice is still waited for"
        self._is_one_pass = num_passes == 1

    def is_late(self, slots: Sequence[Slot], step: Step) -> bool:
        """Return whether the step itself cannot select the tokens of these slots."""
        return step.masked or not self.may_be_captured(slots, step)

    def may_be_captured(self, slots: Sequence[Slot], step: Step) -> bool:
        """Return whether these slots may join a captured mixed batch.

        The device must select their tokens, immediately or after masks. Several ranks do not
        support masks here.
        """
        if step.logprobs is not None or (step.masked and self.group is not None):
            return False
        return not any(needs_host(self._slot_states[slot].sampling) for slot in slots)

    def repeated(self, slots: tuple[Slot, ...], choice: SamplingBatch) -> SamplerOutput:
        """Start the token transfer of a decode step on a single rank."""
        self.begin(1)
        return SamplerOutput(slots, self._ring.send(choice, len(slots), self._ends_of(slots)))

    def chosen(
        self, slots: tuple[Slot, ...], logits: Tensor, choice: SamplingBatch, step: Step
    ) -> SamplerOutput:
        """Start the selected token transfer to the host."""
        kept = None
        if step.want_logits:
            whole = self._whole(logits)
            kept = None if self.follows else whole.to("cpu", copy=True)
        if self.follows:
            return _nothing(slots)
        read = self._ring.send(choice, len(slots), self._ends_of(slots))
        return SamplerOutput(slots, self._checked(read), None if kept is None else lambda: kept)

    def verified(
        self, rows: DraftRows, bucket: Bucket, step: Step
    ) -> tuple[SamplerOutput, Callable[[], SampledTokens]]:
        """Return a pass's output with drafts, and its emitted tokens' reader. Every rank
        may read them.
        """
        token_slots, kept = rows.token_slots, None
        count = len(token_slots)
        if step.logprobs is not None:
            whole = self._whole(bucket.logits[:count])
            kept = None if self.follows else whole.to("cpu", copy=True)
        choice, num_top = bucket.choice, None if self.follows else step.logprobs
        sampled = self._ring.send(choice, count, self._ends_of(token_slots))

        @cache
        def read() -> SampledTokens:
            return accept_drafts(sampled(), rows.drafts, logits=kept, num_top=num_top)

        checked = self._checked(read)
        if self.follows:
            return _nothing(rows.slots), checked
        return SamplerOutput(rows.slots, checked), checked

    def verified_on_host(
        self, rows: DraftRows, bucket: Bucket, step: Step
    ) -> tuple[SamplerOutput, list[int], list[int]]:
        """Sample a pass with drafts on the host. Return its output, the number of emitted
        tokens by slot, and the last of them.
        """
        slots, logits = rows.slots, self._whole(bucket.logits[: len(rows.token_slots)])
        output, counts, tokens = _nothing(slots), [0] * len(slots), [0] * len(slots)
        if not self.follows:
            drafts = dict(zip(slots, rows.drafts, strict=True))
            values = logits.to("cpu", copy=True).numpy()
            choice = HostChoice(slots, values, step.logprobs, None, self._width(), drafts)
            choice.choose(self._slot_states, NO_MASK)
            chosen = choice.read()
            counts = [*(chosen.counts or ())]
            tokens = [chosen.tokens[end - 1] for end in accumulate(counts)]
            output = SamplerOutput(slots, choice.read)
        if self.group is not None:
            both = torch.tensor([*counts, *tokens], device=logits.device)
            self.group.share(both)
            counts, tokens = both.view(2, -1).tolist()
        return output, counts, tokens

    def pooled(self, parts: Sequence[Tensor], count: int) -> SamplerOutput:
        """Return the states for a chunk with ``count`` tokens, from its parts' `pool_rows`."""
        if self.follows:
            return _nothing(())
        total = torch.stack([each[0] for each in parts]).sum(0)
        both = torch.stack((total, parts[-1][1]))
        return SamplerOutput((), self._checked(read_pooled(both, count)))

    def masked(
        self,
        slots: tuple[Slot, ...],
        bucket: Bucket,
        step: Step,
        drawing: SamplingFilters | None,
    ) -> SamplerOutput:
        """Return an output that waits for masks, then selects again from a bucket's logits.

        The slots store the new tokens in place of the forward's tokens.
        """
        logits = bucket.logits[: len(slots)]
        if not self._is_one_pass:
            return self._masked(slots, logits, step)
        again = partial(bucket.choose_again, drawing)
        kept = logits.clone() if step.want_logits else None
        return self._waits(slots, logits, bucket.choice, again, kept)

    def late(
        self, slots: tuple[Slot, ...], logits: Tensor, step: Step, echo: PrefillChunk | None = None
    ) -> SamplerOutput:
        """Return an output with deferred selection.

        The host selects, and the tokens return to the device before the next step. If masks are the
        only reason, the device selects: masks are computed during this step.

        Args:
            echo: A chunk with log probabilities for its prompt tokens.
        """
        logits = self._whole(logits)
        if self.follows:
            return self._from_leader(slots, step)
        by_host = any(needs_host(self._slot_states[slot].sampling) for slot in slots)
        if step.masked and step.logprobs is None and echo is None and not by_host:
            return self._masked(slots, logits, step)
        kept = logits.to("cpu", copy=True)
        found = None
        if echo is not None and step.logprobs is not None:
            found = log_probs(kept[: len(echo.echoed)], echo.echoed, step.logprobs)
        is_prompt = len(kept) != len(slots)
        last = kept[-1:].repeat(len(slots), 1) if is_prompt else kept
        choice = HostChoice(slots, last.numpy(), step.logprobs, found, self._width())
        if step.masked:
            self._waiting.append(choice)
        else:
            self._finish(choice, NO_MASK)
        return SamplerOutput(slots, choice.read, (lambda: kept) if step.want_logits else None)

    def choose(self, allowed: TokenMask) -> None:
        """Make the pending selections with the masks. A follower receives the tokens."""
        for choice in self._waiting:
            self._finish(choice, allowed)
        self._waiting.clear()

    def _from_leader(self, slots: tuple[Slot, ...], step: Step) -> SamplerOutput:
        choice = _LeaderChoice(slots)
        if step.masked:
            self._waiting.append(choice)
        else:
            self._finish(choice, NO_MASK)
        return _nothing(slots)

    def _masked(self, slots: tuple[Slot, ...], logits: Tensor, step: Step) -> SamplerOutput:
        """Return an output with selection outside of graphs, from a private copy of the logits."""
        chosen_for = [self._slot_states[slot] for slot in slots]
        lengths = [each.length for each in chosen_for]
        choice = choice_of(self._table, slots, lengths, self._width())
        drawing = drawing_of(each.sampling for each in chosen_for)
        is_prompt = len(logits) != len(slots)
        rows = logits[-1:].repeat(len(slots), 1) if is_prompt else logits.clone()
        kept = logits.clone() if step.want_logits else None

        def again() -> None:
            self._leave()
            choice.apply(rows, drawing)
            self._table.give_back(self._table.index(slots), choice.tokens)

        return self._waits(slots, rows, choice, again, kept)

    def _waits(
        self,
        slots: tuple[Slot, ...],
        logits: Tensor,
        choice: SamplingBatch,
        again: Callable[[], None],
        kept: Tensor | None,
    ) -> SamplerOutput:
        ends = self._ends_of(slots)
        late = DeviceChoice(slots, logits, choice, again, self._ring, ends)
        self._waiting.append(late)
        return SamplerOutput(slots, late.read, None if kept is None else lambda: kept.to("cpu"))

    def _finish(
        self, choice: HostChoice | DeviceChoice | _LeaderChoice, allowed: TokenMask
    ) -> None:
        if isinstance(choice, HostChoice):
            choice.choose(self._slot_states, allowed)
        if not choice.slots:
            return
        if isinstance(choice, DeviceChoice):
            choice.choose(allowed)
        else:
            self._leave()
            if isinstance(choice, HostChoice):
                self._table.put(choice.slots, choice.read().tokens)
        if self.group is not None:
            at = self._table.index(choice.slots)
            tokens = self._table.tokens.index_select(0, at)
            self.group.share(tokens)
            self._table.give_back(at, tokens)

    def _whole(self, logits: Tensor) -> Tensor:
        return logits if self.group is None else self.group.whole(logits)

    def _ends_of(self, slots: tuple[Slot, ...]) -> Ends:
        """Return long end-token sets by row index. The device checks short sets only."""
        if not self._ends:
            return {}
        return {at: self._ends[slot] for at, slot in enumerate(slots) if slot in self._ends}

    def _checked(self, read: Callable[[], SampledTokens]) -> Callable[[], SampledTokens]:
        """Add a check for failed ranks, which would make tokens invalid."""
        group = self.group
        if group is None:
            return read

        def checked() -> SampledTokens:
            found = read()
            group.check()
            return found

        return checked


def _nothing(slots: tuple[Slot, ...]) -> SamplerOutput:
    """Return an output whose tokens are on another rank."""

    def read() -> SampledTokens:
        raise AssertionError("rank 0 answers")

    return SamplerOutput(slots, read)
