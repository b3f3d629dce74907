"""Sampling options of the command line, made from the fields of `SamplingParams`."""

from __future__ import annotations

from dataclasses import make_dataclass

from tilewright.compiler.sampling.params import help_of, plain_names, range_of
from tilewright.options.arguments import integer, option, real

SAMPLING_NAMES = ("max_tokens", *plain_names(), "seed")
"""Sampling parameters of a command line and a chat."""


def _option(name: str) -> tuple[str, type, object]:
    """Return a field of an option. None: the user gives no value."""
    span, text = range_of(name), help_of(name)
    if isinstance(span.low, int):
        bounded = integer(int(span.low), int(span.high))
        return name, int, option(text, group="sampling", type=bounded, metavar="N")
    number = real(span.low, span.high, above=span.is_above)
    return name, float, option(text, group="sampling", type=number)


SamplingOptions: type = make_dataclass(
    "SamplingOptions", map(_option, SAMPLING_NAMES), frozen=True, kw_only=True
)
