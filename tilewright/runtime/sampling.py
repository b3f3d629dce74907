"""How a request's tokens are chosen and when it ends, as a user says it. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tilewright.compiler.targets.interface.step import Choosing
from tilewright.errors import RequestError

_MAX_SEED = 1 << 63
_MAX_COUNT = 1 << 31
MAX_LOGPROBS = 20
MAX_BIASED = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How a request's tokens are chosen, and when it ends; the defaults are greedy and neutral.

    ``temperature`` 0 or ``top_p`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 filter
    nothing; ``end_tokens`` end the request, and the end token itself is part of its output;
    ``logprobs`` asks for the log probability of each token, and of so many of the likeliest;
    ``prompt_logprobs`` for those of the prompt's tokens behind the first. The other fields
    are those of :class:`tilewright.compiler.targets.interface.step.Choosing`.

    Raises:
        RequestError: naming the parameter that is out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = 0
    max_tokens: int = 200
    min_tokens: int = 0
    end_tokens: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        _check("temperature", self.temperature, 0.0, 100.0)
        _check("top_p", self.top_p, 0.0, 1.0)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check("presence_penalty", self.presence_penalty, -2.0, 2.0)
        if not (math.isfinite(self.repetition_penalty) and 0 < self.repetition_penalty <= 10):
            raise RequestError(
                f"repetition_penalty {self.repetition_penalty}; allowed: above 0 and up to 10"
            )
        if not 0 <= self.top_k < _MAX_COUNT:
            raise RequestError(f"top_k {self.top_k}; allowed: 0 (off) to {_MAX_COUNT - 1}")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens {self.max_tokens}; allowed: 1 or more")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens}; allowed: 0 to {self.max_tokens}")
        if not -_MAX_SEED <= self.seed < _MAX_SEED:
            raise RequestError(f"seed {self.seed}; allowed: 64-bit integers")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise RequestError(f"{name} {count}; allowed: 0 to {MAX_LOGPROBS}")
        if len(self.logit_bias) > MAX_BIASED:
            raise RequestError(f"{len(self.logit_bias)} biases; allowed: up to {MAX_BIASED}")
        for token, bias in self.logit_bias:
            _check(f"logit_bias of token {token}", bias, -100.0, 100.0)

    def choosing(self) -> Choosing:
        """The part of the parameters that an executable is told of."""
        return Choosing(
            temperature=self.temperature if self.top_p else 0.0,
            top_k=self.top_k,
            top_p=self.top_p or 1.0,
            min_p=self.min_p,
            repetition_penalty=self.repetition_penalty,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            bias=self.logit_bias,
            seed=self.seed,
            end_tokens=self.end_tokens,
            min_tokens=self.min_tokens,
        )


def _check(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise RequestError(f"{name} {value}; allowed: {low:g} to {high:g}")
