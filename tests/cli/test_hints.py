"""Every command that the program proposes does what it is proposed for, on a tiny model."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli.conftest import Refused
from tests.sweep_cells import cell, done, planned, speed_result
from tilewright.cli.main import main
from tilewright.evaluate.sweep.journal import SweepJournal

CODE = Path(__file__).resolve().parents[2] / "tilewright"
ODD = "it's a folder"
"""Hints are for a shell, whatever the folder is called."""

Run = Callable[..., str]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs a command that must succeed, in an empty folder; what it says on both streams."""
    monkeypatch.chdir(tmp_path)

    def succeed(*argv: str | Path) -> str:
        assert main([str(argument) for argument in argv]) == 0
        return "\n".join(capfd.readouterr())

    return succeed


def proposed(said: str, after: str) -> list[str]:
    """The words of the command that follows ``after`` in what was said."""
    (line,) = (line for line in said.splitlines() if after in line)
    return shlex.split(line.partition(after)[2])


def run_proposed(run: Run, words: list[str], *more: str) -> str:
    assert words[0] == "tilewright"
    return run(*words[1:], *more)


SHORT = ("--prompt", "hello", "--max-tokens", "2")


@pytest.mark.parametrize("target", ["cpu", "reference"])
def test_a_compiled_folder_is_run(target: str, run: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    said = run("compile", tiny_gguf, "-o", tmp_path / ODD, "--target", target)
    assert "2 tokens in " in run_proposed(run, proposed(said, "run it: "), *SHORT)


@pytest.mark.parametrize(
    ("weights", "precision"), [("q40", "stored"), ("f32", "accuracy"), (None, "stored")]
)
def test_a_converted_model_is_run_as_it_was_written(
    weights: str | None, precision: str, run: Run, tiny_gguf: Path, tmp_path: Path
) -> None:
    """Not by the usual configuration, which would quantise the q40 weights again."""
    choice = [] if weights is None else ["--weights", weights]
    said = run("convert", tiny_gguf, "-o", tmp_path / ODD, *choice)
    words = proposed(said, "run it here: ")
    assert words[-2:] == ["--precision", precision]
    assert "2 tokens in " in run_proposed(run, words, *SHORT)


def test_an_onnx_folder_answers(run: Run, tiny_gguf: Path, tmp_path: Path) -> None:
    said = run("compile", tiny_gguf, "-o", tmp_path / ODD, "--emit", "onnx")
    python, *words = proposed(said, "run it without Tilewright: ")
    assert python == "python" and words[-1] == "Why is the sky blue?"
    done = subprocess.run([sys.executable, "-I", *words], capture_output=True, check=True)
    assert done.stdout.strip()


def test_a_file_for_a_board_is_run_where_the_board_is(
    run: Run, board_folder: Path, tmp_path: Path
) -> None:
    """Here it comes as far as the library that it needs."""
    options = ("--target", "n150", "--context", "64")
    said = run("compile", board_folder, "-o", tmp_path / ODD, "--emit", "ttnn", *options)
    python, *words = proposed(said, "run it where ttnn and the board are: ")
    assert python == "python"
    done = subprocess.run([sys.executable, "-I", *words], capture_output=True, text=True)
    assert done.returncode != 0 and "No module named 'ttnn'" in done.stderr
    known = Path(words[0]).read_text()
    assert all(word in known for word in words if word.startswith("--"))


def test_what_a_sweep_proposes(run: Run, tmp_path: Path, refused: Refused) -> None:
    path, of, header = tmp_path / ODD / "s.jsonl", cell(), planned()
    path.parent.mkdir()
    header.options.update(precisions="all-q80")
    sweep = SweepJournal.create(path, header, [of])
    sweep.append(done(of, speed_result(of, [100.0])))
    said = run("sweep", "--results", path, "--resume", "--other-code", "keep")
    words = proposed(said.replace("\n ", " "), "tables: ")
    assert "# Sweep: grid" in run_proposed(run, words)
    said = refused("show", str(path), verb="sweep")
    assert "cells done" in run_proposed(run, shlex.split(said.partition("or ")[2]))
    said = refused("log", str(path), "nosuch", verb="sweep")
    words = shlex.split(said.partition("(see ")[2].rstrip(")").replace("FILE", "'%s'"))
    assert "Cell " in run_proposed(run, [str(path) if word == "%s" else word for word in words])


@pytest.mark.parametrize("verb", ["run", "chat", "bench", "compile", "convert", "sweep grid"])
def test_an_unknown_option_points_to_help_that_is_there(
    verb: str, refused: Refused, capfd: pytest.CaptureFixture[str]
) -> None:
    first, *rest = verb.split()
    said = refused(*rest, "--nosuch", verb=first)
    words = shlex.split(said.partition("(see ")[2].rstrip(")"))
    assert words == ["tilewright", first, *rest, "--help"]
    with pytest.raises(SystemExit, match="0"):
        main(words[1:])
    assert capfd.readouterr().out.startswith("usage: ")


def test_no_hint_is_missing_here(run: Run) -> None:
    """Each place that prints a command is one that the tests above (or of `sweep`) execute."""
    found = set[str]()
    for path in sorted(CODE.rglob("*.py")):
        for line in path.read_text(encoding="utf-8").splitlines():
            if re.search(
                r"[\"'( ](tilewright (run|compile|convert|sweep) [-{A-Z]|tilewright sweep"
                r" \w+ [-{A-Z]|python \{)",
                line,
            ):
                found.add(path.relative_to(CODE).as_posix())
    assert "performance-batch-1" in run("bench", "--list"), "what options of sweeps point to"
    assert found == {
        "cli/commands/calibrate.py",
        "cli/commands/compile.py",
        "cli/commands/convert.py",
        "cli/commands/generate_engine.py",
        "cli/commands/nodes.py",
        "cli/commands/pull.py",
        "cli/commands/run.py",
        "cli/main.py",
        "cli/sweep/main.py",
        "cli/arguments/sweep.py",
        "cli/sweep/run.py",
        "cli/sweep/show.py",
        "cli/sweep/show_app.py",
        "cli/sweep/tables.py",
        "evaluate/search/search_runner.py",
    }
