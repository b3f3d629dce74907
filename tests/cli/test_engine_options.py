"""What the options of an engine come to."""

from __future__ import annotations

import pytest

from tilewright.cli.arguments.batch import BatchOptions
from tilewright.cli.arguments.engine import EngineArguments
from tilewright.cli.arguments.serve import read_serve_options
from tilewright.errors import ConfigError
from tilewright.options.arguments import parse


@pytest.mark.parametrize(
    ("words", "few_on_cuda", "many_on_cuda", "many_on_cpu"),
    [
        ("", "strict", "auto", "strict"),
        ("--arithmetic auto", "strict", "auto", "strict"),
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
    many_in_a_batch = "fast" if many_on_cuda == "auto" else many_on_cuda
    assert BatchOptions.arithmetic_of(asked, "cuda", 17) == many_in_a_batch  # type: ignore[arg-type]


def test_max_num_seqs_auto_is_the_default_and_other_words_are_refused() -> None:
    model = ["--model", "shape:llama-3.2-1b", "--target", "cuda"]
    for words, expected in (
        ([], None),
        (["--max-num-seqs", "auto"], None),
        (["--max-seats", "3"], 3),
    ):
        assert read_serve_options([*model, *words]).max_seats == expected
    for word in ("0", "4097", "many"):
        with pytest.raises(ConfigError, match="allowed: auto, or integers, 1 to 4096"):
            read_serve_options([*model, "--max-num-seqs", word])
