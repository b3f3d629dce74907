"""Captured steps of an executable, by number of rows. A bucket is captured at its first use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, pairwise
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.targets.cuda.graphs.capture import DecodeBucket, PromptBucket
from tilewright.compiler.targets.cuda.graphs.draft_bucket import DraftBucket
from tilewright.compiler.targets.cuda.graphs.mixed_graphs import BatchBucket, Passes
from tilewright.compiler.targets.cuda.kernels.sampling.mask_logits import forbid
from tilewright.compiler.targets.cuda.state.slot_table import SlotTable
from tilewright.compiler.targets.cuda.state.token_batch import ChunkLayout, TokenBatch
from tilewright.compiler.targets.cuda.steps.runner import StepRunner
from tilewright.compiler.targets.interface.step import Slot
from tilewright.compiler.targets.interface.token_masks import num_words

_TILE_TOKENS = 128
"""Tokens of a cuBLAS tile."""


class Buckets:
    """Captured decode steps, prompts and mixed batches, with ascending sizes. Sizes include
    padding.

    ``table`` and ``num_choosable`` give the sampling width. A capture reads the values agreed by
    the ranks.
    ``alignment``: of `Capabilities`.
    ``max_drafts``: of the decode steps with drafts that :meth:`prepare` captures. 0: none.
    ``has_states``: Whether sequences have state in addition to pages.
    ``runs_together``: Whether :meth:`prepare` compiles the kernels of long chunks in one batch.
    """

    def __init__(
        self,
        steps: StepRunner,
        *,
        rows: Sequence[int],
        tokens: Sequence[int],
        num_choosable: Callable[[], int],
        table: SlotTable,
        passes: Callable[[], Passes] = lambda: (),
        most_pieces: Callable[[], int] = lambda: 1,
        alignment: int = 1,
        max_drafts: int = 0,
        has_states: bool = False,
        runs_together: bool = False,
    ) -> None:
        self.rows, self.tokens = tuple(rows), tuple(tokens)
        self._table, self._passes, self._most_pieces = table, passes, most_pieces
        self._steps, self._num_choosable, self.alignment = steps, num_choosable, alignment
        is_gpu = steps.device.type == "cuda"
        self._pool: Any = torch.cuda.graph_pool_handle() if is_gpu else None
        self.decodes: dict[int, DecodeBucket] = {}
        self._drafts: dict[int, DraftBucket] = {}
        self._max_drafts, self._has_states = max_drafts, has_states
        self._runs_together = runs_together
        self.prompts: dict[int, PromptBucket] = {}
        self.batches: dict[int, BatchBucket] = {}

    def cut(self, slots: tuple[Slot, ...]) -> tuple[tuple[Slot, ...], ...]:
        """Split decode rows by the largest bucket.

        If all rows fit a bucket, return the same tuple: the next step compares it by identity.
        """
        most = self.rows[-1]
        if len(slots) <= most:
            return (slots,) if slots else ()
        return tuple(slots[first : first + most] for first in range(0, len(slots), most))

    def decode(self, num_rows: int) -> DecodeBucket:
        """Return the smallest bucket for ``num_rows``."""
        size = next(size for size in self.rows if size >= num_rows)
        if size not in self.decodes:
            how = self._num_choosable(), self._table.num_ends, self._pool
            self.decodes[size] = DecodeBucket(self._steps, size, *how)
        return self.decodes[size]

    def drafts(self, num_rows: int) -> DraftBucket:
        """Return the smallest bucket for decode steps with drafts and ``num_rows``."""
        bucket = self.decode(num_rows)
        if bucket.num_rows not in self._drafts:
            self._drafts[bucket.num_rows] = DraftBucket(
                bucket, self._steps, self._table, has_states=self._has_states
            )
        return self._drafts[bucket.num_rows]

    def prompt(self, num_tokens: int) -> PromptBucket:
        """Return the smallest bucket for ``num_tokens`` of a prompt."""
        size = next(size for size in self.tokens if size >= num_tokens)
        if size not in self.prompts:
            how = size, self._num_choosable(), self._pool
            self.prompts[size] = PromptBucket(self._steps, self._table, *how)
        return self.prompts[size]

    def batch(self, num_tokens: int, num_choices: int) -> tuple[BatchBucket, int] | None:
        """Return the smallest mixed-batch bucket and its captured token count. None: no bucket
        fits.

        Args:
            num_tokens: Prefill rows.
            num_choices: Sampled rows: decode rows and prompts that end.
        """
        for width, sizes in self._passes():
            for size in sizes:
                if width >= num_choices and size >= num_tokens:
                    return self._batch(width), size
        return None

    def _batch(self, width: int) -> BatchBucket:
        if width not in self.batches:
            self.batches[width] = BatchBucket(
                self._steps,
                self._table,
                width=width,
                sizes=dict(self._passes())[width],
                most=self._most_pieces(),
                alignment=self.alignment,
                num_choosable=self._num_choosable(),
                pool=self._pool,
            )
        return self.batches[width]

    def prepare(self, longest: int, *, runs_long: bool) -> None:
        """Capture all buckets for prompts with up to ``longest`` tokens. All slots must be free.

        Args:
            runs_long: Run prompts without a bucket once, singly and together, so that their kernels
                are compiled.
        """
        found: list[tuple[int, Callable[[], BatchBucket | PromptBucket]]] = []
        for width, sizes in self._passes():
            found.append((width + sizes[-1], partial(self._batch, width)))
        for less, size in pairwise((0, *self.tokens)):
            if less < longest:
                found.append((size, partial(self.prompt, size)))
        for _, make in sorted(found, key=itemgetter(0), reverse=True):
            make().prepare()  # The largest bucket comes first. Smaller buckets run in its memory.
        for size in self.rows:
            self._prepare_decode(size)
        self._prepare_masks()
        device, size = self._steps.device, self.tokens[-1]
        last = torch.zeros(1, dtype=torch.int64).to(device)
        while runs_long and size < longest:
            size = min(2 * size, longest)
            rows = TokenBatch.padding(size, device)
            for from_start in {False, self._steps.attention.begins_otherwise(size)}:
                self._steps.prefill(rows, logit_rows=last, from_start=from_start)
        if runs_long and self._runs_together and self._passes():
            self._run_together(longest, last)

    @property
    def num_captures(self) -> int:
        """Return the number of captured graphs."""
        buckets = chain(self.decodes.values(), self.prompts.values(), self.batches.values())
        return sum(bucket.num_captures for bucket in buckets)

    def _prepare_decode(self, size: int) -> None:
        """Capture the decode steps with up to ``size`` rows."""
        bucket = self.decode(size)
        for reach in self._steps.attention.reaches:
            bucket.prepare_reach(reach)
        bucket.prepare_choices()
        if self._max_drafts and size > 1:
            self.drafts(size).prepare()

    def _run_together(self, longest: int, last: Tensor) -> None:
        """Run two chunks in a batch without a graph. Each has whole tiles."""
        half = longest // (2 * _TILE_TOKENS) * _TILE_TOKENS
        if half:
            starts = torch.tensor((0, half, 2 * half)).to(self._steps.device)
            rows = TokenBatch.padding(2 * half, self._steps.device)
            self._steps.prefill(rows, logit_rows=last, layout=ChunkLayout(starts))

    def _prepare_masks(self) -> None:
        """Run the kernel that masks logits, to compile it."""
        device, width = self._steps.device, self._num_choosable()
        logits, row = torch.zeros(1, width), torch.zeros(1, dtype=torch.int64)
        words = torch.zeros(1, num_words(width), dtype=torch.int32)
        forbid(logits.to(device), row.to(device), words.to(device), width=width)
