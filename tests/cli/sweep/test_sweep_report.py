"""``tilewright sweep export``, ``plot``: files written whole, PERF.md's own text kept, refusals."""

from __future__ import annotations

import csv
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.__main__ import main as bench
from tests.cli.sweep.conftest import Sweep
from tests.cli.sweep.measured import SWEEP, measured
from tests.sweep_cells import (
    done,
    journal,
)
from tilewright.cli.main import main
from tilewright.cli.sweep import report
from tilewright.evaluate.report import perf_md
from tilewright.evaluate.results.result_file import append, read
from tilewright.evaluate.sweep.journal import Added

ROOT = Path(__file__).parents[3]


@pytest.fixture
def refused(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Callable[..., str]:
    """One line on standard error, exit code 2, nothing written."""

    def contents() -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def run(*argv: object) -> str:
        before = contents()
        assert main(["sweep", *map(str, argv)]) == 2
        captured = capfd.readouterr()
        assert captured.out == ""
        (line,) = captured.err.splitlines()
        assert contents() == before
        return line

    return run


def test_without_an_output_the_document_is_printed(
    sweep: Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", "export", str(sweep(plan="pareto"))]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("# Sweep: pareto\n")
    assert "| a " in captured.out and captured.err == ""


def test_documents_and_tables_are_written_and_said(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = sweep("one", plan="pareto"), sweep("two", measured("z", 5.0, 0))
    text, lines = tmp_path / "new" / "all.md", tmp_path / "all.csv"
    lines.write_text("what was there before, and longer than a line")
    lines.chmod(0o640)
    options = ["--markdown", str(text), "--csv", str(lines)]
    assert main(["sweep", "export", str(first), str(second), str(first), *options]) == 0
    assert text.read_text().count("# Sweep: ") == 2
    found = list(csv.DictReader(io.StringIO(lines.read_text())))
    assert [line["configuration"] for line in found] == ["a", "b", "z"]
    assert lines.stat().st_mode & 0o777 == 0o640
    said = capsys.readouterr()
    assert said.out == ""
    assert [line.split(": ")[0] for line in said.err.splitlines()] == [str(text), str(lines)]
    assert not list(tmp_path.glob(".all*")), "nothing temporary is left"


def test_links_fit_the_folder_of_the_document(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("precision_cfgs").mkdir()
    links = "[x](precision_cfgs/x.yaml) [y](docs/y.md)"
    monkeypatch.setattr(report, "markdown", lambda state, extra: f"{links}\n")
    path = str(sweep())
    for place, x, y in (
        ("top.md", "precision_cfgs/x.yaml", "docs/y.md"),
        ("docs/in.md", "../precision_cfgs/x.yaml", "y.md"),
        ("docs/in/deep.md", "../../precision_cfgs/x.yaml", "../y.md"),
    ):
        assert main(["sweep", "export", path, "--markdown", place]) == 0
        assert Path(place).read_text() == f"[x]({x}) [y]({y})\n"


def test_perf_md_gets_the_rows_and_keeps_its_text(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output, results = tmp_path / "PERF.md", tmp_path / "cpu.jsonl"
    output.write_text("# Mine\n\nBy hand.\n")
    argv = ["export", str(sweep()), "--perf-md", str(output), "--results", str(results)]
    assert main(["sweep", *argv]) == 0
    text = output.read_text()
    assert text.startswith("# Mine\n\nBy hand.\n")
    sections = [s for s in perf_md.load(output).sections if s.kind == "precision"]
    assert [[row.speed for row in section.rows] for section in sections] == [[51.5], [91.5]]
    assert [len(each.repeats) for each in read(results)] == [0, 6, 0, 6]
    said = capsys.readouterr().err
    assert "4 new results" in said and "4 of 4 results have a table" in said
    kept = results.read_bytes()
    assert main(["sweep", *argv]) == 0
    assert (results.read_bytes(), output.read_text()) == (kept, text)
    assert "0 new results" in capsys.readouterr().err
    # and it is what `python -m bench perf` renders
    assert bench(["perf", "--results", str(results), "--output", str(output)]) == 0
    assert output.read_text() == text


@pytest.mark.parametrize("recorded", ["boards.jsonl", "h200.jsonl"])
def test_what_other_machines_recorded_stays_in_perf_md(
    sweep: Sweep, tmp_path: Path, recorded: str
) -> None:
    """An export of boards used to leave the CPU and H200 tables out until the next render."""
    (elsewhere,) = (result for _, result in measured("c", 777.0, 1)[1:2])
    append(tmp_path / "cpu.jsonl", elsewhere)
    options = ["--perf-md", str(tmp_path / "PERF.md"), "--results", str(tmp_path / recorded)]
    assert main(["sweep", "export", str(sweep()), *options]) == 0
    text = (tmp_path / "PERF.md").read_text()
    assert "| 777" in text and "51.5" in text and "91.5" in text


def test_one_sweep_given_as_two_files_adds_its_records_once(sweep: Sweep, tmp_path: Path) -> None:
    paths = [str(sweep(name)) for name in ("one", "two")]
    results = tmp_path / "cpu.jsonl"
    options = ["--perf-md", str(tmp_path / "PERF.md"), "--results", str(results)]
    assert main(["sweep", "export", *paths, *options]) == 0
    assert len(read(results)) == 4


def test_a_sensitivity_is_refused_for_perf_md(
    sweep: Sweep, tmp_path: Path, refused: Callable[..., str]
) -> None:
    path = sweep(plan="sensitivity")
    said = refused("export", path, "--perf-md", tmp_path / "PERF.md")
    assert str(path) in said and "probes" in said and "allowed" in said


def test_a_broken_perf_md_costs_no_results(
    sweep: Sweep, tmp_path: Path, refused: Callable[..., str]
) -> None:
    output, results = tmp_path / "PERF.md", tmp_path / "cpu.jsonl"
    for text in ("<!-- tilewright:begin results -->\n", "| no | rule |\n"):
        output.write_text(text)
        said = refused("export", sweep(text[0:1] + "x"), "--perf-md", output, "--results", results)
        assert str(output) in said


def test_outputs_that_meet_or_cannot_be_are_refused(
    sweep: Sweep, tmp_path: Path, refused: Callable[..., str]
) -> None:
    path, other = sweep(), tmp_path / "x.md"
    (tmp_path / "link").symlink_to(path)
    (tmp_path / "file").touch()
    assert "is the sweep" in refused("export", path, "--markdown", path)
    assert "is the sweep" in refused("export", path, "--csv", tmp_path / "link")
    assert "is the sweep" in refused("export", path, "--perf-md", other, "--results", path)
    assert "that of --markdown" in refused("export", path, "--markdown", other, "--csv", other)
    assert "that of --markdown" in refused("export", path, "--markdown", "-", "--csv", "-")
    assert "--results without" in refused("export", path, "--results", other)
    assert "a file's path" in refused("export", path, "--perf-md", "-")
    assert "is a folder" in refused("export", path, "--markdown", tmp_path)
    said = refused("export", path, "--csv", tmp_path / "file" / "x.csv")
    assert "file" in said
    empty = tmp_path / "empty.md"
    assert "finished" in refused(
        *("export", sweep("none", []), "--perf-md", empty, "--results", tmp_path / "r.jsonl")
    )


def test_a_write_that_fails_leaves_what_was_there(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str]
) -> None:
    path, output = sweep(), tmp_path / "x.md"
    output.write_text("before")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(report.os, "fsync", full)
    assert "No space left" in refused("export", path, "--markdown", output)


@pytest.mark.parametrize("verb", ["export", "plot"])
def test_what_is_no_sweep_is_refused(
    verb: str, tmp_path: Path, refused: Callable[..., str]
) -> None:
    path = tmp_path / "no.jsonl"
    assert str(path) in refused(verb, path)
    path.write_text("{}\n")
    assert str(path) in refused(verb, path)
    assert "FILE" in refused(verb)


def test_a_torn_last_line_is_said(sweep: Sweep, capsys: pytest.CaptureFixture[str]) -> None:
    path = sweep()
    with open(path, "a") as file:
        file.write('{"event": "star')
    assert main(["sweep", "export", str(path)]) == 0
    captured = capsys.readouterr()
    assert "cut short" in captured.err and "| b " in captured.out


def test_without_a_point_there_is_no_figure(
    sweep: Sweep, tmp_path: Path, refused: Callable[..., str]
) -> None:
    path = sweep(results=SWEEP[:1])
    said = refused("plot", path, "-o", tmp_path / "docs")
    assert f"{path}: no configuration has both speed and accuracy yet; allowed: " in said
    for name in ("a/b", "", ".hidden", "x" * 200):
        assert "--name" in refused("plot", path, "--name", name)


def test_a_sensitivity_from_its_file_to_its_tables_and_maps(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = [*SWEEP[:4]]
    for number, part in enumerate(("ff2", "0.ff2", "1.ff2")):
        name = f"{part}=bfp8:hifi2"
        results += measured(name, 60.0, 3 + number, part=part)[: 1 if "." in part else 4]
    path = sweep("sensitivity", results, plan="sensitivity")
    assert main(["sweep", "export", str(path)]) == 0
    text = capsys.readouterr().out
    assert "## Sensitivity: Tiny on CPU, bfp8:hifi2" in text
    assert "| 0.ff2 " in text and "| 0.ff2=bfp8:hifi2 " not in text
    assert "| ff2=bfp8:hifi2 " in text
    early = sweep("early", [], plan="sensitivity")
    assert main(["sweep", "export", str(early)]) == 0
    captured = capsys.readouterr()
    assert "no accuracy yet" in captured.err and "# Sweep: sensitivity" in captured.out
    pytest.importorskip("matplotlib")
    for unfinished in (early, sweep("groups", results[:4], plan="sensitivity")):
        assert main(["sweep", "plot", str(unfinished), "-o", str(tmp_path / "docs")]) == 2
        assert str(unfinished) in capsys.readouterr().err


def test_export_starts_without_torch(sweep: Sweep) -> None:
    code = "import sys; from tilewright.cli.main import main; main(sys.argv[1:])"
    code += "; print('torch' in sys.modules)"
    argv = [sys.executable, "-c", code, "sweep", "export", str(sweep())]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.splitlines()[-1] == "False"


def test_a_sweep_that_grows_is_exported_as_it_stands(
    sweep: Sweep, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "grows.jsonl"
    made = journal(path, SWEEP[:4])
    assert main(["sweep", "export", str(path)]) == 0
    assert "Cells: 4 of 4 done" in capsys.readouterr().out
    of, found = SWEEP[4]
    made.append(Added(of))
    made.append(done(of, found))
    assert main(["sweep", "export", str(path)]) == 0
    assert "Cells: 5 of 5 done" in capsys.readouterr().out
