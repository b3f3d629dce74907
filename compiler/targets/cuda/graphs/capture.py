"""Decode steps and short prompts as CUDA graphs, each for a bucket of rows; on a CPU, run as they
stand. Tokens and positions go from one decode step to the next on the device.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.collectives.group import RankGroup
from tilewright.compiler.targets.cuda.outputs.sampling_batch import (
    EVERY_DRAWING,
    Drawing,
    SamplingBatch,
    make_choice,
)
from tilewright.compiler.targets.cuda.plan import has_mixers, num_multiplied
from tilewright.compiler.targets.cuda.state.pages import PAGE
from tilewright.compiler.targets.cuda.state.ragged import lay_out
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable, send, send_into
from tilewright.compiler.targets.cuda.state.snapshot_positions import NO_MARKS, Marks
from tilewright.compiler.targets.cuda.state.tables import PagedState
from tilewright.compiler.targets.cuda.state.token_batch import TokenBatch
from tilewright.compiler.targets.cuda.steps.run import Steps
from tilewright.compiler.targets.host.executable import SlotState
from tilewright.compiler.targets.interface.step import PrefillChunk, Slot
from tilewright.compiler.targets.program.instructions import AttentionOp, KernelProgram

_PROMPTS = (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048)
"""The sizes of prompts that are captured: hundreds of launches keep the host busy longer than the
GPU.
"""
_BETWEEN = (384, 640, 896, 1280, 1792)
"""More sizes of plans without mixers, whose time is their tokens'. With mixers a capture has a
thousand launches, and experts are read whatever there is of padding.
"""
_LEAST_LONG = 512
_LAYER_SECONDS, _RATE = 1.4e-3, 0.7e15
"""What the host takes to launch a layer of a prompt kernel by kernel (37 to 54 ms for 32 of them),
and operations a second of large products, on an H200.
"""
MAX_DECODE_ROWS = 256
"""Maximum number of rows of a decode step. More rows take further steps."""
_SPARE = 1 << 30
"""Bytes that a capture may take beyond what its run did."""


def prompt_buckets(plan: KernelProgram, num_ranks: int = 1) -> tuple[int, ...]:
    """Tokens of the prompts that are captured, padding included: without mixers up to where the GPU
    takes longer than the host, so that padding would cost more than launches. Several ranks, whose
    parts may differ and who capture all in one order, have none of these longer ones.
    """
    if has_mixers(plan):
        return _PROMPTS
    most: float = _LEAST_LONG
    if num_ranks == 1:
        num_layers = sum(isinstance(each, AttentionOp) for each in plan.instructions)
        a_token = max(1, 2 * num_multiplied(plan))
        most = max(most, num_layers * _LAYER_SECONDS * _RATE / a_token)
    return tuple(size for size in sorted(_PROMPTS + _BETWEEN) if size <= most)


def decode_buckets(max_batch: int, most: int | None = None) -> tuple[int, ...]:
    """Rows of the decode steps that are captured, padding included: powers of two up to ``most``
    (None: :data:`MAX_DECODE_ROWS`), the last of them enough for ``max_batch`` where one is.
    """
    most = most or MAX_DECODE_ROWS
    sizes = (1 << power for power in range(most.bit_length()))
    return tuple(size for size in sizes if size < 2 * max_batch)


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """The stream on which everything is captured: the library's workspace of a stream is kept."""
    return torch.cuda.Stream(device)


class CapturedGraph:
    """A function of no arguments: run once as it stands, then captured, then replayed.

    The first run compiles kernels and allocates what the library wants; it must be harmless.
    """

    def __init__(
        self,
        run: Callable[[], None],
        device: torch.device,
        pool: Any,
        group: RankGroup | None = None,
    ) -> None:
        """``group``: whose ranks all capture the same now, and may be late."""
        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None
        if device.type != "cuda":
            return
        with group.patiently() if group is not None else contextlib.nullcontext():
            self._capture(device, pool)

    def _capture(self, device: torch.device, pool: Any) -> None:
        run, before = self._run, torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        # What the run took stays cached for the next one, where the graph has room beside it:
        # `torch.cuda.graph` gives it back each time.
        taken = torch.cuda.max_memory_allocated(device) - before
        if torch.cuda.mem_get_info(device)[0] < taken + _SPARE:
            torch.cuda.empty_cache()
        was_collecting = gc.isenabled()
        gc.disable()  # another executable's graphs must not be taken apart meanwhile
        try:
            with torch.cuda.stream(_stream(device)):
                graph.capture_begin(pool=pool)
                try:
                    run()
                finally:
                    graph.capture_end()
        finally:
            if was_collecting:
                gc.enable()
        self._graph = graph

    def __call__(self) -> None:
        if self._graph is None:
            self._run()
        else:
            self._graph.replay()


