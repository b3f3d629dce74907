"""The rows of a step on the device: which token, where in its sequence, in whose seat."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.seats import send


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens of a step: ``tokens``, ``positions`` (negative: padding) and ``slots``, int64."""

    tokens: Tensor
    positions: Tensor
    slots: Tensor

    @classmethod
    def padding(cls, num_rows: int, device: torch.device) -> Self:
        """Rows that nothing has been uploaded to."""
        tokens, slots = torch.zeros(2, num_rows, dtype=torch.int64, device=device)
        return cls(tokens, torch.full_like(tokens, -1), slots)

    def upload(self, tokens: Tensor, positions: Tensor, slots: Tensor) -> None:
        """The first rows' values, on the host; the other rows become padding."""
        staged = torch.zeros(3, len(self.tokens), dtype=torch.int64)
        staged[1] = -1
        for place, values in zip(staged, (tokens, positions, slots), strict=True):
            place[: len(values)] = values
        kept = (self.tokens, self.positions, self.slots)
        for place, values in zip(kept, send(staged, self.tokens.device), strict=True):
            place.copy_(values)
