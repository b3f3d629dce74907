"""The limits of an executable's steps, and its memory. Imports no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass

MAX_DRAFTS = 15
"""Maximum draft tokens of a slot on any target."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """Limits of an executable's steps. The scheduler respects them.

    Attributes:
        max_num_seqs: Maximum sequence count with state.
        max_context: Maximum position count per sequence.
        page_size: Positions per page. 0: contiguous state, without pages.
        num_pages: Pages in the pool.
        num_snapshots: Per-sequence state snapshots. 0: no snapshots.
        has_sequence_state: Whether per-sequence state exists. It has no truncation.
        retained_positions: Retained positions in windowed layers. 0: all positions.
        reach_back: Maximum rollback beyond ``retained_positions``.
        cell: Minimum chunk size with efficient weight reads.
        max_prompts: Maximum prefill chunks per step.
        max_step_tokens: Maximum prefill tokens per step.
        runs_ahead: Whether a step may start before the previous output is read.
        marks: Maximum snapshots inside a chunk, at page boundaries.
        passes: Captured mixed batch sizes, ascending: ``(max_rows, prefill_sizes)``. Example:
            ``((16, (256, 512)),)``. Empty: no mixed batches (`StepOutput.is_mixed`).
        alignment: In a mixed batch, each chunk has a multiple of this number of rows.
        most_shared: Maximum prefill rows in a mixed batch.
        far: Context length at which a prompt token costs twice as much as at position 0. 0: the
            cost does not depend on the position.
        invariant: ``rows``: bits depend on the request only. ``batch``: bits also depend on the
            chunk sizes. ``none``: bits also depend on concurrent requests, by rounding.
        hidden_size: Width of the final hidden states (`Chunk.pools`). With 0, chunks cannot pool.
        invariant_rows: Maximum open sequence count for ``invariant``. Larger steps may share
            passes. 0: no limit.
        max_drafts: Maximum draft tokens per slot and step (`Step.drafts`). No drafts if 0.
        max_proposals: Maximum tokens of a slot from the draft layer (`Step.proposes`). 0: no draft
            layer.
        has_decode_chunks: Whether a chunk may use decode arithmetic (`PrefillChunk.decodes`).
    """

    max_num_seqs: int
    max_context: int
    page_size: int = 0
    num_pages: int = 0
    num_snapshots: int = 0
    has_sequence_state: bool = False
    retained_positions: int = 0
    reach_back: int = 0
    cell: int = 128
    max_prompts: int = 1
    max_step_tokens: int = 8192
    runs_ahead: bool = False
    marks: int = 0
    passes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    alignment: int = 1
    most_shared: int = sys.maxsize
    far: int = 0
    invariant: str = "none"
    hidden_size: int = 0
    invariant_rows: int = 0
    max_drafts: int = 0
    max_proposals: int = 0
    has_decode_chunks: bool = False

    def shares_passes(self, num_sequences: int) -> bool:
        """Return whether a step may share passes while ``num_sequences`` sequences are open."""
        return num_sequences > self.invariant_rows

    @property
    def max_invariant_rows(self) -> int:
        """Return the maximum open sequence count in a batch-invariant step. 0: no step."""
        return (self.invariant_rows or sys.maxsize) if self.invariant == "rows" else 0

    def can_cut(self, reached: int, position: int) -> bool:
        """Return whether truncation from ``reached`` positions to ``position`` is possible."""
        return not self.retained_positions or reached <= max(
            self.retained_positions, position + self.reach_back
        )


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """An executable's bytes: weights, their copies, and state."""

    weights: int
    state: int
    copies: int = 0
