"""Every named case of the demo, run through the same command with a few tokens and one repeat.

On a tiny model, the expensive ones marked `slow`; whole and on the default model, all `slow`, those
of one configuration: the other has the same users and lengths. What a model or device cannot run
must be refused with that very reason.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import CONTEXT, tiny_gguf
from tilewright.cli.arguments.bench import read_options
from tilewright.cli.main import main
from tilewright.errors import ConfigError
from tilewright.evaluate.cases.cases import CASES, Case, check_case
from tilewright.evaluate.results.result_file import loads, read
from tilewright.models import load_model

__all__ = ["tiny_gguf"]

NUM_TOKENS = 4
QUICK_BATCH = 4
_MANY = 32
"""Users from which on a batch is cut to `QUICK_BATCH` by default."""
_LONG = 1024
_LIKE_ANOTHER = ("performance-stress", "performance-top-1")
"""Cut short, they are `performance-ci-32` and `performance-token-matching`."""


def is_slow(case: Case) -> bool:
    """One configuration is quick enough; so are short prompts."""
    return (
        case.precision != "performance"
        or (case.prompt_length or 0) >= _LONG
        or case.name in _LIKE_ANOTHER
    )


def cases(*, whole: bool) -> list[object]:
    return [
        pytest.param(name, marks=[pytest.mark.slow] if whole or is_slow(case) else [])
        for name, case in CASES.items()
        if not whole or case.precision == "performance"
    ]


@pytest.fixture(scope="module")
def max_context(smollm2_path: Path) -> int:
    return load_model(smollm2_path).config.max_positions


def run(case: Case, path: Path, results: Path, *options: str) -> list[str]:
    """The command line of a case, cut short."""
    short = ["--max-generated-tokens", str(NUM_TOKENS), "--repeat-batches", "1"]
    argv = ["--model", str(path), "--results", str(results), "--no-token-accuracy", *short]
    return ["bench", "--case", case.name, *argv, *options]


def check(case: Case, argv: list[str], results: Path, *, max_context: int) -> None:
    """Run it, or see that it is refused for what it needs."""
    options = read_options(argv[1:])
    assert options is not None
    try:
        check_case(options.case, max_context=max_context, max_data_parallel=1)
    except ConfigError as error:
        assert main(argv) == 2
        assert not results.exists()
        pytest.skip(str(error))
    assert main(argv) == 0
    (result,) = read(results)
    assert result.case == f"{case.name}*"
    assert result.batch == options.case.batch_size
    assert result.precision_name == case.precision
    assert result.num_generated == NUM_TOKENS
    assert len(result.repeats) == 1
    if case.prompt_length is not None:
        assert result.prompt_length == case.prompt_length
    assert result.ttft_ms is not None and result.prefill_tps is not None
    assert result.decode_tsu is not None and result.decode_tsu > 0
    assert (result.ttft_median_ms is not None) == (result.batch > 1)


@pytest.mark.parametrize("name", cases(whole=False))
def test_a_case_runs(
    name: str, tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    case, results = CASES[name], tmp_path / "results.jsonl"
    smaller = ["--batch-size", str(QUICK_BATCH)] if case.batch_size >= _MANY else []
    argv = run(case, tiny_gguf, results, "--json", *smaller)
    check(case, argv, results, max_context=CONTEXT)
    assert loads(capfd.readouterr().out) == read(results)[0]


@pytest.mark.weights
@pytest.mark.parametrize("name", cases(whole=True))
def test_a_case_runs_with_all_its_users(
    name: str, smollm2_path: Path, max_context: int, tmp_path: Path
) -> None:
    case, results = CASES[name], tmp_path / "results.jsonl"
    check(case, run(case, smollm2_path, results), results, max_context=max_context)


@pytest.mark.parametrize(
    "path",
    ["tiny_gguf", pytest.param("smollm2_path", marks=[pytest.mark.weights, pytest.mark.slow])],
)
def test_answers_are_streamed_and_rotation_is_checked(
    path: str, request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]
) -> None:
    model = str(request.getfixturevalue(path))
    argv = ["--case", "performance-eval-repeat", "--model", model, "--no-results"]
    short = ["--batch-size", "4", "--max-generated-tokens", "8", "--repeat-batches", "2"]
    assert main(["bench", *argv, *short]) == 0
    out = capfd.readouterr().out
    assert "every prompt gave the same text at every repeat" in out
    answers = [line for line in out.splitlines() if line.startswith("[")]
    assert len(answers) == 4 and all(len(answer) > 10 for answer in answers)
