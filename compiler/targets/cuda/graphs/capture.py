"""CUDA graphs of decode steps and short prompts, by bucket size. A CPU runs them without graphs.

Tokens and positions remain on the device between decode steps.
"""

from __future__ import annotations

import contextlib
import functools
import gc
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.collectives.group import RankGroup
from tilewright.compiler.targets.cuda.kernels.attention.cross_attention import ImageTiles
from tilewright.compiler.targets.cuda.kernels.common import driver
from tilewright.compiler.targets.cuda.lowering import has_mixers, num_multiplied
from tilewright.compiler.targets.cuda.outputs.sampling_batch import (
    EVERY_DRAWING,
    SamplingBatch,
    SamplingFilters,
    make_choice,
    num_why_words,
)
from tilewright.compiler.targets.cuda.state.encoded_images import EncodedImages
from tilewright.compiler.targets.cuda.state.pages import PAGE
from tilewright.compiler.targets.cuda.state.ragged import lay_out
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable, send_into
from tilewright.compiler.targets.cuda.state.snapshot_positions import NO_MARKS, Marks
from tilewright.compiler.targets.cuda.state.tables import PagedState
from tilewright.compiler.targets.cuda.state.token_batch import TokenBatch
from tilewright.compiler.targets.cuda.steps.runner import StepRunner
from tilewright.compiler.targets.host.choice import SlotState
from tilewright.compiler.targets.interface.step import (
    AssignPages,
    ImageId,
    PrefillChunk,
    Slot,
    Step,
)
from tilewright.compiler.targets.program.instructions import AttentionOp, KernelProgram

_Key = TypeVar("_Key", int, tuple[int, int])

_PROMPTS = (16, 32, 64, 128, 256, 512, 768, 1024, 1536, 2048)
"""Captured prompt sizes. Without a graph, launches take longer than these prompts run on the
GPU.
"""
_BETWEEN = (384, 640, 896, 1280, 1792)
"""Additional sizes for plans without mixers, whose time is proportional to tokens. With mixers, a
capture has a thousand launches, and padding is free because all experts are read.
"""
_LEAST_LONG = 512
_LAYER_SECONDS, _RATE = 1.4e-3, 0.7e15
"""Host time in seconds to launch a layer, and operations per second of large matmuls, on an
H200.
"""
MAX_DECODE_ROWS = 256
"""Maximum number of rows of a decode step. More rows take further steps."""
_DECODE_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 192, 256)
_SPARE = 1 << 30
"""Maximum memory of a capture in bytes, in excess of the preceding run's memory."""


def prompt_buckets(plan: KernelProgram, num_ranks: int = 1) -> tuple[int, ...]:
    """Return the prompt sizes to capture in tokens, padding included.

    Without mixers, sizes end at the length for which the GPU takes longer than the host: more
    padding would cost more than launches. Several ranks, whose shards may differ, omit these larger
    sizes because they capture in the same order.
    """
    if has_mixers(plan):
        return _PROMPTS
    most: float = _LEAST_LONG
    if num_ranks == 1:
        num_layers = sum(isinstance(each, AttentionOp) for each in plan.instructions)
        a_token = max(1, 2 * num_multiplied(plan))
        most = max(most, num_layers * _LAYER_SECONDS * _RATE / a_token)
    return tuple(size for size in sorted(_PROMPTS + _BETWEEN) if size <= most)


def decode_buckets(max_batch: int) -> tuple[int, ...]:
    """Return the decode sizes to capture in rows, padding included.

    The largest size fits ``max_batch`` if possible.
    """
    sizes = [size for size in _DECODE_ROWS if size <= MAX_DECODE_ROWS]
    return tuple(sizes[: bisect_left(sizes, max_batch) + 1])


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    """Return the stream for all captures. cuBLAS keeps a workspace for each stream."""
    return torch.cuda.Stream(device)


