"""What the documents name exists: paths, modules, commits and the options of command lines."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from bench.__main__ import main as bench
from tilewright.cli.main import main

ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
FOLDERS = ("bench", "compiler", "demo", "docs", "models", "precision_cfgs", "results", "tests")
FOLDERS += ("tilewright",)
SCRIPTS = {
    "simple_text_demo": "bench",
    "sweep": "sweep",
    "convert": "convert",
}
_PATH = re.compile(rf"(?:{'|'.join(FOLDERS)})/[\w./-]*(?![\w<*])")
_MODULE = re.compile(r"\btilewright(?:\.[A-Za-z_]\w*)+")
_COMMAND = re.compile(
    r"(?:^|`)\s*((?:python demo/|python -m bench |tilewright )[^#`\n]+)", re.MULTILINE
)
_COMMIT = re.compile(r"\b(?=[0-9a-f]*[a-f])(?=[0-9a-f]*[0-9])[0-9a-f]{7}\b")


def texts(pattern: re.Pattern[str], *documents: Path) -> list[str]:
    found = [pattern.findall(path.read_text(encoding="utf-8")) for path in documents or DOCUMENTS]
    return sorted({each for some in found for each in some})


def commands() -> list[str]:
    return [each.strip() for each in texts(_COMMAND)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_paths_exist(document: Path) -> None:
    found = texts(_PATH, document)
    quoted = [each.rstrip(".") for each in found if f"`{each}" in document.read_text("utf-8")]
    missing = [each for each in quoted if not (ROOT / each).exists()]
    # what a sweep or a comparison writes is not in a fresh clone
    assert [each for each in missing if not each.startswith("results/")] == []


@pytest.mark.parametrize("name", texts(_MODULE))
def test_modules_exist(name: str) -> None:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            found = getattr(found, part)
        return
    pytest.fail(f"{name} is no module")


@pytest.mark.parametrize("command", commands())
def test_commands_have_the_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, own = shlex.split(command), ""
    if words[0] == "python" and Path(words[1]).stem == "serve_ray":  # its own, and the server's
        words, own = ["tilewright", "serve", *words[2:]], (ROOT / words[1]).read_text("utf-8")
    command_main = bench if words[:3] == ["python", "-m", "bench"] else main
    words = words[2:] if command_main is bench else words
    if words[0] == "python":
        words = ["tilewright", SCRIPTS[Path(words[1]).stem], *words[2:]]
    verb = words[1:2]
    if verb == ["sweep"]:
        verb += [words[2] if not words[2].endswith(".yaml") else "grid"] if words[2:] else []
    # an option of another parser than the usual one of a verb, whose help it asks for
    other = {"--url": ["--url", "X"], "--config": ["--config", "X"], "--worker": ["--nodes"]}
    other |= {option: ["--nodes"] for option in ("--nthreads", "--workers", "--steps", "--task")}
    verb += next((other[word] for word in words if word in other), [])
    with suppress(SystemExit):  # argparse ends so; an unknown verb or plan prints no help
        command_main([*verb, "--help"])
    said = capsys.readouterr().out
    options = [word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)]
    assert said.startswith(("usage: tilewright", "usage: python -m bench"))
    assert [each for each in options if each not in said + own] == []


def test_make_has_the_targets() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(texts(re.compile(r"(?:^|`)make ([a-z][\w-]*)", re.MULTILINE))) <= targets


def test_commits_to_imitate_are_of_this_history() -> None:
    if _git("rev-parse", "--is-shallow-repository") != (0, "false"):
        pytest.skip("no whole history beside these sources")
    for commit in texts(_COMMIT, ROOT / "CONTRIBUTING.md"):
        assert _git("merge-base", "--is-ancestor", commit, "HEAD")[0] == 0, commit


def _git(*words: str) -> tuple[int, str]:
    done = subprocess.run(
        ["git", *words], cwd=ROOT, check=False, capture_output=True, encoding="utf-8"
    )
    return done.returncode, done.stdout.strip()
