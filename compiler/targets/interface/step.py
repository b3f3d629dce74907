"""What one step of an executable is: plain host data, the same on every target and on every rank.

A step says which seats decode, which pieces of prompts are computed, and what changes in the
device's own tables before. It holds no tensor, no closure and no device handle, so a scheduler can
make it without a device and send it to another process. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NewType, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Seat = NewType("Seat", int)
"""A row of an executable's tables: one running sequence, from 0 to ``max_seats - 1``."""

Snapshot = NewType("Snapshot", int)
"""A place for the per-sequence state of one sequence at one position; the runtime numbers them."""

HostPlace = NewType("HostPlace", int)
"""A place in host memory for all the state of a seat that was preempted."""

GOES_ON, END_TOKEN, NOT_A_NUMBER = 0, 1, 2
"""Why a row's token is what it is: see :class:`Chosen`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choosing:
    """How the tokens of a seat are chosen from its logits; the defaults are greedy and neutral.

    The order is that of :func:`tilewright.compiler.sampling.choose.choose_tokens`, which defines
    the result.

    Attributes:
        temperature: 0 takes the likeliest token.
        top_k: 0 keeps all tokens. top_p: 1 keeps all. min_p: 0 keeps all.
        repetition_penalty: divides positive logits of tokens seen in prompt or answer, and
            multiplies negative ones; 1 is neutral.
        frequency_penalty, presence_penalty: subtracted for each time a token stands in the answer,
            and once where it stands there at all; 0 is neutral.
        bias: pairs of a token and what is added to its logit.
        seed: with the position of the token it names the random number; 64 bits.
        end_tokens: tokens that end the sequence.
        min_tokens: tokens of the answer before any of the end tokens may be chosen.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    end_tokens: tuple[int, ...] = ()
    min_tokens: int = 0

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, whatever the filters say."""
        return self.temperature <= 0.0

    @property
    def is_penalised(self) -> bool:
        """Whether the tokens seen so far change the logits."""
        return bool(
            self.repetition_penalty != 1.0 or self.frequency_penalty or self.presence_penalty
        )

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before the temperature: penalties, bias, ``min_tokens``."""
        return self.is_penalised or bool(self.bias) or self.min_tokens > 0


@dataclass(frozen=True, slots=True)
class Open:
    """A sequence sits down on a free seat, or takes over one that is kept.

    Attributes:
        prompt: the tokens before the answer; penalties and ``min_tokens`` count from behind them.
        keeps: so many first positions are computed already (0: the seat begins empty): of what the
            seat holds, which is kept; with pages, of those that it is given in this step.
    """

    seat: Seat
    choosing: Choosing
    prompt: tuple[int, ...] = ()
    keeps: int = 0


@dataclass(frozen=True, slots=True)
class Close:
    """The sequence of a seat has ended; the seat may be opened again in the same step."""

    seat: Seat


@dataclass(frozen=True, slots=True)
class Pages:
    """The pages of a seat from its page ``first`` on: the runtime's numbers of them."""

    seat: Seat
    first: int
    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Save:
    """Keep a seat's per-sequence state, as it is before this step, in a snapshot."""

    seat: Seat
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Load:
    """Put the per-sequence state of a snapshot into a seat; its position is the snapshot's."""

    seat: Seat
    snapshot: Snapshot


@dataclass(frozen=True, slots=True)
class Copy:
    """The first positions of one seat become those of another, which is open and empty.

    Per-sequence state is copied whole, so it wants ``num_positions`` to be the source's length, or
    a :class:`Load` behind it.
    With pages, only the positions behind the last whole page are copied: whole pages are shared
    through :class:`Pages`.
    """

    source: Seat
    target: Seat
    num_positions: int


@dataclass(frozen=True, slots=True)
class Out:
    """Copy all the state of a seat to host memory, before its pages go to others."""

    seat: Seat
    place: HostPlace


@dataclass(frozen=True, slots=True)
class Back:
    """Copy what :class:`Out` kept into a seat, opened and given pages in this step or before."""

    seat: Seat
    place: HostPlace


@dataclass(frozen=True, slots=True)
class Drop:
    """Asks to forget what :class:`Out` kept: the sequence has ended meanwhile."""

    place: HostPlace


