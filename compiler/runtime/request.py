"""One request: its prompt, how its tokens are chosen, and how far it has come."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from tilewright.compiler.errors import RequestError
from tilewright.compiler.targets.base import StateHandle

STOPPED, LENGTH, CANCELLED = "stop", "length", "cancelled"
_MAX_SEED = 1 << 63
_MAX_COUNT = 1 << 31


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends.

    ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 filter nothing. ``end_tokens`` end the
    request; the end token itself is part of its output.

    Raises:
        RequestError: naming the parameter that is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    max_tokens: int = 200
    end_tokens: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and 0.0 <= self.temperature <= 100.0):
            raise RequestError(f"temperature {self.temperature}; allowed: 0 to 100")
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise RequestError(f"top_p {self.top_p}; allowed: above 0 and up to 1")
        if not 0 <= self.top_k < _MAX_COUNT:
            raise RequestError(f"top_k {self.top_k}; allowed: 0 (off) to {_MAX_COUNT - 1}")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens {self.max_tokens}; allowed: 1 or more")
        if not -_MAX_SEED <= self.seed < _MAX_SEED:
            raise RequestError(f"seed {self.seed}; allowed: 64-bit integers")


@dataclass(slots=True, eq=False)
class Request:
    """A request in flight. Times are ``time.perf_counter()`` seconds."""

    request_id: int
    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    output: list[int] = field(default_factory=list)
    num_computed: int = 0
    state: StateHandle | None = None
    finish_reason: str | None = None
    arrived_at: float = 0.0
    token_times: list[float] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """The number of tokens in its prompt and its output so far."""
        return len(self.prompt) + len(self.output)

    @property
    def max_positions(self) -> int:
        """The most positions its state must hold (the last token is never fed back)."""
        return len(self.prompt) + self.sampling.max_tokens - 1

    @property
    def is_prefill(self) -> bool:
        """Whether some of the prompt has not been computed yet."""
        return self.num_computed < len(self.prompt)

    def pending_tokens(self, limit: int) -> list[int]:
        """The next tokens to compute, at most ``limit`` of them."""
        start = self.num_computed
        if self.is_prefill:
            return list(self.prompt[start : start + limit])
        return [self.output[start - len(self.prompt)]]


def check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    """Refuse ids that are not in the vocabulary.

    Raises:
        RequestError: naming the first such id.
    """
    for token in tokens:
        if not 0 <= token < vocab_size:
            raise RequestError(f"token {token}; allowed: 0 to {vocab_size - 1}")
