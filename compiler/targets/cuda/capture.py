"""Decode steps and short prompts as CUDA graphs, each for a bucket of rows; on a CPU, run as they
stand. Tokens and positions go from one decode step to the next on the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.kernels.choose import choose, num_keys, sample
from tilewright.compiler.targets.cuda.rows import Rows
from tilewright.compiler.targets.cuda.seats import Parameters, SeatTable
from tilewright.compiler.targets.cuda.steps import LIBRARY_ATTENTION, Steps
from tilewright.compiler.targets.cuda.trials import read_trials
from tilewright.compiler.targets.program.instructions import Mixer, Plan
from tilewright.compiler.targets.step import NOT_A_NUMBER, Seat

_PROMPTS = (16, 32, 64, 128, 256, 512)
_LONG_PROMPTS = (768, 1024, 1536, 2048)
"""Of plans with mixers: a prompt is a thousand launches, longer for the host than for the GPU."""


def prompt_buckets(plan: Plan) -> tuple[int, ...]:
    """Tokens of the prompts that are captured, padding included."""
    return (*_PROMPTS, *_LONG_PROMPTS) if has_mixers(plan) else _PROMPTS


def decode_buckets(max_batch: int, most: int | None = None) -> tuple[int, ...]:
    """Rows of the decode steps that are captured, padding included: powers of two up to ``most``
    (None: as :class:`.trials.Trials` says), the last of them enough for ``max_batch`` where one is.
    """
    most = most or read_trials().rows
    sizes = (1 << power for power in range(most.bit_length()))
    return tuple(size for size in sizes if size < 2 * max_batch)


def has_mixers(plan: Plan) -> bool:
    """Whether a plan has experts or linear attention."""
    return any(isinstance(each, Mixer) for each in plan.instructions)


@dataclass(frozen=True, slots=True)
class Choice:
    """How the tokens of B rows are chosen, and where they go: tensors that a graph reads.

    All are ``[B]`` but ``parameters``, of B rows. ``tokens`` and ``why`` (see :class:`Chosen`) are
    the results; ``positions``: where the chosen tokens will stand; ``width``: how many of a row's
    first logits are chosen from.
    """

    tokens: Tensor
    why: Tensor
    parameters: Parameters
    positions: Tensor
    keys: Tensor
    width: int

    def gather(self, table: SeatTable, at: Tensor) -> None:
        """The parameters of the seats in the rows ``at [B]`` of the table."""
        torch.index_select(table.parameters.words, 0, at, out=self.parameters.words)

    def apply(self, logits: Tensor, *, is_greedy: bool, advancing: Tensor | None = None) -> None:
        """Choose from ``logits [B, V]``; positions ``advancing [B]`` go on by one, but padding."""
        logits = logits[:, : self.width]
        choose(
            self.tokens,
            self.why,
            logits,
            end_tokens=self.parameters.end_tokens,
            scratch=self.keys,
            positions=advancing,
        )
        if is_greedy:
            return
        by = self.parameters
        temperature, top_p = by.temperature.float(), by.top_p.float()
        chosen = sample(logits, temperature, by.top_k, top_p, by.seeds, self.positions)
        self.tokens.copy_(chosen)
        ends = (by.end_tokens == self.tokens.unsqueeze(-1)).any(-1).to(torch.uint8)
        is_number = logits.amax(-1).isfinite()  # NaN is the largest
        self.why.copy_(ends.masked_fill(~is_number, NOT_A_NUMBER))


def make_choice(
    num_rows: int, width: int, num_ends: int, tokens: Tensor, device: torch.device
) -> Choice:
    """A choice of ``num_rows`` rows, greedy until told otherwise; it writes into ``tokens``."""

    def zeros(dtype: torch.dtype) -> Tensor:
        return torch.zeros(num_rows, dtype=dtype, device=device)

    return Choice(
        tokens=tokens,
        why=zeros(torch.uint8),
        parameters=Parameters(num_rows, num_ends, device),
        positions=zeros(torch.int64),
        keys=torch.empty(num_rows, num_keys(width), dtype=torch.int64, device=device),
        width=width,
    )


class Captured:
    """A function of no arguments: run once as it stands, then captured, then replayed.

    The first run compiles kernels and allocates what the library wants; it must be harmless.
    """

    def __init__(self, run: Callable[[], None], device: torch.device, pool: Any) -> None:
        self._run, self._graph = run, None
        if device.type != "cuda":
            return
        run()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        was_collecting = gc.isenabled()
        gc.disable()  # another executable's graphs must not be taken apart meanwhile
        try:
            with torch.cuda.graph(graph, pool=pool):
                run()
        finally:
            if was_collecting:
                gc.enable()
        self._graph = graph

    def __call__(self) -> None:
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()


class DecodeBucket:
    """One token of each of up to ``num_rows`` sequences; rows that are not used are padding."""

    def __init__(self, steps: Steps, num_rows: int, width: int, num_ends: int, pool: Any) -> None:
        device = steps.device
        self.num_rows = num_rows
        self.rows = Rows.padding(num_rows, device)
        self.choice = make_choice(num_rows, width, num_ends, self.rows.tokens, device)
        self.logits = torch.empty(0)
        self._steps, self._device, self._pool = steps, device, pool
        self._captured: dict[bool, Captured] = {}

    def sit(self, table: SeatTable, at: Tensor, positions: Tensor) -> None:
        """The seats in the rows ``at [B]`` of the table take the rows of this bucket, and read
        their tokens at ``positions [B]``, which is negative in rows of padding.
        """
        self.rows.tokens.copy_(table.tokens.index_select(0, at))
        self.rows.positions.copy_(positions)
        self.rows.slots.copy_(at.masked_fill(positions < 0, 0))
        self.choice.gather(table, at)
        self.choice.positions.copy_(positions + 1)

    def run(self, *, is_greedy: bool) -> None:
        """Run a decode step; its chosen tokens are those of the next, one position on."""
        if is_greedy not in self._captured:
            kept = [each.clone() for each in (self.rows.tokens, self.rows.positions)]
            positions = self.choice.positions.clone()
            self.rows.positions.fill_(-1)  # while it is compiled and captured, all is padding
            run = Captured(lambda: self._run(is_greedy), self._device, self._pool)
            self._captured[is_greedy] = run
            self.rows.tokens.copy_(kept[0])
            self.rows.positions.copy_(kept[1])
            self.choice.positions.copy_(positions)
        self._captured[is_greedy]()

    def _run(self, is_greedy: bool) -> None:
        is_gpu = self._device.type == "cuda"
        self.logits = self._steps.decode(self.rows, captured=is_gpu)
        self.choice.apply(self.logits, is_greedy=is_greedy, advancing=self.rows.positions)
        if not is_greedy:
            self.choice.positions.add_(1)


@dataclass(frozen=True, slots=True)
class Seated:
    """The seats in the rows of a bucket, in order, and their rows of the table, padding included.

    ``is_late``: some of them are chosen for by the host.
    """

    seats: tuple[Seat, ...]
    bucket: DecodeBucket
    at: Tensor
    is_greedy: bool
    is_late: bool


class PromptBucket:
    """Up to ``num_tokens`` tokens of one sequence, and the choice of the token behind them."""

    def __init__(self, steps: Steps, num_tokens: int, width: int, num_ends: int, pool: Any) -> None:
        device = steps.device
        self.num_tokens = num_tokens
        self.rows = Rows.padding(num_tokens, device)
        self.last = torch.zeros(1, dtype=torch.int64, device=device)
        tokens = torch.zeros(1, dtype=torch.int64, device=device)
        self.choice = make_choice(1, width, num_ends, tokens, device)
        self.logits = torch.empty(0)
        self._steps, self._device, self._pool = steps, device, pool
        self._captured: dict[tuple[bool, bool], Captured] = {}

    def run(self, tokens: Tensor, first: int, slot: int, *, is_greedy: bool) -> None:
        """``tokens`` from position ``first`` on, of the sequence in ``slot``."""
        how = is_greedy, first == 0 and self.num_tokens > LIBRARY_ATTENTION
        if how not in self._captured:
            self.rows.positions.fill_(-1)
            self._captured[how] = Captured(lambda: self._run(*how), self._device, self._pool)
        count = len(tokens)
        positions = torch.arange(first, first + count)
        self.rows.upload(tokens, positions, torch.full_like(tokens, slot))
        self.last.fill_(count - 1)
        self._captured[how]()

    def _run(self, is_greedy: bool, from_start: bool) -> None:
        logits = self._steps.prefill(self.rows, logit_rows=self.last, from_start=from_start)
        assert logits is not None
        self.logits = logits
        self.choice.apply(logits, is_greedy=is_greedy)
