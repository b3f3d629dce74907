"""Defaults of the engine's configuration, by target."""

from __future__ import annotations

import pytest

from tilewright.cli.arguments.batch import read_batch_options
from tilewright.cli.arguments.serve import read_serve_options
from tilewright.errors import ConfigError

MODEL = ["--model", "shape:llama-3.2-1b", "--target", "cuda"]


@pytest.fixture(autouse=True)
def _gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.options.resolve.check_gpu", lambda: None)


@pytest.mark.parametrize(
    ("words", "few_on_cuda", "many_on_cuda", "many_on_cpu"),
    [
        ("", "always", "auto", "always"),
        ("--batch-invariant auto", "always", "auto", "always"),
        ("--arithmetic strict", "always", "always", "always"),
        ("--batch-invariant never", "never", "never", "never"),
    ],
)
def test_bits_are_promised_where_it_costs_nothing(
    words: str, few_on_cuda: str, many_on_cuda: str, many_on_cpu: str
) -> None:
    config = read_serve_options([*MODEL, *words.split()]).model.config
    assert config.invariance("cuda", 16) == few_on_cuda
    assert config.invariance("cuda", 17) == many_on_cuda
    assert config.invariance("cpu", 64) == many_on_cpu
    many_in_a_batch = "never" if many_on_cuda == "auto" else many_on_cuda
    batch = read_batch_options(["rows.jsonl", *MODEL, *words.split(), "--max-num-seqs", "17"])
    assert batch.model.config.batch_invariant == many_in_a_batch


def test_max_num_seqs_auto_is_the_default_and_other_words_are_refused() -> None:
    for words, expected in (
        ([], None),
        (["--max-num-seqs", "auto"], None),
        (["--max-seats", "3"], 3),
    ):
        assert read_serve_options([*MODEL, *words]).model.config.max_num_seqs == expected
    for word in ("0", "4097", "many"):
        with pytest.raises(ConfigError, match="allowed: auto, or integers, 1 to 4096"):
            read_serve_options([*MODEL, "--max-num-seqs", word])
