"""Device tables of slots: the next input token and the sampling parameters.

A decode bucket gathers its slots' entries after a change and writes tokens back at its end. Steps
between do not access the table. The host computes lengths without reading tokens.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.cuda.kernels.common import driver
from tilewright.compiler.targets.interface.step import Slot

_TEMPERATURE, _TOP_P, _TOP_K, _SEED, _MIN_P, _NUM_NUMBERS = range(6)


class Parameters:
    """Sampling parameters for R rows. Initially greedy.

    All parameters are columns of ``words``, so one copy writes or gathers them.

    Attributes:
        words: int64 ``[R, 5 + E]``.
        temperature: float64 ``[R]`` with float32 values.
        top_p, min_p: float64 ``[R]``.
        top_k, seeds: int64 ``[R]``.
        end_tokens: int64 ``[R, E]``, padded with -1.
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
    """Tables with an entry for each slot and a last entry for padding.

    Attributes:
        tokens: Next input token, int64 ``[S + 1]``.
        parameters: Sampling parameters for S + 1 entries.
    """

    def __init__(self, num_slots: int, num_ends: int, device: torch.device) -> None:
        self.device = device
        self.padding = num_slots
        self.tokens = torch.zeros(num_slots + 1, dtype=torch.int64, device=device)
        self.parameters = Parameters(num_slots + 1, num_ends, device)
        self._rows = torch.arange(num_slots + 1, device=device)
        self._words = self.parameters.words.cpu().numpy().copy()  # this object is the only writer

    @property
    def num_ends(self) -> int:
        """Maximum end token count for a slot."""
        return self.parameters.end_tokens.shape[1]

    def open(self, opened: Mapping[Slot, SamplingParams]) -> None:
        """Write the sampling parameters of new slots, with as many end tokens as fit.

        One copy writes the range that contains all slots. Unchanged parameters need no copy.
        """
        if not opened:
            return
        first = min(opened)
        stored = self._words[first : max(opened) + 1]
        words = stored.copy()
        for slot, c in opened.items():
            row = words[slot - first]
            fractions = row.view(np.float64)
            row[_TOP_K], row[_SEED] = c.top_k, c.seed
            fractions[_TEMPERATURE] = np.float32(c.temperature)
            fractions[_TOP_P], fractions[_MIN_P] = c.top_p, c.min_p
            ends = c.stop_token_ids[: self.num_ends]
            row[_NUM_NUMBERS : _NUM_NUMBERS + len(ends)] = ends
            row[_NUM_NUMBERS + len(ends) :] = -1
        if words.tobytes() != stored.tobytes():
            send_into(self.parameters.words, words, first=first * words.shape[1])
            stored[:] = words

    def index(self, slots: Sequence[Slot], size: int | None = None) -> Tensor:
        """Return the slots as int64 on the device, padded to ``size`` with the padding entry."""
        if len(slots) == 1 and (size or 1) == 1:
            return self._rows[slots[0] : slots[0] + 1]  # the index is on the device already
        wanted = [*slots, *[self.padding] * ((size or len(slots)) - len(slots))]
        return send(np.array(wanted, dtype=np.int64), self.device)

    def hold(self, slot: Slot, token: Tensor) -> None:
        """Set a slot's next input to ``token [1]``, a device tensor."""
        self.tokens[slot : slot + 1].copy_(token)

    def put(self, slots: Sequence[Slot], tokens: Sequence[int]) -> None:
        """Set the next input tokens of slots from the host."""
        both = send(np.array([slots, tokens], dtype=np.int64), self.device)
        self.tokens.index_copy_(0, *both)

    def agreed(self, lengths: Mapping[Slot, int]) -> bytes:
        """Return slots, lengths and next tokens as bytes. They must be equal on all ranks."""
        tokens = self.tokens.tolist()
        return repr(sorted((int(s), length, tokens[s]) for s, length in lengths.items())).encode()

    def give_back(self, at: Tensor, tokens: Tensor) -> None:
        """Write the tokens of a bucket's rows back. The padding entry may have any token."""
        self.tokens.index_copy_(0, at, tokens)


def send(values: Tensor | np.ndarray, device: torch.device) -> Tensor:
    """Copy host values to the device after all queued work, without a wait.

    The caller may change the values after the call.
    """
    if device.type != "cuda":
        return torch.tensor(values) if isinstance(values, np.ndarray) else values
    return _staging(device).send(values)


def send_into(place: Tensor, values: np.ndarray, *, first: int = 0) -> None:
    """Copy host values to a contiguous tensor of their type; see :func:`send`.

    ``first``: flat index of the first value. A slice of a tensor takes longer than the copy.
    """
    num_bytes, device = values.nbytes, place.device
    if not place.is_cuda or num_bytes > _Staging._HALF:
        place.view(-1)[first : first + values.size].copy_(send(values, device).reshape(-1))
    elif num_bytes:
        skipped = first * values.itemsize
        assert place.is_contiguous() and skipped + num_bytes <= place.nbytes
        address = _staging(device).address_of(values)
        target = place.data_ptr() + skipped
        driver.copy_to_device(target, address, num_bytes, device=device.index or 0)


class _Staging:
    """Pinned memory for copies to the device. It has two halves in turn, reused after their copies
    end.
    """

    _HALF = 1 << 21

    def __init__(self, device: torch.device) -> None:
        self._device, self._turn, self._used = device, 0, 0
        is_gpu = device.type == "cuda"
        memory = torch.empty(2 * self._HALF, dtype=torch.uint8, pin_memory=is_gpu)
        self._bytes = memory.numpy()  # torch detects pinned memory by its address
        self._address = memory.data_ptr()
        self._left: list[torch.cuda.Event | None] = [None, None]

    def send(self, values: Tensor | np.ndarray) -> Tensor:
        """Return a copy on the device."""
        return self.staged(values).to(self._device, non_blocking=True)

    def staged(self, values: Tensor | np.ndarray) -> Tensor:
        """Return a copy in pinned memory, to send immediately. Large values get new memory."""
        given = values.numpy() if isinstance(values, Tensor) else values
        if given.nbytes > self._HALF:
            return torch.from_numpy(np.ascontiguousarray(given)).pin_memory()
        return torch.from_numpy(self._written(given)[0])

    def address_of(self, values: np.ndarray) -> int:
        """Return the address of a copy in pinned memory, as :meth:`staged`. It fits a half."""
        return self._address + self._written(values)[1]

    def _written(self, values: np.ndarray) -> tuple[np.ndarray, int]:
        """Return a copy in pinned memory and its first byte."""
        num_bytes = values.nbytes
        assert num_bytes <= self._HALF
        if self._used + num_bytes > self._HALF:
            self._enter_other()
        first = self._turn * self._HALF + self._used
        self._used += -(-num_bytes // 64) * 64
        copied: np.ndarray = np.ndarray(values.shape, values.dtype, self._bytes, first)
        copied[...] = values
        return copied, first

    def _enter_other(self) -> None:
        """Change to the other half and wait for its previous copies."""
        self._left[self._turn] = left = torch.cuda.Event()
        left.record()
        self._turn, self._used = 1 - self._turn, 0
        if (event := self._left[self._turn]) is not None:
            event.synchronize()


@functools.cache
def _staging(device: torch.device) -> _Staging:
    """Return a device's staging memory, shared by all executables of a process."""
    return _Staging(device)
