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

_MAX_TOP_K = (1 << 31) - 1
_TEMPERATURE, _TOP_P, _TOP_K, _SEED, _MIN_P, _NUM_NUMBERS = range(6)


class Parameters:
    """How the tokens of R rows are chosen, greedily until told otherwise.

    ``words [R, 5 + E]`` (int64) holds them all, so that one copy writes or gathers them; the others
    are its columns: ``temperature [R]`` float64 (values of float32), ``top_p`` and ``min_p [R]``
    float64, ``top_k`` and ``seeds [R]`` int64, ``end_tokens [R, E]`` int64, padded with -1.
    """

    def __init__(self, num_rows: int, num_ends: int, device: torch.device) -> None:
        self.words = torch.zeros(num_rows, _NUM_NUMBERS + num_ends, dtype=torch.int64).to(device)
        self.temperature = self.words[:, _TEMPERATURE].view(torch.float64)
        self.top_p = self.words[:, _TOP_P].view(torch.float64)
        self.min_p = self.words[:, _MIN_P].view(torch.float64)
        self.top_k, self.seeds = self.words[:, _TOP_K], self.words[:, _SEED]
        self.end_tokens = self.words[:, _NUM_NUMBERS:]
        self.top_p.fill_(1.0)
        self.end_tokens.fill_(-1)


class SeatTable:
    """A row a seat, and one more that padding reads and writes.

    ``tokens [S + 1]`` (int64): what each reads next; ``parameters``: of S + 1 rows.
    """

    def __init__(self, num_seats: int, num_ends: int, device: torch.device) -> None:
        self.device = device
        self.padding = num_seats
        self.tokens = torch.zeros(num_seats + 1, dtype=torch.int64, device=device)
        self.parameters = Parameters(num_seats + 1, num_ends, device)
        self._rows = torch.arange(num_seats + 1, device=device)

    @property
    def num_ends(self) -> int:
        """End tokens that a seat has room for."""
        return self.parameters.end_tokens.shape[1]

    def open(self, opened: Mapping[Seat, Choosing]) -> None:
        """Write how tokens are chosen for seats that begin; end tokens as far as there is room."""
        if not opened:
            return
        chosen = opened.values()
        rows = Parameters(len(opened), self.num_ends, torch.device("cpu"))
        rows.temperature[:] = torch.tensor([c.temperature for c in chosen], dtype=torch.float32)
        rows.top_p[:] = torch.tensor([c.top_p for c in chosen], dtype=torch.float64)
        rows.min_p[:] = torch.tensor([c.min_p for c in chosen], dtype=torch.float64)
        rows.top_k[:] = torch.tensor([min(c.top_k, _MAX_TOP_K) for c in chosen])
        rows.seeds[:] = torch.tensor([_signed(c.seed) for c in chosen])
        for row, c in zip(rows.end_tokens, chosen, strict=True):
            ends = c.end_tokens[: self.num_ends]
            row[: len(ends)] = torch.tensor(ends, dtype=torch.int64)
        both = send(torch.cat([torch.tensor(list(opened))[:, None], rows.words], 1), self.device)
        self.parameters.words.index_copy_(0, both[:, 0], both[:, 1:])

    def index(self, seats: Sequence[Seat], size: int | None = None) -> Tensor:
        """Row numbers of seats on the device, int64; padded to ``size`` with the row of padding."""
        if len(seats) == 1 and (size or 1) == 1:
            return self._rows[seats[0] : seats[0] + 1]  # it is there
        wanted = [*seats, *[self.padding] * ((size or len(seats)) - len(seats))]
        return send(torch.tensor(wanted, dtype=torch.int64), self.device)

    def hold(self, seat: Seat, token: Tensor) -> None:
        """A seat reads ``token [1]``, which is on the device, next."""
        self.tokens[seat : seat + 1].copy_(token)

    def put(self, seats: Sequence[Seat], tokens: Sequence[int]) -> None:
        """Note the tokens that seats read in their next step, where the host knows them."""
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
