"""Messages between an engine and its clients: plain records, within a process or between two.

Times are intervals in seconds of the engine's clock. Imports no torch.
"""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias

import msgspec

from tilewright.compiler.targets.interface.step import LogProbs
from tilewright.images.squares import AnyProcessor
from tilewright.runtime.request import EngineRequest
from tilewright.runtime.scheduling.engine_stats import HistogramCounts
from tilewright.runtime.speculative.counts import SpeculationCounts


class AbortRequest(msgspec.Struct, frozen=True, tag=True):
    """Aborts a request. No message follows. A finished request is ignored."""

    request_id: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True):
    """Empties the prefix cache for all later prompts."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    """Ends the engine loop. Running requests are dropped."""


class EngineReady(msgspec.Struct, frozen=True, tag=True):
    """The engine serves requests.

    Attributes:
        max_positions: maximum positions per request: prompt and output without the last
            token, which is never read.
        cache_bytes: size of the page pool, or of all slots at full length. Rank 0 only.
        shares_prefixes: whether the prefix cache is enabled.
        hidden_size: Width of the vectors that prompts are pooled to. 0: there are none.
        speculation: Speculative decoding options. None: there is none.
        images: Image processor. None: text only.
        facts: name, target, precision, device and weights of the model.
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
    images: AnyProcessor | None = None
    facts: dict[str, str] = {}


class EngineStarting(msgspec.Struct, frozen=True, tag=True):
    """A start's progress. ``total`` 0: ``text`` is a note for the operator."""

    text: str
    done: int = 0
    total: int = 0


class EngineStartFailed(msgspec.Struct, frozen=True, tag=True):
    """The engine cannot start. ``message`` is the reason on a single line."""

    message: str


class RequestStarted(msgspec.Struct, frozen=True, tag=True):
    """A request has its first slot. It is sent once.

    Attributes:
        queue_s: seconds in the queue.
        num_cached: prompt tokens from the prefix cache.
    """

    request_id: int
    queue_s: float
    num_cached: int


class NewTokens(msgspec.Struct, frozen=True, tag=True):
    """New tokens of a request.

    Attributes:
        logprobs: log probabilities of the tokens, if requested.
        echo: log probabilities of the prompt after its first token, with the first new tokens.
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
    """A request has finished.

    Attributes:
        reason: ``stop`` (an end token) or ``length``.
        prefill_s: seconds from the slot to the first token.
        decode_s: seconds from the first token to the last token.
        vector: pooled vector as little-endian float32. Empty for text.
    """

    request_id: int
    reason: str
    prefill_s: float
    decode_s: float
    num_preemptions: int = 0
    vector: bytes = b""


class RequestFailed(msgspec.Struct, frozen=True, tag=True):
    """A request has failed. ``code`` is ``engine_error`` or ``not_a_number``."""

    request_id: int
    code: str
    message: str


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Current state of the loop, and counts from its start.

    ``stats``: see :mod:`tilewright.runtime.scheduling.engine_stats`.
    """

    num_running: int
    num_waiting: int
    num_used_pages: int
    num_steps: int
    num_preemptions: int
    num_dropped: int
    num_swapped: int = 0
    num_snapshots_used: int = 0
    num_images: int = 0
    num_image_hits: int = 0
    stats: dict[str, HistogramCounts] = {}
    speculation: SpeculationCounts | None = None


ToEngine: TypeAlias = EngineRequest | AbortRequest | ResetPrefixCache | Shutdown
FromEngine: TypeAlias = (
    EngineReady
    | EngineStarting
    | EngineStartFailed
    | RequestStarted
    | NewTokens
    | RequestFinished
    | RequestFailed
    | Heartbeat
)


class Transport(Protocol):
    """Transport for messages between clients and loop: a socket in the server, queues in tests."""

    def receive(self, seconds: float) -> list[ToEngine]:
        """Return the received messages in order. Wait up to ``seconds`` for the first message."""

    def send(self, messages: list[FromEngine]) -> None:
        """Send messages in order, without waiting for the receiver."""
