"""A cached program starts without torch and without its model; a damaged index is made again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tilewright import LLM
from tilewright.cli.main import main
from tilewright.compiler.targets.cpu.native.library import build

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")

RUN = """
import json, sys
from tilewright.cli.main import main
code = main(["run", *sys.argv[1:]])
print(json.dumps(sorted({"torch", "onnxruntime", "triton"} & set(sys.modules))))
sys.exit(code)
"""
ASK = """
import json, sys
from tilewright import LLM
with LLM(sys.argv[1], max_context=64, backend="native") as llm:
    text = llm.chat("hello", max_tokens=6).text
print(json.dumps([text, "torch" in sys.modules]))
"""
HELLO = ("--backend", "native", "--prompt", "hello", "--max-tokens", "6")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(folder))
    return folder


def run_here(capfd: pytest.CaptureFixture[str], *argv: str | Path) -> tuple[str, str]:
    assert main(["run", *map(str, argv), *HELLO]) == 0
    return capfd.readouterr()


def run_new(*argv: str | Path) -> tuple[str, list[str], str]:
    """The answer, the heavy libraries that a process has imported, and standard error."""
    command = [sys.executable, "-c", RUN, *map(str, argv), *HELLO]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *text, heavy = done.stdout.splitlines()
    return "\n".join(text), json.loads(heavy), done.stderr


@pytest.mark.parametrize("kind", ["gguf", "folder"])
def test_run_of_a_cached_program_imports_no_torch(
    kind: str, tiny_gguf: Path, tiny_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tiny_gguf if kind == "gguf" else tiny_folder
    cold, _ = run_here(capfd, path)
    warm, heavy, said = run_new(path)
    assert (f"{warm}\n", heavy) == (cold, [])
    assert "made again" not in said


def test_llm_of_a_cached_program_imports_no_torch(tiny_gguf: Path) -> None:
    with LLM(tiny_gguf, max_context=64, backend="native") as llm:
        text = llm.chat("hello", max_tokens=6).text
    done = subprocess.run(
        [sys.executable, "-c", ASK, str(tiny_gguf)], capture_output=True, text=True, check=False
    )
    assert json.loads(done.stdout) == [text, False], done.stderr


@pytest.mark.parametrize("suffix", [".json", ".tokenizer"])
@pytest.mark.parametrize("damage", ["other bytes", "cut short", "gone"])
def test_run_with_a_damaged_start_index_makes_it_again(
    suffix: str,
    damage: str,
    own_cache: Path,
    tiny_gguf: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    cold, _ = run_here(capfd, tiny_gguf)
    (path,) = (own_cache / "starts").glob(f"*{suffix}")
    sound = path.read_bytes()
    programs = sorted((own_cache / "programs").glob("*/weights.bin"))
    if damage == "gone":
        path.unlink()
    else:
        path.write_bytes(b"x" * len(sound) if damage == "other bytes" else sound[:-7])
    again, said = run_here(capfd, tiny_gguf)
    assert again == cold
    lines = [line for line in said.splitlines() if "made again" in line]
    is_silent = damage == "gone" and suffix == ".json"
    assert len(lines) == (0 if is_silent else 1) and all(str(path) in each for each in lines)
    assert json.loads(path.read_bytes()) == json.loads(sound) if suffix == ".json" else True
    assert sorted((own_cache / "programs").glob("*/weights.bin")) == programs, "nothing is built"
    assert "made again" not in run_here(capfd, tiny_gguf)[1]


@pytest.mark.parametrize(
    "command",
    [
        ("convert", "--to", "cache"),
        (
            *("bench", "--precision", "stored", "--prompt", "hi", "--no-results"),
            *("--max-generated-tokens", "2", "--repeat-batches", "1", "--no-token-accuracy"),
        ),
        ("run", "--nodes", "1", "--prompt", "hi", "--steps", "4"),
    ],
    ids=lambda words: words[0] + words[1],
)
def test_every_command_says_that_the_start_index_is_damaged(
    command: tuple[str, ...], own_cache: Path, tiny_gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_here(capfd, tiny_gguf)
    (path,) = (own_cache / "starts").glob("*.json")
    path.write_bytes(b"x")
    assert main([command[0], "--model", str(tiny_gguf), *command[1:]]) == 0
    assert [str(path) in line for line in capfd.readouterr().err.splitlines()].count(True) == 1


def test_run_of_another_configuration_or_file_takes_no_program_of_the_first(
    own_cache: Path, tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_here(capfd, tiny_gguf)
    exact = run_here(capfd, tiny_gguf, "--compute", "exact")
    assert run_new(tiny_gguf, "--compute", "exact")[:2] == (exact[0].rstrip("\n"), [])
    assert len([*(own_cache / "programs").glob("*/weights.bin")]) == 2
    changed = tmp_path / tiny_gguf.name
    data = bytearray(tiny_gguf.read_bytes())
    data[-64:] = bytes(64)
    changed.write_bytes(data)
    run_here(capfd, changed)
    assert len([*(own_cache / "programs").glob("*/weights.bin")]) == 3
    assert len([*(own_cache / "starts").glob("*.json")]) == 2


def test_run_without_the_cache_keeps_nothing(
    own_cache: Path, tiny_gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_here(capfd, tiny_gguf, "--no-cache")
    assert not [*own_cache.glob("starts/*"), *own_cache.glob("programs/*")]
