"""``tilewright models`` and ``pull``: the list, the removal, and refusals in one line."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from tests.cli.conftest import Refused, Run
from tilewright.cli.main import main
from tilewright.compiler.artifacts.start import StartIndex
from tilewright.utils.child_process import PYTHON
from tilewright.utils.files import CACHE_VARIABLE

HOLD = """
import sys
from tilewright import LLM
llm = LLM(sys.argv[1], backend="onnxruntime", max_num_seqs=1)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of programs, and one of the hub beside it, offline."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


@pytest.fixture
def program(cache: Path, run: Run, tiny_gguf: Path) -> Path:
    """The one program in the cache."""
    run("convert", tiny_gguf, "--to", "cache", "--backend", "onnxruntime")
    (found,) = [each for each in (cache / "cache" / "programs").iterdir() if each.is_dir()]
    return found


@pytest.fixture
def download(cache: Path, tiny_gguf: Path) -> Path:
    """A repository as the library keeps it."""
    home = cache / "hub" / "models--some--tiny"
    for folder in ("blobs", "refs", "snapshots/0123"):
        (home / folder).mkdir(parents=True)
    (home / "refs" / "main").write_text("0123")
    shutil.copy(tiny_gguf, home / "blobs" / "1")
    (home / "snapshots" / "0123" / "tiny.gguf").symlink_to("../../blobs/1")
    return home


@pytest.fixture
def holder(program: Path, tiny_gguf: Path) -> Iterator[int]:
    """A process that has loaded the program."""
    command = [*PYTHON, "-c", HOLD, str(tiny_gguf)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"held\n"
        yield child.pid
        child.kill()


def test_models_lists_sizes_and_removes_by_name_or_id(
    program: Path, download: Path, run: Run, refused: Refused
) -> None:
    said = " ".join(run("models").split())
    assert program.name[:8] in said and "some/tiny" in said and "MB; programs: " in said
    assert "not in the cache; allowed: " in refused("remove", "nosuch", verb="models")
    assert "no NAME" in refused("remove", verb="models")
    assert run("models", "remove", "some/tiny", program.name[:8]).count("removed ") == 2
    assert not program.exists() and not download.exists()
    assert run("models").startswith("nothing is cached in ")


def test_models_on_a_narrow_terminal_keeps_cells_whole(
    program: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    (line,) = [line for line in run("models").splitlines() if line.startswith(program.name[:8])]
    assert "  program  cpu     accuracy   " in line


def test_start_record_is_counted_and_goes_with_its_last_program(
    cache: Path, tiny_gguf: Path, run: Run, refused: Refused
) -> None:
    for precision in ("all-q80", "all-q40"):
        choice = ("--to", "cache", "--backend", "onnxruntime", "--precision", precision)
        run("convert", tiny_gguf, *choice)
    home = cache / "cache"
    first, second = sorted(each for each in (home / "programs").iterdir() if each.is_dir())
    files = [*first.rglob("*"), *second.rglob("*"), *(home / "starts").iterdir()]
    total = sum(path.stat().st_size for path in files if path.is_file()) / 1e6
    assert f" {total:,.1f} MB; programs: " in " ".join(run("models").split())
    index = StartIndex(home)
    (key,) = index.files()
    run("models", "remove", first.name)
    record = index.record(key)
    assert record is not None
    assert [each.key for each in record.programs.values()] == [second.name]
    run("models", "remove", second.name)
    assert index.files() == {} and run("models").startswith("nothing is cached in ")


def test_damaged_start_record_is_listed_and_removed(cache: Path, run: Run) -> None:
    index = StartIndex(cache / "cache")
    folder = index.root / "starts"
    folder.mkdir(parents=True)
    (folder / "0123456789.json").write_text("{")
    assert "damaged" in run("models")
    assert "removed 01234567 (damaged)" in run("models", "remove", "0123456789")
    assert index.files() == {}


def test_remove_of_a_program_in_use_is_refused_and_removes_nothing(
    program: Path, download: Path, holder: int, refused: Refused
) -> None:
    files = [os.readlink(each) for each in Path(f"/proc/{holder}/fd").iterdir()]
    assert str(program / "graph.json") in files  # its weights may be copies in memory
    said = refused("remove", "some/tiny", program.name[:8], verb="models")
    assert f"is used by process {holder}; allowed: after its end" in said
    assert program.exists() and download.exists()


def test_pull_says_what_it_has(
    download: Path, run: Run, monkeypatch: pytest.MonkeyPatch, tiny_gguf: Path
) -> None:
    said = run("pull", "some/tiny:tiny.gguf")
    size = tiny_gguf.stat().st_size / 1e6
    assert (
        said == f"some/tiny:tiny.gguf: {size:,.1f} MB; run it: tilewright run {said.split()[-1]}\n"
    )


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (KeyboardInterrupt(), 130, "interrupted; the same command continues"),
        (errors.LocalEntryNotFoundError("x"), 2, "no network"),
        (
            OSError(errno.ENOSPC, "No space left on device"),
            2,
            "the disk is full; allowed: the same command",
        ),
    ],
    ids=["interrupted", "no network", "full disk"],
)
def test_pull_that_fails_is_one_line(
    cache: Path,
    error: BaseException,
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fail(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    assert main(["pull", "some/tiny"]) == code
    captured = capsys.readouterr()
    begun, said = captured.err.splitlines()
    assert begun == "pulling some/tiny" and words in said and captured.out == ""
    assert main(["pull", "./some"]) == 2
    assert "not a name of the hub; allowed: OWNER/NAME" in capsys.readouterr().err