class Bucket:
    """A captured pass whose logits a choice reads: first of the likeliest, then, where rows draw,
    of those that each kind of :class:`Drawing` takes, captured apart; so is the likeliest's choice
    from logits that masks have changed since.
    """

    def __init__(self, choice: SamplingBatch, device: torch.device, pool: Any) -> None:
        self.choice = choice
        self.logits = torch.empty(0)
        self._device, self._pool = device, pool
        self._draws: dict[Drawing, CapturedGraph] = {}
        self._again: CapturedGraph | None = None

    def choose_again(self, drawing: Drawing | None) -> None:
        """Choose once more from the logits of the last pass, which masks have changed."""
        self._capture_again()()
        if drawing is not None:
            self.draw(drawing)

    def _capture_again(self) -> CapturedGraph:
        if self._again is None:
            self._again = self.captured(lambda: self.choice.take_likeliest(self.logits))
        return self._again

    def prepare_choices(self) -> None:
        """Capture each choice from a pass's logits; of several ranks, none waits for masks."""
        if self.choice.group is None:
            self._capture_again()
        for drawing in EVERY_DRAWING:
            self._capture_draw(drawing)

    def captured(self, run: Callable[[], None]) -> CapturedGraph:
        return CapturedGraph(run, self._device, self._pool, self.choice.group)

    def draw(self, drawing: Drawing) -> None:
        """Replace the likeliest tokens, which the last pass chose, where rows draw."""
        self._capture_draw(drawing)
        self._draws[drawing]()

    def _capture_draw(self, drawing: Drawing) -> None:
        if drawing in self._draws:
            return
        kept = [(each, each.clone()) for each in (self.choice.tokens, self.choice.why)]
        run = self.captured(lambda: self.choice.draw(self.logits, drawing))
        self._draws[drawing] = run
        for place, values in kept:  # a draw begins at the likeliest
            place.copy_(values)


