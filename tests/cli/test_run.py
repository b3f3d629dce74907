"""``tilewright run``: the answer on standard output and nothing else, what it cost beside it."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import Refused
from tilewright import LLM
from tilewright.cli.main import main

SIX = ("--max-tokens", "6")


@pytest.fixture(scope="module")
def answer(tiny_gguf: Path) -> str:
    with LLM(tiny_gguf, max_context=64, use_cache=False) as llm:
        return llm.chat("hello", max_tokens=6).text


def run(capfd: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[str, str]:
    assert main(["run", *map(str, argv)]) == 0
    return capfd.readouterr()


def test_the_answer_is_all_of_standard_output(
    tiny_gguf: Path,
    answer: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    out, error = run(capfd, tiny_gguf, "--prompt", "hello", *SIX)
    assert out == f"{answer}\n"
    *fallback, line = error.splitlines()
    assert all(each.startswith("backend auto: onnxruntime, for ") for each in fallback)
    assert line.startswith("6 tokens in ") and "t/s" in line and "\x1b" not in line
    assert "cut short there (--max-tokens)" in line and re.search("tiny on cpu(-native)?, ", line)
    assert list(tmp_path.iterdir()) == [], "nothing is written unless it is asked for"
    out, error = run(capfd, tiny_gguf, "--prompt", "hello", *SIX, "-v")
    precision, backend, _ = error.splitlines()
    assert out == f"{answer}\n" and precision.startswith("precision auto: accuracy, ")
    assert backend.startswith(("backend auto: native, ", "backend auto: onnxruntime, for "))


def test_figures_and_json_are_asked_for(
    tiny_gguf: Path, answer: str, capfd: pytest.CaptureFixture[str]
) -> None:
    out, error = run(capfd, "--model", tiny_gguf, "--prompt", "hello", *SIX, "--figures")
    assert out == f"{answer}\n" and "first token after (s)" in error
    out, error = run(capfd, tiny_gguf, "--prompt", "hello", *SIX, "--json")
    facts = json.loads(out)
    assert (facts["text"], facts["finish_reason"], len(facts["tokens"])) == (answer, "length", 6)
    assert 0 < facts["timings"]["first_token_s"] <= facts["timings"]["total_s"]
    assert "t/s" not in error


def test_top_p_zero_is_greedy(
    tiny_gguf: Path, answer: str, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ("--prompt", "hello", *SIX, "--temperature", "9", "--top-p", "0", "--seed", "5")
    assert run(capfd, tiny_gguf, *argv)[0] == f"{answer}\n"


@pytest.mark.parametrize("argv", [(), ("--prompt", "-")])
def test_a_prompt_is_read_from_standard_input(
    argv: tuple[str, ...],
    tiny_gguf: Path,
    answer: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello")))
    assert run(capfd, tiny_gguf, *SIX, *argv)[0] == f"{answer}\n"


def test_a_model_without_a_template_continues_the_text(
    tiny_folder: Path, refused: Refused, capfd: pytest.CaptureFixture[str]
) -> None:
    out, _ = run(capfd, tiny_folder, "--prompt", "hello", *SIX, "--json")
    assert json.loads(out)["prompt_tokens"] == 5
    said = refused(str(tiny_folder), "--prompt", "hello", "--system", "be brief", verb="run")
    assert "has no chat template, and so no system message" in said


@pytest.mark.parametrize("target", ["null", "reference", "n150"])
def test_every_target_answers(
    target: str, tiny_gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _, error = run(capfd, tiny_gguf, "--prompt", "hello", *SIX, "--target", target)
    assert f"on {target}, " in error
    assert ("emulated" in error and "t/s" not in error) == (target == "n150")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--prompt", " "), "the prompt is empty; allowed: some text"),
        (("--prompt", "a\udcff"), "the prompt is not valid UTF-8; allowed: UTF-8 text"),
        (("--prompt", "a", "--max-tokens", "0"), "'0'; allowed: integers, 1 to "),
        (("--prompt", "a", "--target", "cp"), "; did you mean 'cpu'?"),
        (("--prompt", "a", "--precision", "acuracy"), "; did you mean 'accuracy'?"),
        (("--prompt", "a", "--max-tokens", "9999"), "do not fit the context"),
    ],
)
def test_bad_ones_are_refused_in_one_line(
    argv: tuple[str, ...], said: str, refused: Refused, tiny_gguf: Path
) -> None:
    assert said in refused(str(tiny_gguf), *argv, verb="run")


def test_a_sign_of_life_comes_before_anything_heavy(tiny_gguf: Path) -> None:
    """On a terminal, and gone in the end; what stays there is the answer and one line."""
    script = """
import sys
from tilewright.cli.main import main
import tilewright.cli.arguments.ask as asking
show = asking.ModelStatusLine.show
def first(self, text):
    heavy = {"torch", "onnxruntime", "tokenizers", "numpy", "rich"} & {*sys.modules}
    print("HEAVY" if heavy else "LIGHT", flush=True)
    asking.ModelStatusLine.show = show
    show(self, text)
asking.ModelStatusLine.show = first
sys.exit(main(sys.argv[1:]))
"""
    reading, writing = pty.openpty()
    argv = [sys.executable, "-c", script, "run", str(tiny_gguf), "--prompt", "hello", *SIX]
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=writing, timeout=120, check=True)
    os.close(writing)
    error = os.read(reading, 1 << 20).decode()
    os.close(reading)
    assert done.stdout.startswith(b"LIGHT\n")
    assert f"opening {tiny_gguf}"[:80] in error
    *_, line, end = error.split("\x1b[K")[-1].split("\n")
    assert line.strip().startswith("\x1b[2m6 tokens") and end == ""
