"""What the options of an engine come to."""

from __future__ import annotations

import pytest

from tilewright.cli.arguments.engine import EngineArguments
from tilewright.options.arguments import parse


@pytest.mark.parametrize(
    ("words", "few_on_cuda", "many_on_cuda", "many_on_cpu"),
    [
        ("", "strict", "fast", "strict"),
        ("--arithmetic auto", "strict", "fast", "strict"),
        ("--arithmetic strict", "strict", "strict", "strict"),
        ("--arithmetic fast", "fast", "fast", "fast"),
    ],
)
def test_bits_are_promised_where_it_costs_nothing(
    words: str, few_on_cuda: str, many_on_cuda: str, many_on_cpu: str
) -> None:
    asked = parse(EngineArguments, words.split(), prog="serve", description="")
    assert asked.arithmetic_of("cuda", 16) == few_on_cuda
    assert asked.arithmetic_of("cuda", 17) == many_on_cuda
    assert asked.arithmetic_of("cpu", 64) == many_on_cpu