class DecodeBucket(Bucket):
    """One token of each of up to ``num_rows`` sequences; rows that are not used are padding. The
    pages that the longest row has decide by which of the steps' reaches it runs.
    """

    def __init__(self, steps: Steps, num_rows: int, width: int, num_ends: int, pool: Any) -> None:
        self.num_rows = num_rows
        self.rows = TokenBatch.padding(num_rows, steps.device)
        tokens, positions = self.rows.tokens, self.rows.positions
        choice = make_choice(
            num_rows, width, num_ends, tokens, positions=positions, group=steps.group
        )
        super().__init__(choice, steps.device, pool)
        self._steps = steps
        self._passes: dict[int, CapturedGraph] = {}  # by reach

    def admit(self, table: SlotTable, slots: Sequence[Slot], positions: np.ndarray) -> Tensor:
        """Up to B slots take the rows of this bucket, and read their tokens at ``positions``; the
        rows ``[B]`` of the table that they have, padding's for the other rows.
        """
        assert self.rows.words is not None
        staged, count = np.zeros((3, self.num_rows), dtype=np.int64), len(slots)
        staged[0, :count] = staged[2, :count] = slots
        staged[0, count:] = table.padding
        staged[1, :count], staged[1, count:] = positions, -1
        sent = send(staged, self._device)
        self.rows.words[1:3].copy_(sent[1:])
        torch.index_select(table.tokens, 0, sent[0], out=self.rows.tokens)
        self.choice.gather(table, sent[0])
        return sent[0]

    def prepare(self) -> None:
        """Capture all that a step may run; rows must not hold anybody yet."""
        for reach in self._steps.attention.reaches:
            self._capture(reach)
        self.prepare_choices()

    def run(self, longest: int, drawing: Drawing | None = None) -> None:
        """Run a decode step, behind which the longest row has so many positions; its chosen tokens
        are those of the next, one position on.
        """
        num_pages = -(-longest // PAGE)
        reach = next(each for each in self._steps.attention.reaches if each >= num_pages)
        self._capture(reach)()
        if drawing is not None:
            self.draw(drawing)

    def _capture(self, reach: int) -> CapturedGraph:
        if reach not in self._passes:
            kept = [each.clone() for each in (self.rows.tokens, self.rows.positions)]
            self.rows.positions.fill_(-1)  # while it is compiled and captured, all is padding
            self._passes[reach] = self.captured(lambda: self._run(reach))
            self.rows.tokens.copy_(kept[0])
            self.rows.positions.copy_(kept[1])
        return self._passes[reach]

    def _run(self, reach: int) -> None:
        is_gpu = self._device.type == "cuda"
        self.logits = self._steps.decode(self.rows, reach=reach, captured=is_gpu)
        self.choice.take_likeliest(self.logits, advancing=self.rows.positions)


@dataclass(slots=True)
class CapturedSlots:
    """The slots in the rows of a bucket, in order, and their rows of the table, padding included.

    ``drawing``: what their draws ask for; None where all are greedy. ``is_late``: some of them are
    chosen for by the host. ``lengths [B]`` (int64): positions that they held at first.
    ``num_steps``: steps since then; sittings know of them once :meth:`settle` has told them.
    ``num_covered``: steps for which every slot is known to have pages. An unchanged step reads and
    writes two integers.
    """

    slots: tuple[Slot, ...]
    bucket: DecodeBucket
    at: Tensor
    drawing: Drawing | None
    is_late: bool
    lengths: np.ndarray
    num_steps: int = 0
    num_covered: int = 0
    longest: int = field(init=False)

    def __post_init__(self) -> None:
        self.longest = int(self.lengths.max())

    def advance(self, state: PagedState) -> int:
        """Each slot has one position more, for which it must have a page; those of the longest."""
        self.num_steps += 1
        if self.num_steps > self.num_covered:
            free = state.check_all(self.slots, self.lengths + self.num_steps)
            self.num_covered = self.num_steps + free
        return self.longest + self.num_steps

    def settle(self, slot_states: Mapping[Slot, SlotState]) -> None:
        """Tell those who still sit how many positions they hold."""
        lengths = (self.lengths + self.num_steps).tolist()
        for slot, length in zip(self.slots, lengths, strict=True):
            if (slot_state := slot_states.get(slot)) is not None:
                slot_state.length = length


class PromptBucket(Bucket):
    """Up to ``num_tokens`` tokens of one sequence, and the choice of the token behind them.

    All that differs between prompts lies in one piece of memory, which one copy writes: the rows,
    that of the table, which of the rows is the last, and where its token will stand.
    """

    def __init__(
        self,
        steps: Steps,
        table: SlotTable,
        num_tokens: int,
        width: int,
        pool: Any,
    ) -> None:
        device = steps.device
        self.num_tokens, self._table = num_tokens, table
        self._words = torch.zeros(4 * num_tokens + 3, dtype=torch.int64, device=device)
        words, self._at, self.last, ends = self._words.split((4 * num_tokens, 1, 1, 1))
        self.rows = TokenBatch.over(words.view(4, num_tokens))
        tokens = torch.zeros(1, dtype=torch.int64, device=device)
        choice = make_choice(1, width, table.num_ends, tokens, positions=ends, group=steps.group)
        super().__init__(choice, device, pool)
        self._steps = steps
        self._passes: dict[bool, CapturedGraph] = {}

    def prepare(self) -> None:
        """Capture all that a prompt may run; a step's rows must not be in it."""
        for first in (1, 0):
            self._capture(self._from_start(first))
        for drawing in EVERY_DRAWING:
            self._capture_draw(drawing)

    def run(
        self, chunk: PrefillChunk, drawing: Drawing | None = None, marks: Marks = NO_MARKS
    ) -> None:
        """Run a piece with its marks; its next token is chosen as the table says for its slot."""
        captured = self._capture(self._from_start(chunk.start))
        staged = np.zeros(4 * self.num_tokens + 3, dtype=np.int64)
        rows = staged[:-3].reshape(4, -1)
        rows[1::2] = -1
        lay_out(rows, (chunk,), self.num_tokens, marks)
        staged[-3], staged[-2], staged[-1] = chunk.slot, len(chunk.tokens) - 1, chunk.end
        send_into(self._words, staged)
        captured()
        if drawing is not None:
            self.draw(drawing)

    def _from_start(self, first: int) -> bool:
        """Whether it attends in the way of prompts that begin at position 0."""
        return first == 0 and self._steps.attention.begins_otherwise(self.num_tokens)

    def _capture(self, from_start: bool) -> CapturedGraph:
        if from_start not in self._passes:
            self.rows.positions.fill_(-1)
            self.last.zero_()
            self._at.fill_(self._table.padding)
            self._passes[from_start] = self.captured(lambda: self._run(from_start))
        return self._passes[from_start]

    def _run(self, from_start: bool) -> None:
        self.choice.gather(self._table, self._at)
        logits = self._steps.prefill(self.rows, logit_rows=self.last, from_start=from_start)
        assert logits is not None
        if not len(self.logits):
            self.logits = torch.empty_like(logits)  # where both ways of attending leave them
        self.logits.copy_(logits)
        self.choice.take_likeliest(self.logits)
