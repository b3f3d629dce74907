"""Request states, scheduling options, and the scheduler's output. Imports no torch."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.step import (
    LogProbs,
    Slot,
    StateSnapshot,
    Step,
    SwapHandle,
)
from tilewright.images.prompt import PromptImage, cache_tokens, rotary_positions
from tilewright.runtime.grammar.spec import GrammarSpec
from tilewright.runtime.pooling import MEAN, Pooling
from tilewright.runtime.request import EngineRequest
from tilewright.runtime.speculative.config import SpeculativeConfig
from tilewright.runtime.speculative.ngram import NgramIndex

if TYPE_CHECKING:
    import numpy as np

    from tilewright.runtime.grammar.matchers import Matcher

STEP_MS = 24.0
"""Default milliseconds for a prefill chunk in a step with decode rows."""
HOST_CACHE_BYTES = 4 << 30
"""Default host memory in bytes for swapped requests and cached slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Scheduler options.

    Attributes:
        step_ms: maximum milliseconds for prefill in a step with decode rows. 0: no limit.
        beat_ms: maximum milliseconds for prefill in other steps, on executables without
            asynchronous scheduling. The loop handles no messages during a step. 0: no limit.
        step_tokens: maximum prompt tokens in a step. None: the executable's limit.
        reuses: whether prompts share computed prefixes: pages, or finished slots on executables
            without pages. Measurements disable it.
        prompts_first: whether decode rows wait for prefill. Useful for offline batches.
        cache_replies: whether full output pages and their state are shared. Decode kernels write
            them, so they equal prompt pages up to rounding.
        host_bytes: host memory for preempted requests, and the same amount again for cached slots.
            Other state is computed again.
        speculative: Speculative decoding. None: no drafts.
    """

    step_ms: float = STEP_MS
    beat_ms: float = 0.0
    step_tokens: int | None = None
    reuses: bool = True
    prompts_first: bool = False
    cache_replies: bool = False
    host_bytes: int = HOST_CACHE_BYTES
    speculative: SpeculativeConfig | None = None


NO_SLOT = Slot(-1)
_NO_ANSWER = SamplingParams(max_tokens=1)


@dataclass(slots=True, eq=False)
class RequestState:
    """A request in an engine: its input, its output, and its slot's state.

    Times are ``time.perf_counter()`` seconds. Fields with the names of `EngineRequest` have its
    meaning.

    Attributes:
        is_private: Whether the prefix cache is off for the request.
        matcher: The output's position in the grammar.
        like: First state with the same prompt. It is added earlier, and its pages are copied.
        pooling: Vector to compute. None: the output is text.
        output: Output tokens, with the end token.
        logprobs: Log probabilities of ``output``.
        prompt_logprobs: Log probabilities of prompt tokens after the first, up to the last step.
        finish_reason: None while it runs; then ``stop``, ``length``, ``cancelled`` or ``error``.
        error, error_code: Reason of ``error``, for people and for programs.
        num_cached: Prompt tokens from the prefix cache.
        order: Arrival number, set by the scheduler.
        choices: Later states with the same prompt.
        page_keys: Keys of full prompt pages in the prefix cache. Empty: no sharing.
        num_sent: Output tokens that were sent to the client.
        started_at: The first slot's time. None: it never had a slot.
        slot: Slot in the executable.
        prompt_left: Prompt tokens that no step has taken.
        num_computed: Positions of launched steps, or from the prefix cache.
        max_num_computed: Largest length of the cached sequence; see `Capabilities.can_cut`.
        num_scheduled: Output tokens that are known, or that launched steps sample.
        max_output: Maximum output token count. 0: the output is a vector.
        page_capacity: Positions that the pages hold.
        replay_tokens: Output tokens that decode steps must read again after preemption.
        num_named: Full prompt pages that are in the prefix cache.
        saves: Prompt positions whose per-sequence state is kept.
        branch_points: Positions in ``saves`` where another prompt branches off.
        latest: The last prefix's key with a snapshot.
        reply: Output position and snapshot of its per-sequence state.
        place: Host memory of the swapped state. None: the state is not swapped out.
        images: Images in the prompt, in order.
        cache_tokens: The prompt for caches: placeholders contain their image's digest.
        rotary: Positions of rotation up to the last image, ``[3, end]``. None: no images.
        rotary_delta: Rotation minus index position, after the last image.
        is_invariant: Whether the bits of all computed prompt positions depend on the prompt only;
            see `Capabilities.invariant_rows`.
        has_drafts: Whether decode steps may verify drafts.
        ngrams: The tokens by n-gram. None before the first draft.
        num_unread_rows: A launched step's rows with drafts. The positions that follow are unknown
            until it is read. 0: no such step.
        num_draft_tokens, num_accepted_tokens: Verified draft tokens, and the accepted ones.
    """

    request_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    client: str = ""
    is_private: bool = False
    grammar: GrammarSpec | None = None
    matcher: Matcher | None = None
    cache_salt: str = ""
    like: RequestState | None = None
    pooling: Pooling | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[LogProbs] = field(default_factory=list)
    prompt_logprobs: list[LogProbs] = field(default_factory=list)
    finish_reason: str | None = None
    error: str = ""
    error_code: str = "engine_error"
    arrived_at: float = 0.0
    token_times: list[float] = field(default_factory=list)
    num_cached: int = 0
    page_keys: tuple[bytes, ...] = ()
    num_preemptions: int = 0
    order: int = 0
    choices: list[RequestState] = field(default_factory=list)
    num_sent: int = 0
    started_at: float | None = None
    slot: Slot = NO_SLOT
    prompt_left: int = 0
    num_computed: int = 0
    max_num_computed: int = 0
    num_scheduled: int = 0
    max_output: int = 0
    page_capacity: int = 0
    replay_tokens: deque[int] = field(default_factory=deque)
    pages: list[int] = field(default_factory=list)
    num_named: int = 0
    saves: set[int] = field(default_factory=set)
    branch_points: set[int] = field(default_factory=set)
    latest: bytes | None = None
    reply: tuple[int, StateSnapshot] | None = None
    place: SwapHandle | None = None
    is_invariant: bool = True
    has_drafts: bool = True
    ngrams: NgramIndex | None = None
    num_unread_rows: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    images: tuple[PromptImage, ...] = ()
    cache_tokens: tuple[int, ...] = ()
    rotary: np.ndarray | None = None
    rotary_delta: int = 0

    def __post_init__(self) -> None:
        self.cache_tokens = cache_tokens(self.prompt, self.images) if self.images else self.prompt
        if self.images and self.images[0].image.changes_rotation:
            self.rotary, self.rotary_delta = rotary_positions(self.images)
        if self.sampling.prompt_logprobs is not None:
            self.is_private, self.like = True, None
        if self.pooling is not None:
            self.sampling, self.like = _NO_ANSWER, None
            self.is_private |= self.pooling.kind == MEAN  # a cached position is not computed

    @classmethod
    def of(
        cls, request: EngineRequest, *, cache_salt: str, like: RequestState | None
    ) -> RequestState:
        """Return the state of a request that has arrived."""
        return cls(
            request.request_id,
            request.prompt,
            request.sampling,
            priority=request.priority,
            client=request.client,
            grammar=request.grammar,
            cache_salt=cache_salt,
            like=like,
            pooling=Pooling(request.pooling) if request.pooling else None,
            has_drafts=request.speculative,
            images=request.images,
        )

    def text_tokens(self, start: int = 0) -> list[int]:
        """Return output tokens from ``start`` on, without end tokens."""
        ends = self.sampling.stop_token_ids
        return [token for token in self.output[start:] if token not in ends]

    @property
    def image_tokens(self) -> frozenset[int]:
        """Return the placeholder ids. They may be outside the logits."""
        return frozenset(self.prompt[placed.first] for placed in self.images)

    def whole_images(self, end: int) -> int:
        """Return ``end``, or the start of a bidirectional image that ``end`` would cut."""
        for placed in self.images:
            if placed.image.is_bidirectional and placed.first < end < placed.end:
                return placed.first
        return end

    def image_end(self, start: int) -> int:
        """Return the end of a bidirectional image from ``start``, or ``start``."""
        for placed in self.images:
            if placed.image.is_bidirectional and placed.first == start:
                return placed.end
        return start

    def rotary_of(self, start: int, end: int) -> tuple[int, ...]:
        """Return positions of rotation for a chunk: times, then rows, then columns.

        Empty: the chunk is after the last image, or there is no image.
        """
        if self.rotary is None or start >= self.rotary.shape[1]:
            return ()
        axes = self.rotary[:, start:end].tolist()
        after = range(max(start, self.rotary.shape[1]), end)
        return tuple(at for axis in axes for at in (*axis, *(self.rotary_delta + n for n in after)))

    def take_slot(self, slot: Slot, *, num_cached: int, max_num_computed: int) -> None:
        """Begin in a slot whose first ``num_cached`` positions are computed."""
        self.slot, self.num_cached = slot, num_cached
        self.prompt_left = len(self.prompt) - num_cached
        self.num_computed, self.max_num_computed = num_cached, max_num_computed
        self.num_scheduled, self.replay_tokens = len(self.output), deque(self.output)
        self.max_output = 0 if self.pooling is not None else self.sampling.max_tokens
        self.pages, self.num_named, self.num_unread_rows = [], 0, 0
        self.saves = set()
        self.latest, self.reply, self.is_invariant = None, None, True

    def expect(self, num_drafts: int) -> None:
        """Note launched decode rows with drafts. Positions and tokens are maximums until
        :meth:`settle`.
        """
        self.num_unread_rows = 1 + num_drafts
        self.num_computed += num_drafts
        self.num_scheduled += num_drafts
        self.max_num_computed = max(self.max_num_computed, self.num_computed)

    def settle(self, num_emitted: int) -> None:
        """Note the number of emitted tokens of a step with drafts."""
        if self.num_unread_rows:
            num_rejected = self.num_unread_rows - num_emitted
            self.num_computed -= num_rejected
            self.num_scheduled -= num_rejected
            self.num_unread_rows = 0

    @property
    def max_positions(self) -> int:
        """Maximum position count. The last token is never read."""
        return len(self.prompt) + self.sampling.max_tokens - 1


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """A scheduled step and its tokens' requests.

    Attributes:
        rows: each slot's request with a new token. Slots that replay known tokens are absent.
        num_prompt_tokens: prompt tokens in the step.
        prompt_weight: tokens at position 0 with the cost of the step's chunks.
        echoes: request and start for each chunk that echoes or pools, in order.
    """

    step: Step
    rows: Mapping[Slot, RequestState]
    num_prompt_tokens: int
    prompt_weight: float
    echoes: tuple[tuple[RequestState, int], ...] = ()

    @property
    def num_decode_rows(self) -> int:
        """Number of decode rows, drafts included."""
        return len(self.step.decode) + sum(map(len, self.step.drafts.values()))
