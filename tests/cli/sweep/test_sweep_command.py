"""What a user may get wrong in ``tilewright sweep``: one line, exit code 2, nothing written."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.cli.conftest import Refused
from tests.cli.sweep import journals
from tests.sweep_cells import cell, planned
from tilewright import models
from tilewright.cli.arguments.sweep import read_options
from tilewright.cli.main import main
from tilewright.cli.sweep.run import plan_cells
from tilewright.compiler.artifacts.paths import MANIFEST
from tilewright.evaluate.sweep.journal import SweepJournal

GRID = ("--precisions", "all-q80")


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The usual places for files are below the folder that a command is started in."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["nosuch"], ["unknown plan 'nosuch'", "pareto", "search", "status"]),
        ([""], ["unknown plan ''", "allowed"]),
        (["x" * 5000], ["unknown plan", "allowed"]),
        (["--models", "MODEL"], ["without --precisions"]),
        (["pareto", "--models", "/no/such"], ["/no/such", "no such file", "allowed"]),
        (["--models", "", *GRID], ["path is empty", "allowed"]),
        (["--models", "MODEL", *GRID, "--base", "nosuch"], ["nosuch", "allowed"]),
        (["--models", "MODEL", "--precisions", "nosuch"], ["nosuch", "allowed"]),
        (["--models", "MODEL", "--precisions", "precision_cfg = {"], ["allowed"]),
        (["--models", "MODEL", *GRID, "--cases", "nosuch"], ["unknown case 'nosuch'", "allowed"]),
        (["--models", "MODEL", *GRID, "--targets", "tpu"], ["'tpu'", "allowed", "cpu"]),
        (["--models", "MODEL", *GRID, "--devices", "H200"], ["'H200'", "allowed: CPU"]),
        (["--models", "MODEL", *GRID, "--cases", "performance-long-context-16k"], ["allowed"]),
        (["--models", "MODEL", *GRID, "--accuracy-text", "nosuch"], ["nosuch", "allowed"]),
        (["--models", "MODEL", *GRID, "--levels", "bfp8"], ["--levels"]),
        (["sensitivity", "--models", "MODEL", "--levels", "int3"], ["unknown format", "bfp8"]),
        (["sensitivity", "--models", "MODEL", "--levels", "bfp8:best"], ["unknown fidelity"]),
        (["sensitivity", "--models", "MODEL", "--levels", "bfp8", "bfp4"], ["2 levels", "one"]),
        (["--models", "MODEL", *GRID, "--jobs", "0"], ["--jobs", "'0'", "allowed"]),
        (["--models", "MODEL", *GRID, "--rounds", "0"], ["--rounds", "'0'", "allowed"]),
        (["--models", "MODEL", *GRID, "--threads", "-1"], ["--threads", "allowed"]),
        (["--models", "MODEL", *GRID, "--timeout", "0"], ["--timeout", "above 0"]),
        (["--models", "MODEL", *GRID, "--timeout", "nan"], ["--timeout", "above 0"]),
        (["--models", "MODEL", *GRID, "--memory", "much"], ["--memory 'much'", "1.2GB"]),
        (["--models", "MODEL", *GRID, "--memory=-1GB"], ["--memory '-1GB'", "1.2GB"]),
        (["--models", "MODEL", *GRID, "--memory", "1TB"], ["--memory '1TB'", "1.2GB"]),
        (["--models", "MODEL", *GRID, "--compute", "slow"], ["--compute", "exact"]),
        (["--models", "MODEL", *GRID, "--nosuch"], ["--nosuch"]),
        (["--models", "MODEL", *GRID, "--results", "."], ["is a folder"]),
        (["--models", "MODEL", *GRID, "--results", "file/below.jsonl"], ["not writable"]),
        (["--models", "MODEL", *GRID, "--results", "file"], ["file:1", "no event of a sweep"]),
        (["--models", "MODEL", *GRID, "--resume"], ["grid.jsonl", "No such file"]),
        (["--resume", "--results", "file"], ["file:1", "no event of a sweep"]),
        (["search", "--models", "MODEL"], ["without a bound", "--min-top1", "--max-bytes"]),
        (["search", "--models", "MODEL", "--max-bytes", "big"], ["--max-bytes 'big'", "300MB"]),
        (["search", "--models", "MODEL", "--max-bytes", "0"], ["--max-bytes '0'", "300MB"]),
        (["search", "--models", "MODEL", "--max-bytes", "infGB"], ["--max-bytes", "300MB"]),
        (["search", "--models", "MODEL", "--min-top1", "101"], ["--min-top1", "0 to 100"]),
        (["search", "--models", "MODEL", "--max-kl", "-1"], ["--max-kl"]),
        (["search", "--models", "MODEL", "MODEL", "--max-kl", "1"], ["several models", "one"]),
        (["search", "--targets", "cpu", "null", "--max-kl", "1"], ["several", "one"]),
        (["search", "--models", "MODEL", "--max-kl", "1", "--from", "nosuch"], ["nosuch"]),
        (
            ["search", "--models", "MODEL", "--max-kl", "1", "--from", "file"],
            ["file:1", "no event of a sweep"],
        ),
        (["search", "--models", "MODEL", "--max-kl", "1", "--held-out", "nosuch"], ["nosuch"]),
        (["search", "--models", "MODEL", "--max-kl", "1", "-o", "."], ["--output", "folder"]),
        (["search", "--max-kl", "1", "--cases", "performance-ci-1"], ["--cases", "accuracy"]),
        (["search", "--max-kl", "1", "--cases", "performance-top-1"], ["--cases", "speed"]),
        (["search", "--max-kl", "1", "--results", "a.yaml"], ["--output", "sweep's file"]),
        (["search", "--models", "MODEL", "--max-kl", "1", "--devices", "H200"], ["allowed: CPU"]),
        (["search", "--models", "MODEL", "--max-kl", "1", "--levels", "fp7"], ["fp7", "allowed"]),
        (
            ["search", "--models", "MODEL", "--targets", "n150", "--max-kl", "1"],
            ["a search on n150", "allowed there: the plans pareto"],
        ),
        (["search", "--max-kl", "1", "--resume"], ["search.jsonl", "No such file"]),
        (["pareto", "--other-code", "keep"], ["--other-code with a new sweep"]),
        (["search", "--max-kl", "1", "--rounds", "10000"], ["50005 cells", "--yes"]),
        (["nosuch.yaml"], ["nosuch.yaml", "No such file"]),
        (["status"], ["FILE", "required"]),
        (["status", "nosuch.jsonl"], ["nosuch.jsonl", "No such file"]),
    ],
    ids=lambda value: " ".join(value)[:60] if isinstance(value, list) else str(value),
)
def test_a_mistake_is_one_line(
    tiny_gguf: Path, tmp_path: Path, refused: Refused, argv: list[str], words: list[str]
) -> None:
    (tmp_path / "file").write_text("{}\n")
    found = refused(*(str(tiny_gguf) if each == "MODEL" else each for each in argv), verb="sweep")
    for word in words:
        assert word in found
    assert (tmp_path / "file").read_text() == "{}\n"
    assert len(found) < 2500


def test_a_compiled_folder_is_no_model_to_sweep(tmp_path: Path, refused: Refused) -> None:
    folder = tmp_path / "compiled"
    folder.mkdir()
    (folder / MANIFEST).write_text("{}")
    found = refused("--models", str(folder), *GRID, verb="sweep")
    assert "compiled folder" in found and "checkpoints" in found


def test_another_s_results_file_stays_as_it_is(
    tiny_gguf: Path, tmp_path: Path, refused: Refused
) -> None:
    path = journals.twelve(tmp_path / "sweep.jsonl").path
    before = path.read_bytes()
    argv = ["--models", str(tiny_gguf), *GRID, "--results", str(path)]
    for more in ([], ["--resume"]):
        found = refused(*argv, *more, verb="sweep")
        assert "'pareto'" in found and "precisions" in found and "another --results" in found
    assert path.read_bytes() == before


def test_a_sweep_is_resumed_as_it_was_asked_for(tmp_path: Path, refused: Refused) -> None:
    path = tmp_path / "sweep.jsonl"
    header = planned("grid")
    header.options.update(models="smollm2", precisions="all-q80")
    SweepJournal.create(path, header, [cell("a")])
    before = path.read_bytes()
    argv = ["--results", str(path), "--resume", "--models", "smollm2", "--precisions"]
    found = refused(*argv, "all-bfp8", verb="sweep")
    assert "differs in precisions;" in found
    assert "rounds" in refused(*argv, "all-q80", "--rounds", "5", verb="sweep")
    assert "plan 'grid'" in refused("pareto", *argv[:3], verb="sweep")
    other = ["--results", str(path), "--precisions", "all-q80"]
    assert "differs in models;" in refused(*other, verb="sweep"), "without --resume too"
    assert path.read_bytes() == before


def test_a_million_cells_are_refused_before_anything_is_opened(
    tiny_gguf: Path, refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    def opened(path: object = None) -> object:
        raise AssertionError("a model was opened")

    monkeypatch.setattr(models, "load_model", opened)
    names = ["all-q80", "all-q40", "all-bfp8", "all-bfp4", "bf16"] * 20
    argv = ["--models", str(tiny_gguf), "--precisions", *names, "--rounds", "10000"]
    begun = time.process_time()
    for extra in ([], ["--dry-run"]):
        found = refused(*argv, "--cases", "performance-ci-1", *extra, verb="sweep")
        assert "a plan of 1000000 cells" in found and "--yes" in found
    assert time.process_time() - begun < 5


def test_a_large_plan_that_is_wanted_is_planned(
    tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["sweep", "--models", str(tiny_gguf), *GRID, "--rounds", "600", "--dry-run"]
    argv += ["--cases", "performance-ci-1"]
    assert main(argv) == 2
    assert "a plan of 1200 cells" in capfd.readouterr().err
    assert main([*argv, "--yes"]) == 0
    out, err = capfd.readouterr()
    assert "1200 cells" in out and "nothing was run" in out and "min (estimated)" in out
    assert "all-q80" in out and "bf16" in out and err == ""
    assert list(tmp_path.iterdir()) == []


def test_no_arguments_print_the_usage(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep"]) == 2
    usage = capfd.readouterr().out
    for argv in (["--help"], ["-h"]):
        assert main(["sweep", *argv]) == 0
        assert capfd.readouterr().out == usage
    for word in ("table", "pareto", "sensitivity", "search", "GRID.yaml", "status", "export"):
        assert word in usage


@pytest.mark.parametrize(
    "verb",
    [
        *("table", "pareto", "sensitivity", "search", "grid", "status", "show", "export", "plot"),
        *("cancel", "restart", "log"),
    ],
)
def test_every_verb_has_help(verb: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["sweep", verb, "--help"])
    assert ended.value.code == 0
    assert f"tilewright sweep {verb}" in capfd.readouterr().out


def test_a_dry_run_of_a_search_measures_nothing(
    tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = ["sweep", "search", "--models", str(tiny_gguf), "--min-top1", "95", "--dry-run"]
    assert main([*argv, "--levels", "q80"]) == 0
    out, err = capfd.readouterr()
    assert "all=q80:hifi2" in out and "cells that depend on them" in out
    assert "the search measures the sensitivities first" in err
    assert list(tmp_path.iterdir()) == []


def test_a_board_s_cells_are_predicted_once_and_have_time(tiny_gguf: Path, tmp_path: Path) -> None:
    argv = ["pareto", "--models", str(tiny_gguf), "--targets", "n150"]
    options = read_options([*argv, "--results", str(tmp_path / "sweep.jsonl")])
    assert options.timeout_s == 3600.0
    found = plan_cells(options)
    assert {cell.round for cell in found} == {0}
    assert len([cell for cell in found if cell.kind == "speed"]) == 13
    cpu = read_options([*argv[:-1], "cpu", "--results", str(tmp_path / "sweep.jsonl")])
    assert (cpu.timeout_s, len(plan_cells(cpu))) == (900.0, 13 + 3 * 13)
