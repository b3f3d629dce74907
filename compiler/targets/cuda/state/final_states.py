"""Final hidden states for a draft layer, in device memory. Excludes the layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.state.token_batch import TokenBatch

RING = 64
"""Retained positions per slot."""
_BLOCK = 512
"""Rows per norm of a prefill: the norm's float32 output needs memory."""

NormFunction = Callable[[Tensor], Tensor]


class FinalStates:
    """A model's final hidden states after the norm, with decode tokens.

    A slot stores position p at entry ``p % RING``. Padding uses the last slot.

    Attributes:
        states: ``[S + 1, RING, hidden]``.
        tokens: Input tokens, int64 ``[S + 1, RING]``.
    """

    def __init__(
        self, num_slots: int, num_tokens: int, width: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """``num_tokens``: Maximum tokens in a captured prefill."""
        self.states = torch.zeros(num_slots + 1, RING, width, dtype=dtype, device=device)
        self.tokens = torch.zeros(num_slots + 1, RING, dtype=torch.int64, device=device)
        self._prompts = torch.zeros(1 + num_tokens, width, dtype=dtype, device=device)
        self._large: Tensor | None = None  # a longer prefill

    def keep(self, states: Tensor, batch: TokenBatch) -> None:
        """Store states and tokens from a decode step."""
        slots = torch.where(batch.positions < 0, len(self.states) - 1, batch.slots)
        at = slots * RING + batch.positions % RING
        self.states.view(-1, states.shape[1]).index_copy_(0, at, states.to(self.states.dtype))
        self.tokens.view(-1).index_copy_(0, at, batch.tokens)

    def keep_prompts(
        self, states: Tensor, normed: NormFunction, batch: TokenBatch, decoding: slice
    ) -> None:
        """Store states from a prefill, with ``decoding`` as in :meth:`keep`.

        ``states``: ``[T, hidden]`` before the norm ``normed``.
        """
        count, kept = len(states), self._prompts
        if count >= len(kept):
            kept = self._large = kept.new_empty(1 + count, kept.shape[1])
        for first in range(0, count, _BLOCK):
            rows = normed(states[first : first + _BLOCK])
            kept[1 + first : 1 + first + len(rows)].copy_(rows)
        if decoding.stop > decoding.start:
            self.keep(kept[1:][decoding], batch.part(decoding))

    def take_prompts(self) -> Tensor:
        """Return a free entry and the last prefill's states, ``[1 + T, hidden]``."""
        large, self._large = self._large, None
        return self._prompts if large is None else large

    def discard_prompts(self) -> None:
        """Discard a prefill whose states nobody took."""
        self._large = None

    def clear(self, slot: int) -> None:
        """Set a slot's states to zero."""
        self.states[slot].zero_()

    def copy(self, source: int, target: int) -> None:
        """Copy a slot's states and tokens to another slot."""
        self.states[target].copy_(self.states[source])
        self.tokens[target].copy_(self.tokens[source])


def final_state_bytes(num_slots: int, num_tokens: int, width: int, value_bytes: int) -> int:
    """Return the memory for :class:`FinalStates` in bytes."""
    entries = (num_slots + 1) * RING
    return value_bytes * width * (entries + 1 + num_tokens) + 8 * entries
