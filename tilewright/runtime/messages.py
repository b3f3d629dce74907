"""What passes between an engine and those it serves: plain records, the same in one process or two.

Times are seconds measured by the engine's own clock and carried as intervals. Imports no torch.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import msgspec

from tilewright.compiler.targets.interface.step import LogProbs
from tilewright.images.processor import ImageProcessor
from tilewright.runtime.request import EngineRequest
from tilewright.runtime.scheduling.engine_stats import Tally
from tilewright.runtime.speculative.counts import SpeculationCounts


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """End a request now; nothing more is said of it. One that has ended already is ignored."""

    request_id: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Prompts that come from now on share nothing with those that have been."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Asks the engine to leave its loop; what still runs is given up."""


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The engine says that it serves from now on, and with what.

    Attributes:
        max_positions: the most positions a request may need: prompt and answer, less the last
            token, which is never read.
        cache_bytes: of the pool of pages, or of the state of all slots at full length; of several
            ranks, the first one's.
        shares_prefixes: whether prompts that begin alike are computed once.
        hidden_size: Width of the vectors that prompts are pooled to. 0: there are none.
        speculation: Options of speculative decoding. None: there is none.
        images: Image processor. None: text only.
        facts: what the model is, for people: name, target, precision, device, weights.
    """

    vocab_size: int
    max_num_seqs: int
    max_context: int
    max_positions: int
    num_pages: int = 0
    page_size: int = 0
    num_snapshots: int = 0
    cell: int = 0
    invariant: str = "none"
    invariant_rows: int = 0
    cache_bytes: int = 0
    shares_prefixes: bool = True
    hidden_size: int = 0
    speculation: dict[str, Any] | None = None
    images: ImageProcessor | None = None
    facts: dict[str, str] = {}


class EngineStartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start; ``message`` says why in one line."""

    message: str


class RequestStarted(msgspec.Struct, frozen=True, tag=True):
    """A request has a slot, after ``queue_s`` in the queue; ``num_cached`` tokens of its prompt
    need not be computed. Said once, also where the request is preempted later.
    """

    request_id: int
    queue_s: float
    num_cached: int


class NewTokens(msgspec.Struct, frozen=True, tag=True):
    """The next tokens of an answer, and their log probabilities where they were asked for;
    ``echo``, with the first of them: those of the prompt's tokens behind its first.

    Attributes:
        num_draft_tokens, num_accepted_tokens: Verified draft tokens of the request so far, and the
            accepted ones.
    """

    request_id: int
    tokens: tuple[int, ...]
    logprobs: tuple[LogProbs, ...] = ()
    echo: tuple[LogProbs, ...] = ()
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0


class RequestFinished(msgspec.Struct, frozen=True, tag=True):
    """A request has ended by itself: ``reason`` is ``stop`` (an end token) or ``length``.

    ``prefill_s`` runs from the slot to the first token, ``decode_s`` from there to the last.
    ``vector``: of a request that pools, little-endian float32.
    """

    request_id: int
    reason: str
    prefill_s: float
    decode_s: float
    num_preemptions: int = 0
    vector: bytes = b""


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """A request cannot be served to its end. ``code``: ``engine_error`` or ``not_a_number``."""

    request_id: int
    code: str
    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The loop is alive: what it holds now, and counts since its start.

    ``tallies``: see :mod:`tilewright.runtime.scheduling.engine_stats`.
    """

    num_running: int
    num_waiting: int
    num_pages_held: int
    num_steps: int
    num_preemptions: int
    num_dropped: int
    num_swapped: int = 0
    num_snapshots_used: int = 0
    num_images: int = 0
    num_image_hits: int = 0
    tallies: dict[str, Tally] = {}
    speculation: SpeculationCounts | None = None


ToEngine: TypeAlias = EngineRequest | AbortRequest | ResetPrefixCache | Shutdown
FromEngine: TypeAlias = (
    EngineReady
    | EngineStartFailed
    | RequestStarted
    | NewTokens
    | RequestFinished
    | RequestFailed
    | Heartbeat
)


class Transport(Protocol):
    """How messages reach an engine's loop and leave it: a socket in service, queues in tests."""

    def receive(self, seconds: float) -> list[ToEngine]:
        """What has come, in order; where there is nothing, wait for up to so many seconds."""

    def send(self, messages: list[FromEngine]) -> None:
        """Give messages to the other side, in order, without waiting for it."""
