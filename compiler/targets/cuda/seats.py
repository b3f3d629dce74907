"""The device's table of seats: what each reads next, and how its tokens are chosen.

A decode bucket gathers the rows of its seats when they change, and gives their tokens back when it
is left; between, they stay in the bucket and no row of the table is touched. Where a seat stands is
the host's to know: it goes on by counts that need no token to be read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tilewright.compiler.targets.step import Choosing, Seat

_FLOATS = ("temperature", "top_p")
_INTEGERS = ("top_k", "seeds")
PARAMETERS = (*_FLOATS, *_INTEGERS, "end_tokens")
_MAX_TOP_K = (1 << 31) - 1


class SeatTable:
    """Tensors with a row a seat, and one more that padding reads and writes.

    ``tokens``, ``top_k`` and ``seeds [S + 1]`` int64; ``temperature`` and ``top_p [S + 1]``
    float32; ``end_tokens [S + 1, E]`` int64, padded with -1.
    """

    def __init__(self, num_seats: int, num_ends: int, device: torch.device) -> None:
        self.device = device
        self.padding = num_seats
        self.tokens = torch.zeros(num_seats + 1, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(num_seats + 1, dtype=torch.float32, device=device)
        self.top_p = torch.ones_like(self.temperature)
        self.top_k, self.seeds = torch.zeros_like(self.tokens), torch.zeros_like(self.tokens)
        self.end_tokens = torch.full((num_seats + 1, num_ends), -1, device=device)

    @property
    def num_ends(self) -> int:
        """End tokens that a seat has room for."""
        return self.end_tokens.shape[1]

    def widen(self, num_ends: int) -> None:
        """Make room for more end tokens a seat; what reads the tensor must look for it again."""
        fresh = torch.full((len(self.tokens), num_ends), -1, device=self.device)
        fresh[:, : self.num_ends] = self.end_tokens
        self.end_tokens = fresh

    def open(self, opened: Mapping[Seat, Choosing]) -> None:
        """Write how tokens are chosen for seats that begin."""
        if not opened:
            return
        width, chosen = self.num_ends, list(opened.values())
        padded = [[*c.end_tokens, *[-1] * (width - len(c.end_tokens))] for c in chosen]
        at = self.index(list(opened))
        values = {
            "temperature": torch.tensor([c.temperature for c in chosen], dtype=torch.float32),
            "top_p": torch.tensor([c.top_p for c in chosen], dtype=torch.float32),
            "top_k": torch.tensor([min(c.top_k, _MAX_TOP_K) for c in chosen]),
            "seeds": torch.tensor([_signed(c.seed) for c in chosen]),
            "end_tokens": torch.tensor(padded, dtype=torch.int64),
        }
        for name, rows in values.items():
            getattr(self, name).index_copy_(0, at, send(rows, self.device))

    def index(self, seats: Sequence[Seat], size: int | None = None) -> Tensor:
        """Row numbers of seats on the device, int64; padded to ``size`` with the row of padding."""
        wanted = [*seats, *[self.padding] * ((size or len(seats)) - len(seats))]
        return send(torch.tensor(wanted, dtype=torch.int64), self.device)

    def hold(self, seat: Seat, token: Tensor) -> None:
        """A seat reads ``token [1]``, which is on the device, next."""
        self.tokens[seat : seat + 1].copy_(token)

    def put(self, seats: Sequence[Seat], tokens: Sequence[int]) -> None:
        """Seats read these tokens next."""
        both = send(torch.tensor([seats, tokens], dtype=torch.int64), self.device)
        self.tokens.index_copy_(0, *both)

    def give_back(self, at: Tensor, tokens: Tensor) -> None:
        """Take the tokens of a bucket's rows back; what padding read is of no account."""
        self.tokens.index_copy_(0, at, tokens)


def send(values: Tensor, device: torch.device) -> Tensor:
    """Values of the host behind all that is queued on the device, without waiting for it.

    The pinned memory between is torch's own, which keeps it until the copy is done.
    """
    if device.type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def _signed(seed: int) -> int:
    """The same 64 bits as a signed integer."""
    seed &= (1 << 64) - 1
    return seed - (1 << 64) if seed >> 63 else seed
