"""The device's table of slots: what each reads next, and how its tokens are chosen.

A decode bucket gathers the rows of its slots when they change, and gives their tokens back when it
is left; between, they stay in the bucket and no row of the table is touched. Where a slot stands is
the host's to know: it goes on by counts that need no token to be read.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.step import Slot

_TEMPERATURE, _TOP_P, _TOP_K, _SEED, _MIN_P, _NUM_NUMBERS = range(6)


class Parameters:
    """How the tokens of R rows are chosen, greedily until told otherwise.

    ``words [R, 5 + E]`` (int64) holds them all, so that one copy writes or gathers them; the others
    are its columns: ``temperature [R]`` float64 (values of float32), ``top_p`` and ``min_p [R]``
    float64, ``top_k`` and ``seeds [R]`` int64, ``end_tokens [R, E]`` int64, padded with -1.
    """

    def __init__(self, num_rows: int, num_ends: int, device: torch.device) -> None:
        self.words = torch.zeros(
            num_rows, _NUM_NUMBERS + num_ends, dtype=torch.int64, device=device
        )
        self.temperature = self.words[:, _TEMPERATURE].view(torch.float64)
        self.top_p = self.words[:, _TOP_P].view(torch.float64)
        self.min_p = self.words[:, _MIN_P].view(torch.float64)
        self.top_k, self.seeds = self.words[:, _TOP_K], self.words[:, _SEED]
        self.end_tokens = self.words[:, _NUM_NUMBERS:]
        self.top_p.fill_(1.0)
        self.end_tokens.fill_(-1)


class SlotTable:
    """A row a slot, and one more that padding reads and writes.

    ``tokens [S + 1]`` (int64): what each reads next; ``parameters``: of S + 1 rows.
    """

    def __init__(self, num_slots: int, num_ends: int, device: torch.device) -> None:
        self.device = device
        self.padding = num_slots
        self.tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.parameters = Parameters(num_slots + 1, num_ends, device)
        self._rows = torch.arange(num_slots + 1, device=device)
        self._words = self.parameters.words.cpu().numpy().copy()  # nobody else writes them

    @property
    def num_ends(self) -> int:
        """The number of end tokens that a slot has room for."""
        return self.parameters.end_tokens.shape[1]

    def open(self, opened: Mapping[Slot, SamplingParams]) -> None:
        """Write how tokens are chosen for slots that begin; end tokens as far as there is room.

        One copy writes them all, with the rows between them as they are; none does where all are
        there already.
        """
        if not opened:
            return
        first = min(opened)
        held = self._words[first : max(opened) + 1]
        words = held.copy()
        for slot, c in opened.items():
            row = words[slot - first]
            fractions = row.view(np.float64)
            row[_TOP_K], row[_SEED] = c.top_k, c.seed
            fractions[_TEMPERATURE] = np.float32(c.temperature)
            fractions[_TOP_P], fractions[_MIN_P] = c.top_p, c.min_p
            ends = c.stop_token_ids[: self.num_ends]
            row[_NUM_NUMBERS : _NUM_NUMBERS + len(ends)] = ends
            row[_NUM_NUMBERS + len(ends) :] = -1
        if words.tobytes() != held.tobytes():
            send_into(self.parameters.words[first : first + len(words)], words)
            held[:] = words

    def index(self, slots: Sequence[Slot], size: int | None = None) -> Tensor:
        """Row numbers of slots on the device, int64; padded to ``size`` with the row of padding."""
        if len(slots) == 1 and (size or 1) == 1:
            return self._rows[slots[0] : slots[0] + 1]  # it is there
        wanted = [*slots, *[self.padding] * ((size or len(slots)) - len(slots))]
        return send(np.array(wanted, dtype=np.int64), self.device)

    def hold(self, slot: Slot, token: Tensor) -> None:
        """A slot reads ``token [1]``, which is on the device, next."""
        self.tokens[slot : slot + 1].copy_(token)

    def put(self, slots: Sequence[Slot], tokens: Sequence[int]) -> None:
        """Note the tokens that slots read in their next step, where the host knows them."""
        both = send(np.array([slots, tokens], dtype=np.int64), self.device)
        self.tokens.index_copy_(0, *both)

    def agreed(self, lengths: Mapping[Slot, int]) -> bytes:
        """Slots, where they stand and what each reads next: all ranks have them alike."""
        tokens = self.tokens.tolist()
        return repr(sorted((int(s), length, tokens[s]) for s, length in lengths.items())).encode()

    def give_back(self, at: Tensor, tokens: Tensor) -> None:
        """Take the tokens of a bucket's rows back; what padding read is of no account."""
        self.tokens.index_copy_(0, at, tokens)


def send(values: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """Values of the host behind all that is queued on the device, without waiting for it.

    They may be changed as soon as this returns.
    """
    if device.type != "cuda":
        return torch.tensor(values) if isinstance(values, np.ndarray) else values
    return _staging(device).send(values)


def send_into(place: Tensor, values: np.ndarray) -> None:
    """What :func:`send` does, into memory that is there."""
    if place.device.type != "cuda":
        place.copy_(torch.from_numpy(values))
    else:
        place.copy_(_staging(place.device).staged(values), non_blocking=True)


class _Staging:
    """Pinned memory that what is sent goes through, in turn: halves, each used again once its last
    copies are done.
    """

    _HALF = 1 << 21

    def __init__(self, device: torch.device) -> None:
        self._device, self._turn, self._used = device, 0, 0
        is_gpu = device.type == "cuda"
        memory = torch.empty(2 * self._HALF, dtype=torch.uint8, pin_memory=is_gpu)
        self._bytes = memory.numpy()  # pinned as well: that goes by the address
        self._left: list[torch.cuda.Event | None] = [None, None]

    def send(self, values: Tensor | np.ndarray) -> Tensor:
        """A copy on the device."""
        return self.staged(values).to(self._device, non_blocking=True)

    def staged(self, values: Tensor | np.ndarray) -> Tensor:
        """A copy of up to a half of the memory in pinned memory, which has to be sent at once; one
        of larger values is in fresh memory.
        """
        given = values.numpy() if isinstance(values, Tensor) else values
        if given.nbytes > self._HALF:
            return torch.from_numpy(np.ascontiguousarray(given)).pin_memory()
        if self._used + given.nbytes > self._HALF:
            self._enter_other()
        first = self._turn * self._HALF + self._used
        self._used += -(-given.nbytes // 64) * 64
        kept: np.ndarray = np.ndarray(given.shape, given.dtype, self._bytes, first)
        kept[...] = given
        return torch.from_numpy(kept)

    def _enter_other(self) -> None:
        """Leave a half for the other, whose last copies must be done."""
        self._left[self._turn] = left = torch.cuda.Event()
        left.record()
        self._turn, self._used = 1 - self._turn, 0
        if (event := self._left[self._turn]) is not None:
            event.synchronize()


@functools.cache
def _staging(device: torch.device) -> _Staging:
    """The memory that is staged through for a device, by all executables of a process."""
    return _Staging(device)
