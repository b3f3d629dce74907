"""Examples in README and docs run on tiny models."""

from __future__ import annotations

import io
import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.serve.fronts import running_front
from tilewright.cli.arguments.sweep import read_options
from tilewright.cli.main import main
from tilewright.compiler.precision import load_precision
from tilewright.utils.plain_yaml import parse_yaml

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = (
    "README.md",
    *(
        f"docs/{name}.md"
        for name in ("run", "python", "precision", "precision_yaml", "sweep", "measure")
    ),
)
MODELS = ("path/to/model", "smollm2")
"""The placeholders of a checkpoint, which a tiny file replaces."""
SMOLLM2_LAYERS = 30
SHORT = "stream=True, max_tokens=4"


def blocks(kind: str, *documents: str) -> list[pytest.ParameterSet]:
    """Return the fenced blocks for a language, with document name and index."""
    found = []
    for name in documents or DOCUMENTS:
        text = (ROOT / name).read_text(encoding="utf-8")
        pieces = re.findall(rf"^```{kind}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        found += [pytest.param(each, id=f"{name}-{i}") for i, each in enumerate(pieces)]
    return found


def commands_on_a_checkpoint(block: str) -> list[list[str]]:
    """Return the block's commands with a checkpoint, a folder made from it, or the default model.

    The checkpoint replaces the default model. Commands for boards, GPUs and measurements are
    excluded.
    """
    lines = [shlex.split(line, comments=True) for line in block.splitlines()]
    return [
        words
        for words in lines
        if words[:1] == ["tilewright"]
        and (
            {*MODELS, "compiled"} & set(words)
            or words[1] == "run"
            or (words[1] == "bench" and "--explain" in words)
        )
        and not {"cuda", "n150", "serve", "--image"} & set(words)
    ]


def without_model(words: list[str]) -> list[str]:
    """Return the command without ``--model``."""
    at = words.index("--model") if "--model" in words else len(words)
    return words[:at] + words[at + 2 :]


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("block", blocks("python"))
def test_python(block: str, tiny_gguf: Path) -> None:
    for model in MODELS:
        block = block.replace(f'"{model}"', repr(str(tiny_gguf)))
    exec(compile(block, "<example>", "exec"), {})


@pytest.mark.parametrize("block", blocks("python", "docs/http_api.md"))
def test_python_of_a_client(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Run against the fake engine, with a short output limit."""
    with running_front() as running:
        for old, new in (("http://127.0.0.1:8000", running.url), ("stream=True", SHORT)):
            assert old in block
            block = block.replace(old, new)
        exec(compile(block, "<example>", "exec"), {})
    assert capsys.readouterr().out


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_of_readme_gets_an_answer() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^curl .*", text, re.MULTILINE)
    with running_front() as running:
        command = command.replace("http://127.0.0.1:8000", running.url).replace("Hello", "hello")
        words = shlex.split(command)  # the fake engine hangs at H
        done = subprocess.run([*words, "--silent"], capture_output=True, check=True)
    assert json.loads(done.stdout)["choices"][0]["message"]["content"]


@pytest.mark.parametrize("block", blocks("yaml"))
def test_yaml(block: str) -> None:
    name = block.splitlines()[0].removeprefix("# ")
    Path(name).write_text(block)
    if "cases" in parse_yaml(block, name):  # a grid with my.yaml
        Path("my.yaml").write_text("inherits: performance\nprecision: {ff2: bf16}\n")
        assert read_options([name])
    else:
        load_precision(name).resolve(SMOLLM2_LAYERS, "SmolLM2-135M-Instruct")


@pytest.mark.parametrize(
    "block", [each for each in blocks("bash") if commands_on_a_checkpoint(str(each.values[0]))]
)
def test_commands(block: str, tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    for words in commands_on_a_checkpoint(block):
        argv = [str(tiny_gguf) if word in MODELS else word for word in words[1:]]
        if not {*MODELS, "compiled"} & set(words):
            argv = [*without_model(argv), "--model", str(tiny_gguf)]
        if argv[0] in ("run", "chat"):
            argv += ["--max-tokens", "4"]
        if argv[0] == "bench":
            Path("my.yaml").write_text("inherits: performance\nprecision: {ff2: bf16}\n")
            argv += ["--prompt", "hello", "--max-generated-tokens", "4", "--no-results"]
        assert main(argv) == 0, words