Edit: TypeAlias = Open | Close | Pages | Save | Load | Copy | Out | Back | Drop


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of a prompt, computed by the prompt kernels.

    Attributes:
        start: the position of the first of them; what the seat held from there on is forgotten.
        chooses: whether the token behind the last one is chosen, and becomes what the seat holds.
        saves: pairs of a position behind one of these tokens and the snapshot that keeps the
            per-sequence state there.
        echoes: whether the rows of all of its tokens are wanted, and not of the last one alone:
            their logits, and the log probability of each of its tokens behind the first.
        next_token: of a chunk that echoes, the prompt's token behind it, whose log probability is
            wanted too; None at the prompt's end.
        also: of a chunk that chooses, seats that were opened for other choices of the same prompt,
            and hold nothing: they get a copy of the state behind the chunk (with pages, of what
            lies behind the last whole page), and a token of their own is chosen for each of them.
        pools: whether the final hidden states of its tokens are wanted, as `Pooled` has them. Such
            a chunk chooses nothing and echoes nothing.
    """

    seat: Seat
    start: int
    tokens: tuple[int, ...]
    chooses: bool = False
    saves: tuple[tuple[int, Snapshot], ...] = ()
    echoes: bool = False
    also: tuple[Seat, ...] = ()
    next_token: int | None = None
    pools: bool = False

    @property
    def echoed(self) -> tuple[int, ...]:
        """The tokens whose log probabilities a chunk that echoes gives: of its first rows."""
        return self.tokens[1:] + (() if self.next_token is None else (self.next_token,))

    @property
    def end(self) -> int:
        """The position behind the last token of the chunk."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step. ``edits`` come first, in their order; no seat is both in ``decode`` and
    in ``prompts``, and none is in either twice.

    Attributes:
        decode: seats that read one token each, the one they hold. While nobody comes or goes it is
            the same tuple object, which executables look for.
        forced: seats of ``decode`` that read this token instead of the one they hold.
        masked: the choice waits for :meth:`Executable.choose`, with the tokens that are allowed.
        logprobs: how many of the likeliest tokens' log probabilities come with each choice, beside
            the chosen one's; None: no log probabilities at all.
        want_logits: whether the rows' logits are given.
    """

    decode: tuple[Seat, ...] = ()
    prompts: tuple[Chunk, ...] = ()
    edits: tuple[Edit, ...] = ()
    forced: Mapping[Seat, int] = field(default_factory=dict)
    masked: bool = False
    logprobs: int | None = None
    want_logits: bool = False


@dataclass(frozen=True, slots=True)
class LogProbs:
    """Natural logarithms of the probabilities of one choice, from the unchanged logits.

    ``top``: the likeliest tokens and theirs, the likeliest first, equal ones by token id.
    """

    chosen: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Pooled:
    """Final hidden states of a chunk: the input of the product that makes the logits, normed.

    Attributes:
        count: Number of tokens.
        total: Sum over the tokens, float32 ``[hidden]``.
        last: State of the last token, float32 ``[hidden]``.
    """

    count: int
    total: np.ndarray
    last: np.ndarray


@dataclass(frozen=True, slots=True)
class Chosen:
    """What was chosen in a part of a step, a row a seat.

    ``why``: ``GOES_ON``, ``END_TOKEN`` where the token is one of the seat's end tokens, or
    ``NOT_A_NUMBER`` where the logits had no number to choose from, and the token means nothing.
    ``echo``: of a chunk that echoes, the log probabilities of the tokens that it echoes.
    ``pooled``: hidden states of a chunk that pools.
    """

    tokens: Sequence[int]
    why: Sequence[int]
    logprobs: Sequence[LogProbs] | None = None
    echo: Sequence[LogProbs] | None = None
    pooled: Pooled | None = None


@dataclass(frozen=True, slots=True)
class Part:
    """The rows of a step that are there together: those that decode, or those that end prompts.

    ``seats`` are those for which a token was chosen, in the order of the step. A chunk that echoes
    or pools is a part of its own, with no seat where it does not choose. ``read`` waits for this
    part alone; it may be called again, and while up to two later steps are under way. ``logits``,
    where they were asked for, gives float32 ``[rows, vocabulary]`` on the host until the
    executable's next step: a row a seat, or of a chunk that echoes a row a token.
    """

    seats: tuple[Seat, ...]
    read: Callable[[], Chosen]
    logits: Callable[[], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The parts of a step that chose tokens: decode rows first, then the ends of prompts.

    ``is_mixed``: both were computed in one pass, and are one part: whoever has read it has waited
    for the whole step.
    """

    parts: tuple[Part, ...] = ()
    is_mixed: bool = False