class CapturedGraph:
    """A function without arguments: run once, captured, then replayed.

    The first run compiles kernels and allocates workspaces. It must have no side effects.
    """

    def __init__(
        self,
        run: Callable[[], None],
        device: torch.device,
        pool: Any,
        group: RankGroup | None = None,
    ) -> None:
        """Run and capture the function.

        Args:
            pool: Memory pool of the graphs.
            group: Ranks that capture the same function. Their timeout is extended.
        """
        self._run = run
        self._graph: torch.cuda.CUDAGraph | None = None
        self._handle, self._index = 0, device.index or 0
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
        # Keep the run's cached memory for the next run if the graph fits without it.
        # `torch.cuda.graph` would free this memory at every capture.
        taken = torch.cuda.max_memory_allocated(device) - before
        if torch.cuda.mem_get_info(device)[0] < taken + _SPARE:
            torch.cuda.empty_cache()
        was_collecting = gc.isenabled()
        gc.disable()  # the collector must not free other graphs during the capture
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
        self._graph, self._handle = graph, graph.raw_cuda_graph_exec()

    def __call__(self) -> None:
        if self._handle:
            driver.launch_graph(self._handle, device=self._index)
        else:
            with torch.no_grad():
                self._run()


class Bucket:
    """A captured forward and the token selection from its logits.

    Greedy selection is part of the forward. Sampling is captured separately for each kind of
    :class:`SamplingFilters`. Greedy selection from masked logits is also separate.
    """

    def __init__(self, choice: SamplingBatch, device: torch.device, pool: Any) -> None:
        self.choice = choice
        self.logits = torch.empty(0)
        self._device, self._pool = device, pool
        self.num_captures = 0
        self._draws: dict[SamplingFilters, CapturedGraph] = {}
        self._again: CapturedGraph | None = None

    def choose_again(self, drawing: SamplingFilters | None) -> None:
        """Select again from the previous forward's logits, after masks have changed them."""
        self._capture_again()()
        if drawing is not None:
            self.draw(drawing)

    def _capture_again(self) -> CapturedGraph:
        if self._again is None:
            self._again = self.captured(lambda: self.choice.take_likeliest(self.logits))
        return self._again

    def prepare_choices(self) -> None:
        """Capture the separate selections. Multiple ranks do not support masks after the
        forward.
        """
        if self.choice.group is None:
            self._capture_again()
        for drawing in EVERY_DRAWING:
            self._capture_draw(drawing)

    def captured(self, run: Callable[[], None]) -> CapturedGraph:
        """Return a graph of ``run`` in the bucket's memory pool."""
        self.num_captures += 1
        return CapturedGraph(run, self._device, self._pool, self.choice.group)

    def draw(self, drawing: SamplingFilters) -> None:
        """Replace the likeliest tokens, which the last pass chose, where rows draw."""
        if drawing not in self._draws:
            self._capture_draw(drawing)
        self._draws[drawing]()

    @torch.no_grad()
    def _capture_draw(self, drawing: SamplingFilters) -> None:
        if drawing in self._draws:
            return
        kept = [(each, each.clone()) for each in (self.choice.tokens, self.choice.why)]
        run = self.captured(lambda: self.choice.draw(self.logits, drawing))
        self._draws[drawing] = run
        for target, values in kept:  # sampling starts from the greedy token
            target.copy_(values)


