"""``--model shape:NAME``: every command runs it or refuses it, and every output is marked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.__main__ import main as bench
from tests.cli.conftest import Refused
from tilewright.cli.main import main
from tilewright.cli.measure.measure import device_of
from tilewright.compiler.artifacts.manifest import read_manifest
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.results.result_file import loads, read
from tilewright.utils.files import CACHE_VARIABLE

SHAPE = ("--model", "shape:tiny")
FEW = ("--max-generated-tokens", "5", "--repeat-batches", "1")
MARK = "Tiny (random weights)"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_run_is_marked_in_its_table_line_and_json(
    results: Path, own_cache: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", *SHAPE, "--case", "performance-ci-1", "--results", str(results)]
    assert main([*argv, "--repeat-batches", "1"]) == 0
    out, _ = capfd.readouterr()
    assert f"{MARK} on cpu" in out and "text means nothing" in out
    assert main([*argv, *FEW, "--json"]) == 0
    out, _ = capfd.readouterr()
    printed = loads(out)
    first, second = read(results)
    assert printed == second
    for result in (first, second):
        assert isinstance(result, Result)
        assert (result.model, result.weights) == ("Tiny", "random")
        assert result.device in ("CPU", "CPU native")
        assert result.accuracy is None and result.prompt_length == 128
    assert first.model_hash == second.model_hash
    assert not (own_cache / "programs").exists(), "no file stands for them: nothing is kept"


@pytest.mark.parametrize("target", ["reference", "null", "cpu"])
def test_every_target_streams_a_text(
    results: Path, target: str, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", *SHAPE, "--target", target, "--prompt", "hé", "--results", str(results), *FEW]
    assert main(argv) == 0
    out, _ = capfd.readouterr()
    assert out.startswith("Tiny: random weights; ") and f"{MARK} on {target}" in out
    (result,) = read(results)
    assert result.target.removesuffix("-native") == target
    assert (result.prompt_length, result.num_generated) == (3, 5)


def test_a_text_is_the_same_again(results: Path, capfd: pytest.CaptureFixture[str]) -> None:
    texts = []
    for _ in range(2):
        argv = ["bench", *SHAPE, "--prompt", "a", "--no-results", "--batch-size", "2", *FEW]
        assert main(argv) == 0
        texts.append(capfd.readouterr().out.partition("performance-batch-1")[0])
    assert texts[0] == texts[1] and "[1] " in texts[0]


def test_perf_marks_the_row(
    results: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["bench", *SHAPE, "--case", "performance-ci-1", "--repeat-batches", "1"]
    assert main([*argv, "--results", str(results)]) == 0
    document = tmp_path / "PERF.md"
    markers = "<!-- tilewright:begin results -->\n<!-- tilewright:end results -->\n"
    document.write_text(f"# Performance\n\n{markers}")
    assert bench(["perf", "--results", str(results), "--output", str(document)]) == 0
    rows = [line for line in document.read_text().splitlines() if line.startswith(f"| {MARK}")]
    assert rows and all("CPU" in row for row in rows)


def test_a_compiled_shape_stays_marked(
    results: Path, tmp_path: Path, refused: Refused, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "compiled"
    assert main(["compile", "shape:tiny", "-o", str(folder)]) == 0
    assert "random weights" in capfd.readouterr().out
    manifest = read_manifest(folder)
    assert (manifest.model.name, manifest.model.weights) == ("Tiny", "random")
    argv = ["bench", "--model", str(folder), "--prompt", "hello", *FEW, "--results", str(results)]
    assert main(argv) == 0
    assert MARK in capfd.readouterr().out
    (result,) = read(results)
    assert result.weights == "random"
    results.unlink()
    assert "random weights have none" in refused("--model", str(folder), "--token-accuracy")


def test_a_manifest_from_before_is_of_a_checkpoint(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["compile", "shape:tiny", "-o", str(tmp_path / "compiled")]) == 0
    path = tmp_path / "compiled" / "manifest.json"
    held = json.loads(path.read_text())
    del held["model"]["weights"]
    path.write_text(json.dumps(held))
    assert read_manifest(path.parent).model.weights == "checkpoint"


@pytest.mark.parametrize(
    "argv",
    [
        [*SHAPE, "--token-accuracy"],
        [*SHAPE, "--case", "accuracy-top-1", "--explain"],
        [*SHAPE, "--case", "performance-token-matching"],
        [*SHAPE, "--token-accuracy", "--accuracy-text", "held-out"],
    ],
)
def test_accuracy_is_refused(argv: list[str], refused: Refused) -> None:
    message = refused(*argv)
    assert "shape:tiny" in message and "random weights have none; allowed: " in message


def test_a_reference_needs_real_weights(refused: Refused) -> None:
    message = refused(*SHAPE, verb="reference")
    assert (
        message.startswith("shape:tiny: has random weights") and "allowed: a checkpoint" in message
    )


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("shape:", "unknown shape ''; allowed: shape:tiny"),
        ("shape:unknown", "unknown shape 'unknown'; allowed: shape:tiny"),
        ("shape:tiny@main", "unknown shape 'tiny@main'"),
        ("shape:tiny:model.gguf", "unknown shape 'tiny:model.gguf'"),
        ("shape:owner/tiny", "unknown shape 'owner/tiny'"),
        ("./shape:tiny", "no such file or folder"),
        ("shape", "no such file or folder"),
    ],
)
def test_names_that_are_no_shapes(name: str, words: str, refused: Refused) -> None:
    assert words in refused("--model", name)
    assert "shape:tiny" in refused("--model", "shape:unknown")


def test_a_prompt_longer_than_the_shape_s_context(refused: Refused) -> None:
    message = refused(*SHAPE, "--case", "performance-long-context-16k")
    assert "allowed by this model: 8192" in message


def test_a_sweep_of_speed_is_marked_and_one_of_accuracy_refused(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    for plan in ("table", "sensitivity", "pareto"):
        message = refused(plan, "--models", "shape:tiny", verb="sweep")
        assert "random weights have no accuracy; allowed: " in message
    message = refused("search", "--models", "shape:tiny", "--max-kl", "1", verb="sweep")
    assert "random weights have no accuracy; allowed: " in message
    argv = ["sweep", "--models", "shape:tiny", "--precisions", "all-q80", "--dry-run"]
    assert main([*argv, "--cases", "performance-ci-1"]) == 0
    assert f"{MARK} on cpu" in capfd.readouterr().out


@dataclasses.dataclass
class _Device:
    device_name: str
    device_detail: str | None = None


@pytest.mark.parametrize(
    ("target", "own", "named"),
    [
        ("cuda", "NVIDIA H200", "H200"),
        ("cuda", "NVIDIA GH200 480GB", "NVIDIA GH200 480GB"),
        ("cuda", "NVIDIA RTX (Ada)", "NVIDIA RTX Ada"),
        ("cuda", "()", "unknown"),
        ("cpu", "CPU", "CPU"),
        ("reference", "CPU", "CPU"),
    ],
)
def test_a_device_is_called_as_the_table_calls_it(target: str, own: str, named: str) -> None:
    executable = _Device(own, "H200, 132 multiprocessors")
    compiled: Any = SimpleNamespace(executable=executable, target=target)
    assert device_of(compiled, None) == (named, "H200, 132 multiprocessors")
    executable.device_detail = None
    assert "3 threads" in device_of(compiled, 3)[1]
