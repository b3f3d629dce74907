"""One request: its prompt, how its tokens are chosen, what was chosen. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.interface.step import LogProbs
from tilewright.errors import RequestError
from tilewright.runtime.grammar.spec import GrammarSpec
from tilewright.runtime.pooling import MEAN, Pooling

if TYPE_CHECKING:
    from tilewright.runtime.grammar.matchers import Matcher

_NO_ANSWER = SamplingParams(max_tokens=1)
STOPPED, LENGTH, CANCELLED, FAILED = "stop", "length", "cancelled", "error"


@dataclass(slots=True, eq=False)
class Request:
    """A request and its answer. Times are ``time.perf_counter()`` seconds.

    Attributes:
        priority: lower ones come first.
        client: whose it is; within a priority, clients take turns.
        is_private: whether what is computed for its prompt is shared with nobody, as where the
            log probabilities of all its tokens are wanted.
        grammar: what its answer must be; None: any text. matcher: where the answer stands in it.
        cache_salt: what is computed for its prompt is shared with those of the same salt alone.
        like: the first of several choices for the same prompt, of which this is another; what that
            has computed is copied. It is added before this one.
        output: the tokens chosen so far, an end token included.
        logprobs: of each of them, where ``sampling`` asks for it.
        prompt_logprobs: of the prompt's tokens behind the first, as far as they have been read.
        pooling: Vector wanted instead of an answer. None: an answer.
        finish_reason: None while it runs; then ``stop``, ``length``, ``cancelled`` or ``error``.
        error, error_code: why it ended with ``error``, for people and for programs.
        num_cached: tokens of its prompt that did not have to be computed.
        order: counts arrivals; the scheduler's.
        choices: the other choices for its prompt, where it is the first of several.
        page_keys: names of the full pages of its prompt, by which they are shared; the scheduler
            makes them once, where it shares at all.
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
    like: Request | None = None
    output: list[int] = field(default_factory=list)
    logprobs: list[LogProbs] = field(default_factory=list)
    prompt_logprobs: list[LogProbs] = field(default_factory=list)
    pooling: Pooling | None = None
    finish_reason: str | None = None
    error: str = ""
    error_code: str = "engine_error"
    arrived_at: float = 0.0
    token_times: list[float] = field(default_factory=list)
    num_cached: int = 0
    page_keys: tuple[bytes, ...] = ()
    num_preemptions: int = 0
    order: int = 0
    choices: list[Request] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.sampling.prompt_logprobs is not None:
            self.is_private, self.like = True, None
        if self.pooling is not None:
            self.sampling, self.like = _NO_ANSWER, None
            self.is_private |= self.pooling.kind == MEAN  # a cached position is not computed

    @property
    def num_tokens(self) -> int:
        """Prompt and output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def max_positions(self) -> int:
        """The most positions its state must hold (the last token is never fed back)."""
        return len(self.prompt) + self.sampling.max_tokens - 1


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that are not in the vocabulary.

    Raises:
        RequestError: naming the first of them.
    """
    if tokens and not (min(tokens) >= 0 and max(tokens) < vocab_size):
        wrong = next(token for token in tokens if not 0 <= token < vocab_size)
        raise RequestError(f"token {wrong}; allowed: 0 to {vocab_size - 1}")
