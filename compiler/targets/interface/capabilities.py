"""The limits of an executable's steps, and its memory. Imports no torch."""

from __future__ import annotations

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What an executable's steps may look like; schedulers respect it.

    Attributes:
        max_seats: sequences with state at a time. max_context: positions of a sequence.
        page_size: positions of a page; 0: a seat's state lies in one piece, and no page is named.
        num_pages: of the pool. num_snapshots: of per-sequence state; 0 where none can be kept.
        has_sequence_state: whether sequences keep state that cannot be cut back to a position.
        num_held: positions that some layers hold of a longer sequence, its last; 0: all of them.
        reach_back: how far a sequence that was longer than ``num_held`` can be cut back.
        cell: the smallest piece of a prompt that is worth reading the weights for.
        max_prompts: pieces of prompts in one step. max_step_tokens: tokens of them together.
        runs_ahead: a step may be given before the last one's tokens have been read.
        marks: snapshots inside of a piece of a prompt, at whole pages, which it is not cut for.
        passes: where rows that decode may share one pass with prompts (`StepOutput.is_mixed`): for
            up to so many rows and prompts, ascending, the tokens of prompts that a pass is made of.
        most_shared: tokens of prompts that share a pass with others, each in whole pages, at most.
        far: positions before a prompt's token with which it takes twice as long as without any; 0:
            as long anywhere, as far as is known.
        invariant: what a row's bits depend on: ``rows``, on the request alone; ``batch``, on the
            cells its prompt was cut into; ``none``, on what it runs beside, by rounding.
        hidden_size: Width of the final hidden states (`Chunk.pools`). 0: chunks cannot pool.
        invariant_rows: Maximum number of open sequences for which ``invariant`` holds. Steps with
            more open sequences may share passes. 0: ``invariant`` holds for every step.
    """

    max_seats: int
    max_context: int
    page_size: int = 0
    num_pages: int = 0
    num_snapshots: int = 0
    has_sequence_state: bool = False
    num_held: int = 0
    reach_back: int = 0
    cell: int = 128
    max_prompts: int = 1
    max_step_tokens: int = 8192
    runs_ahead: bool = False
    marks: int = 0
    passes: tuple[tuple[int, tuple[int, ...]], ...] = ()
    most_shared: int = sys.maxsize
    far: int = 0
    invariant: str = "none"
    hidden_size: int = 0
    invariant_rows: int = 0

    def shares_passes(self, num_sequences: int) -> bool:
        """Return whether a step may share passes while ``num_sequences`` sequences are open."""
        return num_sequences > self.invariant_rows

    @property
    def max_invariant_rows(self) -> int:
        """Maximum number of open sequences of a batch-invariant step; 0: no step is."""
        return (self.invariant_rows or sys.maxsize) if self.invariant == "rows" else 0

    def can_cut(self, reached: int, position: int) -> bool:
        """Whether a seat that has had ``reached`` positions has what is seen from ``position``."""
        return not self.num_held or reached <= max(self.num_held, position + self.reach_back)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes an executable holds: weights, of them those held once more, and the whole state."""

    weights: int
    state: int
    copies: int = 0
