"""`SamplingParams`: the sampling parameters from HTTP to the kernel.

A field carries its range and its help. HTTP schemas, `LLM.generate` keywords, batch defaults and
command line options are made from these fields. Imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from tilewright.errors import RequestError, allowed, one_line

_MAX_INT64 = (1 << 63) - 1
_RANGE, _HELP, _PLAIN = "range", "help", "plain"
MAX_LOGPROBS = 20
MAX_BIASED = 1024
_OLD_NAMES = {"end_tokens": "stop_token_ids"}


@dataclass(frozen=True, slots=True)
class Range:
    """Values from ``low`` to ``high``, both included. The type is that of ``low``.

    ``is_above``: Whether ``low`` itself is invalid.
    ``off``: Second value in HTTP bodies that disables the parameter. None: there is none.
    """

    low: float
    high: float
    is_above: bool = False
    off: int | None = None

    def has(self, value: float) -> bool:
        """Return whether ``value`` is in range."""
        is_low = value > self.low if self.is_above else value >= self.low
        return math.isfinite(value) and is_low and value <= self.high

    def __str__(self) -> str:
        low, high = (v if isinstance(v, int) else f"{v:g}" for v in (self.low, self.high))
        return f"above {low} and up to {high}" if self.is_above else f"{low} to {high}"


def _param(default: Any, text: str, span: Range, *, is_plain: bool = True) -> Any:
    """Return a field. ``is_plain``: a request or a command line gives the value itself."""
    metadata = {_HELP: text, _RANGE: span, _PLAIN: is_plain}
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters. The defaults are greedy and neutral.

    :func:`tilewright.compiler.sampling.sampler.choose_tokens` defines the result. ``top_p`` 0 is
    stored as ``temperature`` 0 and ``top_p`` 1.

    Attributes:
        top_n_sigma: Width of the kept range below the largest logit, in standard deviations of
            the logits.
        logit_bias: Pairs (token, value). The value is added to the logit.
        seed: Random seed. A random number depends on seed and position only.
        stop_token_ids: Tokens that end the request. The output contains the end token.
        min_tokens: Minimum output length before an end token.
        logprobs: Top tokens with log probabilities per output token. 0: the output token
            only. None: no log probabilities.
        prompt_logprobs: The same for prompt tokens after the first token.

    Raises:
        RequestError: A parameter is invalid.
    """

    temperature: float = _param(0.0, "0 is greedy (default: 0)", Range(0.0, 100.0))
    top_k: int = _param(0, "0 is off (default: 0)", Range(0, (1 << 31) - 1, off=-1))
    top_p: float = _param(1.0, "1 is off, 0 is greedy (default: 1)", Range(0.0, 1.0))
    min_p: float = _param(0.0, "0 is off (default: 0)", Range(0.0, 1.0))
    top_n_sigma: float = _param(
        0.0,
        "keep logits within N standard deviations below the largest; 0 is off (default: 0)",
        Range(0.0, 100.0, off=-1),
    )
    repetition_penalty: float = _param(
        1.0, "1 is off (default: 1)", Range(0.0, 10.0, is_above=True)
    )
    frequency_penalty: float = _param(0.0, "0 is off (default: 0)", Range(-2.0, 2.0))
    presence_penalty: float = _param(0.0, "0 is off (default: 0)", Range(-2.0, 2.0))
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int = _param(0, "random seed (default: 0)", Range(-1 << 63, _MAX_INT64), is_plain=False)
    max_tokens: int = _param(
        200,
        "output tokens (default: 512, or what fits the context)",
        Range(1, 1 << 31),
        is_plain=False,
    )
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        for param in _RANGED:
            value = getattr(self, param.name)
            if not param.metadata[_RANGE].has(value):
                raise RequestError(f"{param.name} {value}; allowed: {param.metadata[_RANGE]}")
        if not 0 <= self.min_tokens <= self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens}; allowed: 0 to {self.max_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and not 0 <= count <= MAX_LOGPROBS:
                raise RequestError(f"{name} {count}; allowed: 0 to {MAX_LOGPROBS}")
        if len(self.logit_bias) > MAX_BIASED:
            raise RequestError(f"{len(self.logit_bias)} biases; allowed: up to {MAX_BIASED}")
        for token, bias in self.logit_bias:
            if not BIAS.has(bias):
                raise RequestError(f"logit_bias of token {token} {bias}; allowed: {BIAS}")
        if not self.top_p:
            object.__setattr__(self, "temperature", 0.0)
            object.__setattr__(self, "top_p", 1.0)

    @property
    def is_greedy(self) -> bool:
        """Whether the token with the largest logit is taken, regardless of the filters."""
        return self.temperature <= 0.0

    @property
    def is_penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return bool(
            self.repetition_penalty != 1.0 or self.frequency_penalty or self.presence_penalty
        )

    @property
    def changes_logits(self) -> bool:
        """Whether logits change before the temperature. The host samples these rows."""
        is_filtered = self.top_n_sigma > 0 and not self.is_greedy
        return self.is_penalised or bool(self.logit_bias) or self.min_tokens > 0 or is_filtered


BIAS = Range(-100.0, 100.0)
"""Range of ``logit_bias`` values."""

_RANGED = tuple(param for param in fields(SamplingParams) if param.metadata)


def range_of(name: str) -> Range:
    """Return a number parameter's range."""
    span: Range = next(param for param in _RANGED if param.name == name).metadata[_RANGE]
    return span


def help_of(name: str) -> str:
    """Return a number parameter's help."""
    return str(next(param for param in _RANGED if param.name == name).metadata[_HELP])


def plain_names() -> tuple[str, ...]:
    """Return the parameters that a request or a command line gives as a number."""
    return tuple(param.name for param in _RANGED if param.metadata[_PLAIN])


def sampling_of(
    values: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
    *,
    caller_names: Iterable[str] = (),
) -> SamplingParams:
    """Return sampling parameters by name. ``logit_bias`` may be a mapping.

    ``caller_names``: Parameters of the caller, for the message about an unknown name.

    Raises:
        RequestError: An unknown name, a bad type or a value out of range.
    """
    known = [param.name for param in fields(SamplingParams)]
    renamed = {_OLD_NAMES.get(name, name): value for name, value in values.items()}
    named = {**(defaults or {}), **renamed}
    for name in named:
        if name not in known:
            raise RequestError(
                f"unknown sampling parameter {name!r}; {allowed((*known, *caller_names), name)}"
            )
    if isinstance(named.get("logit_bias"), Mapping):
        named["logit_bias"] = tuple(named["logit_bias"].items())
    if "stop_token_ids" in named:
        named["stop_token_ids"] = tuple(named["stop_token_ids"])
    try:
        return SamplingParams(**named)
    except TypeError as error:
        raise RequestError(
            f"a sampling parameter of a wrong kind ({one_line(error)}); allowed: numbers"
        ) from None
