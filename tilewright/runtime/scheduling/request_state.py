"""A request that has a seat, what a user may choose of a scheduler, and what it plans."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from tilewright.compiler.targets.interface.step import HostPlace, Seat, Snapshot, Step
from tilewright.runtime.request import Request

STEP_MS = 20.0
"""Milliseconds that a piece of a prompt may take beside running streams."""
HOST_CACHE_BYTES = 4 << 30
"""Host memory for the state of requests that do not run: preempted ones, and kept seats."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a user may choose of a scheduler.

    Attributes:
        step_ms: milliseconds for pieces of prompts while others decode; 0: no limit.
        beat_ms: milliseconds that prompts may take in a step while nobody decodes, or where
            ``step_ms`` is no limit, on executables that do not run ahead: the loop is deaf and
            silent for so long. 0: no limit.
        step_tokens: tokens of prompts in one step; None: as many as the executable takes.
        reuses: whether prompts share what was computed for others with the same beginning: pages,
            or, on executables without them, the seats of sequences that have ended. Whoever
            measures has it off, so that no figure comes from a cache.
        prompts_first: whether streams wait while prompts are computed: right where all requests
            are there from the beginning and nobody listens.
        cache_replies: whether full pages of an answer are shared too, and the state behind the
            last of them. What finds them reads what the kernels of decode have written, which is
            equal to a prompt's up to rounding.
        host_bytes: host memory for the state of preempted requests, and as much for that of kept
            seats; what does not fit is computed again.
    """

    step_ms: float = STEP_MS
    beat_ms: float = 0.0
    step_tokens: int | None = None
    reuses: bool = True
    prompts_first: bool = False
    cache_replies: bool = False
    host_bytes: int = HOST_CACHE_BYTES


@dataclass(slots=True, eq=False)
class Running:
    """A request that has a seat, or had one and has its state in host memory.

    Attributes:
        left: tokens of the prompt that no step has taken yet.
        computed: positions that launched steps have computed, or were found in a cache.
        reached: the most positions that what was found had had; see `Capabilities.can_cut`.
        asked: tokens of the answer that launched steps choose, or that are known.
        wanted: tokens of the answer, if it does not end before.
        room: positions that the seat's pages hold.
        replay: known tokens of the answer that decode steps must still read, after preemption.
        num_named: full pages of the prompt that are in the prefix cache.
        saves: positions of the prompt at which the per-sequence state is to be kept; ``partings``:
            those of them at which it leaves another prompt.
        latest: the key of the prefix whose snapshot is the last that the sequence began with, or
            that was taken of its prompt.
        reply: a position of the answer, and the snapshot of the per-sequence state there.
        place: where its state is, in host memory.
        is_invariant: Whether all computed positions of the prompt have bits that depend on the
            prompt only; see `Capabilities.invariant_rows`.
    """

    request: Request
    seat: Seat
    left: int
    wanted: int
    room: int
    computed: int = 0
    reached: int = 0
    asked: int = 0
    replay: deque[int] = field(default_factory=deque)
    pages: list[int] = field(default_factory=list)
    num_named: int = 0
    saves: set[int] = field(default_factory=set)
    partings: set[int] = field(default_factory=set)
    latest: bytes | None = None
    reply: tuple[int, Snapshot] | None = None
    place: HostPlace | None = None
    is_invariant: bool = True


@dataclass(frozen=True, slots=True)
class Plan:
    """A step and what becomes of its tokens: ``rows`` names who gets the token of a seat; rows
    that only replay known tokens are not there. ``prompt_weight``: tokens at the beginning of a
    sequence that would take as long as the step's pieces of prompts. ``echoes``: whose chunks echo
    or pool, in their order, and where each begins.
    """

    step: Step
    rows: Mapping[Seat, Running]
    num_prompt_tokens: int
    prompt_weight: float
    echoes: tuple[tuple[Request, int], ...] = ()