class DecodeBucket(Bucket):
    """A decode step with up to ``num_rows`` sequences. Unused rows are padding.

    There is a graph for each captured context length; the longest row selects it.
    """

    def __init__(
        self, steps: StepRunner, num_rows: int, width: int, num_ends: int, pool: Any
    ) -> None:
        self.num_rows, device, first = num_rows, steps.device, num_why_words(num_rows)
        words = torch.zeros(first + 5 * num_rows, dtype=torch.int64, device=device)
        rows = words[first:].view(5, num_rows)
        self.rows, self._inputs = TokenBatch.over(rows[:4]), rows[1:]
        choice = make_choice(
            num_rows,
            width,
            num_ends,
            device,
            results=words[: first + num_rows],
            positions=self.rows.positions,
            group=steps.group,
        )
        super().__init__(choice, device, pool)
        self._steps = steps
        self._offsets = torch.zeros(num_rows, dtype=torch.int64, device=steps.device)
        self._has_offsets = False
        self._passes: dict[int, CapturedGraph] = {}  # by context length in pages
        self._offset_passes: dict[int, CapturedGraph] = {}  # with rotary offsets
        self._tile_passes: dict[tuple[int, int], CapturedGraph] = {}  # and by tile count
        self._tile_words: dict[int, Tensor] = {}  # by size
        self._tiles: ImageTiles | None = None

    def admit(
        self,
        device_slots: SlotTable,
        slots: Sequence[Slot],
        positions: np.ndarray,
        offsets: np.ndarray,
    ) -> Tensor:
        """Assign slots to this bucket's rows. The rows read their tokens at ``positions``.

        Return the entries ``[B]``, valid until the next call. Unused rows have the padding entry.
        ``offsets``: rotary positions minus positions.
        """
        staged, count = np.zeros((4, self.num_rows), dtype=np.int64), len(slots)
        staged[0, :count], staged[0, count:] = positions, -1
        staged[1, :count] = staged[3, :count] = slots
        staged[2], staged[3, count:] = -1, device_slots.padding
        send_into(self._inputs, staged)
        self._has_offsets = bool(offsets.any())
        if self._has_offsets:
            send_into(self._offsets, np.pad(offsets, (0, self.num_rows - count)))
        at = self._inputs[3]
        torch.index_select(device_slots.tokens, 0, at, out=self.rows.tokens)
        self.choice.gather(device_slots, at)
        return at

    def show(self, images: EncodedImages, seen: Sequence[tuple[ImageId, ...]]) -> None:
        """Set the visible images, after :meth:`admit`."""
        self._tiles = None
        if any(seen):
            words = images.words_of(seen, self.num_rows)
            if len(words) not in self._tile_words:
                self._tile_words[len(words)] = torch.zeros(
                    len(words), dtype=torch.int64, device=self._device
                )
            kept = self._tile_words[len(words)]
            send_into(kept, words)
            self._tiles = images.of_words(kept, self.num_rows)

    def prepare_reach(self, reach: int) -> None:
        """Capture the graph of a context length in pages. No row may have a sequence."""
        self._tiles, self._has_offsets = None, False  # an earlier step's images may be dropped
        self._capture(reach)

    @torch.no_grad()
    def bind(self, longest: int) -> tuple[CapturedGraph, int]:
        """Return the graph of a decode step, and the maximum length that it fits.

        The selected tokens become the next step's inputs, one position later.

        Args:
            longest: The longest row's positions after this step.
        """
        reaches = self._steps.attention.reaches
        reach = reaches[bisect_left(reaches, -(-longest // PAGE))]
        return self._capture(reach), reach * PAGE

    def _capture(self, reach: int) -> CapturedGraph:
        if self._tiles is not None:
            key, rows = (reach, self._tiles.offsets.shape[1]), replace(self.rows, tiles=self._tiles)
            return self._capture_in(self._tile_passes, key, rows, reach)
        if self._has_offsets:
            rows = replace(self.rows, offsets=self._offsets)
            return self._capture_in(self._offset_passes, reach, rows, reach)
        return self._capture_in(self._passes, reach, self.rows, reach)

    def _capture_in(
        self, passes: dict[_Key, CapturedGraph], key: _Key, rows: TokenBatch, reach: int
    ) -> CapturedGraph:
        if key not in passes:
            kept = [each.clone() for each in (self.rows.tokens, self.rows.positions)]
            self.rows.positions.fill_(-1)  # while it is compiled and captured, all is padding
            passes[key] = self.captured(lambda: self._run(rows, reach))
            self.rows.tokens.copy_(kept[0])
            self.rows.positions.copy_(kept[1])
        return passes[key]

    def _run(self, rows: TokenBatch, reach: int) -> None:
        is_gpu = self._device.type == "cuda"
        self.logits = self._steps.decode(rows, reach=reach, captured=is_gpu)
        self.choice.take_likeliest(self.logits, advancing=self.rows.positions)


@dataclass(slots=True)
class CapturedSlots:
    """The slots in a bucket's rows, in order, between steps with the same slots.

    An unchanged step reads and writes two integers only.

    Attributes:
        slots: Slots in row order.
        at: Table entry by bucket row, padding included.
        drawing: Sampling filters. None: all rows are greedy.
        is_late: The host selects tokens for some rows.
        lengths: Each slot's positions at the first step, int64 ``[B]``.
        num_steps: Steps since then. :meth:`settle` writes them to the slot states.
        num_covered: Steps for which every slot has pages.
        indices: ``slots`` as an array.
        longest: Maximum of ``lengths``.
        graph: Graph of the last step.
        max_length: Maximum length of a row for this graph.
    """

    slots: tuple[Slot, ...]
    bucket: DecodeBucket
    at: Tensor
    drawing: SamplingFilters | None
    is_late: bool
    lengths: np.ndarray
    num_steps: int = 0
    num_covered: int = 0
    indices: np.ndarray = field(init=False)
    longest: int = field(init=False)
    graph: CapturedGraph = field(init=False)
    max_length: int = 0

    def __post_init__(self) -> None:
        self.indices, self.longest = np.array(self.slots), int(self.lengths.max())

    def is_repeated_by(self, step: Step) -> bool:
        """Return whether a step only decodes these slots again, possibly with more pages."""
        if step.decode is not self.slots or self.is_late:
            return False
        others = step.prompts or step.forced or step.drafts or step.proposes
        if others or step.masked or step.want_logits or step.logprobs is not None:
            return False
        return all(type(edit) is AssignPages for edit in step.edits)

    def run(self, state: PagedState, *, draws: bool) -> None:
        """Decode a token on every slot, and check the pages of the new positions.

        Args:
            draws: Whether rows that sample replace their greedy tokens.
        """
        self.num_steps += 1
        if self.num_steps > self.num_covered:
            free = state.check_all(self.indices, self.lengths + self.num_steps)
            self.num_covered = self.num_steps + free
        longest = self.longest + self.num_steps
        if longest > self.max_length:
            self.graph, self.max_length = self.bucket.bind(longest)
        self.graph()
        if draws and self.drawing is not None:
            self.bucket.draw(self.drawing)

    def settle(self, slot_states: Mapping[Slot, SlotState]) -> None:
        """Write the current lengths to the open slot states."""
        lengths = (self.lengths + self.num_steps).tolist()
        for slot, length in zip(self.slots, lengths, strict=True):
            if (slot_state := slot_states.get(slot)) is not None:
                slot_state.length = length


class PromptBucket(Bucket):
    """A prefill of up to ``num_tokens`` tokens of one sequence, and selection of the next token.

    One buffer has all inputs that differ between prompts, so one copy writes them: the rows, the
    table row, the last row's index, and the new token's position.
    """

    def __init__(
        self,
        steps: StepRunner,
        device_slots: SlotTable,
        num_tokens: int,
        width: int,
        pool: Any,
    ) -> None:
        device = steps.device
        self.num_tokens, self._device_slots = num_tokens, device_slots
        self._words = torch.zeros(4 * num_tokens + 3, dtype=torch.int64, device=device)
        words, self._at, self.last, ends = self._words.split((4 * num_tokens, 1, 1, 1))
        self.rows = TokenBatch.over(words.view(4, num_tokens))
        choice = make_choice(
            1, width, device_slots.num_ends, device, positions=ends, group=steps.group
        )
        super().__init__(choice, device, pool)
        self._steps = steps
        self._passes: dict[bool, CapturedGraph] = {}

    def prepare(self) -> None:
        """Capture all graphs. The bucket must not have a step's rows."""
        for first in (1, 0):
            self._capture(self._from_start(first))
        for drawing in EVERY_DRAWING:
            self._capture_draw(drawing)

    def run(
        self, chunk: PrefillChunk, drawing: SamplingFilters | None = None, marks: Marks = NO_MARKS
    ) -> None:
        """Run a chunk and save its snapshots. Select its next token by the slot's table entry."""
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
        """Return whether a chunk uses the attention kernel for prompts from position 0."""
        return first == 0 and self._steps.attention.begins_otherwise(self.num_tokens)

    def _capture(self, from_start: bool) -> CapturedGraph:
        if from_start not in self._passes:
            self.rows.positions.fill_(-1)
            self.last.zero_()
            self._at.fill_(self._device_slots.padding)
            self._passes[from_start] = self.captured(lambda: self._run(from_start))
        return self._passes[from_start]

    def _run(self, from_start: bool) -> None:
        self.choice.gather(self._device_slots, self._at)
        logits = self._steps.prefill(self.rows, logit_rows=self.last, from_start=from_start)
        assert logits is not None
        if not len(self.logits):
            self.logits = torch.empty_like(logits)  # both attention kernels write here
        self.logits.copy_(logits)
        self.choice.take_likeliest(self.logits)
