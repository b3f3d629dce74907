"""`HostChoice`: samples a step's rows on the host, with the slot state.

Excludes forwards.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.sampling.rng import log_probabilities
from tilewright.compiler.sampling.sampler import SamplingRow, choose_tokens
from tilewright.compiler.targets.interface.step import (
    END_TOKEN,
    GOES_ON,
    NOT_A_NUMBER,
    ImageId,
    LogProbs,
    SampledTokens,
    Slot,
)
from tilewright.compiler.targets.interface.token_masks import TokenMask

if TYPE_CHECKING:
    from numpy.typing import ArrayLike


@dataclass(slots=True)
class SlotState:
    """Host-side state of an open slot.

    Attributes:
        sampling: Sampling parameters.
        prompt: Tokens before the output.
        length: Positions in the state.
        token: Next token to read. None before the first sample.
        counts: Output tokens with their occurrence count, including ``token``.
        is_cut: Per-sequence state belongs to a longer sequence. A snapshot must replace it before
            use.
        rotary_delta: See `OpenSlot`.
        images: Images with cross-attention from decoded tokens.
        hidden: Last final hidden state of a swapped slot, for a draft layer. None: unknown.
    """

    sampling: SamplingParams
    prompt: tuple[int, ...]
    length: int = 0
    token: int | None = None
    counts: dict[int, int] = field(default_factory=dict)
    is_cut: bool = False
    rotary_delta: int = 0
    images: tuple[ImageId, ...] = ()
    hidden: Any = None

    def hold(self, token: int) -> None:
        """Store a sampled token as the next input."""
        self.token = token
        self.counts[token] = self.counts.get(token, 0) + 1

    def force(self, token: int) -> None:
        """Replace the next input."""
        if self.token is not None:
            self.counts[self.token] -= 1
        self.hold(token)

    def row(self) -> SamplingRow:
        """Return the sampler's input for the next token."""
        return SamplingRow(self.sampling, self.length, self.prompt, self.counts)


@dataclass(slots=True)
class HostChoice:
    """Rows for sampling on the host, immediately or after the masks arrive.

    Attributes:
        slots: The slots.
        logits: float32 ``[R, V]``. Only the first ``num_choosable`` columns are sampled.
        num_top: Value of `Step.logprobs`.
        echo: Value for :class:`SampledTokens`.
        num_choosable: Real token count.
        drafts: Draft tokens by slot. A slot with k drafts has k + 1 rows.
        chosen: The result. None before sampling.
    """

    slots: tuple[Slot, ...]
    logits: np.ndarray
    num_top: int | None
    echo: list[LogProbs] | None
    num_choosable: int
    drafts: Mapping[Slot, tuple[int, ...]] = field(default_factory=dict)
    chosen: SampledTokens | None = None

    def choose(self, slot_states: Mapping[Slot, SlotState], allowed: TokenMask) -> None:
        """Sample a token per slot and store it as the slot's next input."""
        chosen_for = [slot_states[slot] for slot in self.slots]
        width = self.num_choosable
        masks: list[np.ndarray | None] = [None] * len(self.slots)
        if allowed.slots:
            masks = [allowed.flags(slot, width) for slot in self.slots]
        rows = [slot_state.row() for slot_state in chosen_for]
        first = self._first_rows()
        values = self.logits[:, :width]
        tokens, is_number = choose_tokens(values[first], rows, masks)
        why = []
        for slot_state, token, good in zip(chosen_for, tokens, is_number, strict=True):
            slot_state.hold(token)
            why.append(_why(slot_state, token, good))
        counts, kept = None, self.logits
        if self.drafts:
            tokens, why, counts, used = self._verify(values, chosen_for, first, tokens, why)
            kept = self.logits[used]
        scores = None
        if self.num_top is not None:
            scores = log_probs(kept, tokens, self.num_top)
        self.chosen = SampledTokens(tokens, why, scores, self.echo, counts=counts)

    def _first_rows(self) -> np.ndarray | slice:
        """Return the first of each slot's rows."""
        if not self.drafts:
            return slice(None)
        sizes = [1 + len(self.drafts.get(slot, ())) for slot in self.slots]
        return np.cumsum([0, *sizes[:-1]])

    def _verify(
        self,
        values: np.ndarray,
        slot_states: Sequence[SlotState],
        first: np.ndarray | slice,
        sampled: list[int],
        reasons: list[int],
    ) -> tuple[list[int], list[int], list[int], list[int]]:
        """Sample further rows while the drafts are right. Return the emitted tokens and their
        finish state, the number per slot, and the rows.
        """
        assert isinstance(first, np.ndarray)
        tokens, why, counts, used = list[int](), list[int](), list[int](), list[int]()
        for index, (slot, slot_state) in enumerate(zip(self.slots, slot_states, strict=True)):
            at, start = int(first[index]), len(tokens)
            token, reason = sampled[index], reasons[index]
            tokens.append(token)
            why.append(reason)
            for draft in self.drafts.get(slot, ()):
                if draft != token:
                    break
                at, slot_state.length = at + 1, slot_state.length + 1
                (token,), (good,) = choose_tokens(values[at : at + 1], [slot_state.row()])
                slot_state.hold(token)
                tokens.append(token)
                why.append(_why(slot_state, token, good))
            counts.append(len(tokens) - start)
            used += range(at + 1 - counts[-1], at + 1)
        return tokens, why, counts, used

    def read(self) -> SampledTokens:
        """Return the sampled tokens with their finish state."""
        assert self.chosen is not None, "the choice still waits for its masks"
        return self.chosen


def _why(slot_state: SlotState, token: int, is_number: bool) -> int:
    if not is_number:
        return NOT_A_NUMBER
    return END_TOKEN if token in slot_state.sampling.stop_token_ids else GOES_ON


def log_probs(logits: ArrayLike, tokens: Sequence[int], num_top: int) -> list[LogProbs]:
    """Return log probabilities for the tokens of all rows and for their ``num_top`` most probable
    tokens.
    """
    return [LogProbs(*values) for values in log_probabilities(logits, tokens, num_top)]
