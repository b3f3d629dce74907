"""Sweeps of the tiny model through the command, with a process per cell."""

from __future__ import annotations

import contextlib
import json
import statistics
import subprocess
import time
from pathlib import Path

import pytest

from tests.sweep_cells import cell, done, planned, speed_result
from tilewright.cli.arguments.sweep import read_options
from tilewright.cli.main import main
from tilewright.cli.sweep import run
from tilewright.evaluate.sweep.journal import Planned, SweepJournal, TrialCommand, TrialStarted
from tilewright.evaluate.sweep.runner import BENCH
from tilewright.utils.child_process import PYTHON
from tilewright.utils.environment import environment

CASES = ("--cases", "performance-device-perf")
OLDER = "commit 0123456789, torch 1.0"
GRID = (
    *("--precisions", "all-q80", "--base", "all-bfp8", "--rounds", "1"),
    *("--targets", "cpu-onnxruntime"),  # more bytes for bfp8 than for q80
)


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep file for all tests in this module, in order."""
    return tmp_path_factory.mktemp("sweep") / "sweep.jsonl"


@pytest.fixture(scope="module")
def swept(path: Path, tiny_gguf: Path) -> SweepJournal:
    """Run two configurations once, from a folder with packages that have our names."""
    for name in ("models", "compiler", "tilewright", "bench"):
        (path.parent / name).mkdir()
        (path.parent / name / "__init__.py").write_text("raise SystemExit('theirs')")
    argv = ["--models", str(tiny_gguf), *GRID, *CASES, "--results", path.name]
    with contextlib.chdir(path.parent):
        assert main(["sweep", *argv]) == 0
    return SweepJournal.open(path)


def lines(path: Path) -> int:
    return len(path.read_bytes().splitlines())


def test_a_sweep_runs_from_options_to_tables(
    swept: SweepJournal, capfd: pytest.CaptureFixture[str]
) -> None:
    base, other = swept.state.cells.values()
    assert (base.cell.precision, other.cell.precision) == ("all-bfp8", "all-q80")
    assert swept.state.planned.base == base.cell.precision_id
    for each in (base, other):
        assert each.status == "done" and each.result is not None
        assert each.result.decode_tsu is not None and each.result.decode_tsu > 0
        assert each.result.case == "performance-device-perf"
        assert each.result.model_hash == each.cell.model_hash
        assert each.result.precision_id == each.cell.precision_id
        assert swept.log_path(each.cell.id).exists()
    # The planned bytes equal the bytes in the target.
    assert base.result is not None and other.result is not None
    assert (base.result.resident_bytes or 0) > (other.result.resident_bytes or 0)
    assert main(["sweep", "status", str(swept.path)]) == 0
    out = capfd.readouterr().out
    assert "all-q80" in out and "all-bfp8" in out


def test_a_user_s_packages_of_our_names_are_not_in_the_way(swept: SweepJournal) -> None:
    assert (swept.path.parent / "models" / "__init__.py").exists()
    assert swept.state.count("done") == 2


def test_what_a_plan_says_weights_weigh_is_what_they_weigh(swept: SweepJournal) -> None:
    differences = {
        (state.result.resident_bytes or 0) - (state.cell.weight_bytes or 0)
        for state in swept.state.cells.values()
        if state.result is not None
    }
    assert len(differences) == 1, "beside the matrices there are only norms and tables"


def test_nothing_is_left_to_resume(
    swept: SweepJournal, capfd: pytest.CaptureFixture[str], tiny_gguf: Path
) -> None:
    before = swept.path.read_bytes()
    for argv in ([], ["--models", str(tiny_gguf), *GRID, *CASES]):
        assert main(["sweep", *argv, "--results", str(swept.path), "--resume"]) == 0
        (line,) = capfd.readouterr().err.splitlines()
        assert "2 of 2 cells done" in line and "sweep export" in line
    assert main(["sweep", *argv, "--results", str(swept.path)]) == 0, "without --resume too"
    begun, line = capfd.readouterr().err.splitlines()
    assert begun == f"resuming {swept.path}: 2 of 2 cells done" and "sweep export" in line
    assert swept.path.read_bytes() == before
    assert main(["sweep", "--results", str(swept.path), "--resume", "--dry-run"]) == 0
    assert "0 cells" in capfd.readouterr().out


def test_a_restarted_cell_is_run_again_and_no_other(
    swept: SweepJournal, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = swept.state.cells
    before = lines(swept.path)
    assert main(["sweep", "restart", str(swept.path), second]) == 0
    capfd.readouterr()
    argv = ["sweep", "--results", str(swept.path), "--resume"]
    assert main([*argv, "--dry-run"]) == 0
    out = capfd.readouterr().out
    assert "1 cells" in out and "all-q80" in out and "all-bfp8" not in out
    assert main(argv) == 0
    progress, end = capfd.readouterr().err.splitlines()
    assert (
        progress.startswith("[2/2] all-q80 performance-device-perf round 1: done in ")
        and "t/s/u" in progress
    )
    assert "2 of 2 cells done" in end
    added = [json.loads(line) for line in swept.path.read_bytes().splitlines()[before:]]
    assert [each["event"] for each in added] == ["asked", "started", "finished"]
    assert {each["cell"] for each in added} == {second} and second != first


def test_the_outcome_is_exported(swept: SweepJournal, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "export", str(swept.path), "--markdown", "-"]) == 0
    out = capfd.readouterr().out
    assert "all-q80" in out and "|" in out
    assert main(["sweep", "status", str(swept.path), "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["statuses"] == {"done": 2} and len(found["rows"]) == 2


@pytest.mark.slow
def test_accuracy_speed_and_a_front(
    tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sweep.jsonl"
    argv = ["--models", str(tiny_gguf), *GRID, *CASES, "performance-top-1", "--jobs", "2"]
    assert main(["sweep", *argv, "--results", str(path)]) == 0
    state = SweepJournal.open(path).state
    kinds = [each.cell.kind for each in state.cells.values()]
    assert kinds == ["accuracy", "accuracy", "speed", "speed"] and state.count("done") == 4
    capfd.readouterr()
    assert main(["sweep", "export", str(path), "--markdown", "-"]) == 0
    assert "512" in capfd.readouterr().out
    assert main(["sweep", "plot", str(path), "-o", str(tmp_path / "plots")]) == 0
    assert {each.suffix for each in (tmp_path / "plots").rglob("*.*")} >= {".svg", ".png"}


@pytest.mark.slow
def test_a_sweep_that_is_killed_goes_on(tiny_gguf: Path, tmp_path: Path) -> None:
    """Kill after the first cell. The second run does not repeat the finished cells."""
    path = tmp_path / "sweep.jsonl"
    argv = ["--models", str(tiny_gguf), *GRID, *CASES, "--results", str(path)]
    command = [*PYTHON, "-m", "tilewright.cli.main", "sweep"]
    child = subprocess.Popen([*command, *argv], stderr=subprocess.DEVNULL)
    while b'"finished"' not in (path.read_bytes() if path.exists() else b""):
        assert child.poll() is None
        time.sleep(0.05)
    child.kill()
    child.wait()
    first = next(line for line in path.read_bytes().splitlines() if b'"finished"' in line)
    subprocess.run([*command, *argv, "--resume"], check=True, capture_output=True)
    state = SweepJournal.open(path).state
    assert state.count("done") == 2
    finished = [json.loads(x) for x in path.read_bytes().splitlines() if b'"finished"' in x]
    ids = [each["cell"] for each in finished]
    assert sorted(ids) == sorted(state.cells) and ids[0] == json.loads(first)["cell"]


@pytest.mark.slow
@pytest.mark.quiet
def test_a_cell_takes_little_longer_than_the_demo_s_own_run_of_it(
    tiny_gguf: Path, tmp_path: Path
) -> None:
    """Compare medians of three runs in turn. The limit is a factor of 1.3."""
    demo = [*BENCH, "--no-results", "--json"]
    heading = run_of(tiny_gguf)
    demo += ["--model", str(tiny_gguf), "--precision", heading, "--case", CASES[1]]
    subprocess.run(demo, check=True, capture_output=True)  # both find it compiled
    cells, runs = [], []
    for number in range(3):
        path = tmp_path / f"{number}.jsonl"
        argv = ["--models", str(tiny_gguf), "--precisions", "all-q80", "--base", "all-q80"]
        assert main(["sweep", *argv, *CASES, "--rounds", "1", "--results", str(path)]) == 0
        (state,) = SweepJournal.open(path).state.cells.values()
        assert state.status == "done" and state.seconds is not None
        cells.append(state.seconds)
        begun = time.perf_counter()
        subprocess.run(demo, check=True, capture_output=True)
        runs.append(time.perf_counter() - begun)
    assert statistics.median(cells) <= 1.3 * statistics.median(runs), (cells, runs)


def run_of(model: Path) -> str:
    """Return a cell's heading."""
    argv = ["--models", str(model), "--precisions", "all-q80", "--base", "all-q80", *CASES]
    return run.plan_cells(read_options([*argv, "--rounds", "1"]))[0].heading


def header() -> Planned:
    found = planned("grid")
    found.options.update(precisions="all-q80")
    return found


def test_a_torn_last_line_is_said_once_and_the_sweep_goes_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    fine, stopped = cell("a"), cell("b")
    journal = SweepJournal.create(tmp_path / "sweep.jsonl", header(), [fine, stopped])
    journal.append(
        done(fine, speed_result(fine, [100.0])),
        TrialStarted(stopped.id, "2026-01-02T00:00:00+00:00"),
        TrialCommand(stopped.id, "cancel"),  # a resumed sweep needs no process
    )
    whole = journal.path.read_bytes()
    with journal.path.open("ab") as file:
        file.write(b'{"event":"finished","cell":"')
    resumed = ["sweep", "--results", str(journal.path), "--resume", "--other-code", "keep"]
    assert main(resumed) == 0
    torn, kept, progress, *rest = capfd.readouterr().err.splitlines()
    assert "sweep.jsonl:7" in torn and "cut short" in torn and torn.startswith("tilewright: ")
    assert "they are kept" in kept and "commit unknown" in kept
    assert "1 of 2 cells done, 1 cancelled" in (rest[-1] if rest else progress)
    assert len(rest) <= 1 and len(recwarn) == 0
    assert journal.path.read_bytes().startswith(whole + b'{"event":"finished"')
    assert SweepJournal.open(journal.path).state.count("cancelled") == 1


def test_a_sweep_that_runs_elsewhere_is_left_alone(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    journal = SweepJournal.create(tmp_path / "sweep.jsonl", header(), [cell("a")])
    before = journal.path.read_bytes()
    with journal.hold():
        assert main(["sweep", "--results", str(journal.path), "--resume"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "another process is running this sweep" in line
    assert journal.path.read_bytes() == before


HEADINGS = tuple(
    f"precision_cfg = {{ff2: {name}}}, fidelity_cfg = {{}}" for name in ("bfp8", "bfp4")
)


def test_headings_are_told_apart_though_they_have_one_name(tiny_gguf: Path) -> None:
    argv = ["--models", str(tiny_gguf), "--precisions", *HEADINGS, *CASES, "--rounds", "1"]
    options = read_options(argv)
    cells = run.plan_cells(options)
    assert len({each.precision_id for each in cells}) == 3
    assert run.planned(options, cells).base == cells[0].precision_id
    based = read_options([*argv, "--base", HEADINGS[0]])
    cells = run.plan_cells(based)
    assert len(cells) == 2
    assert run.planned(based, cells).base == cells[0].precision_id != cells[1].precision_id


def test_each_model_has_its_own_base(tiny_gguf: Path, tiny_folder: Path) -> None:
    argv = ["--models", str(tiny_gguf), str(tiny_folder), *GRID, *CASES]
    options = read_options(argv)
    cells = run.plan_cells(options)
    header = run.planned(options, cells)
    bases = [each for each in cells if header.is_base(each)]
    assert [each.precision for each in bases] == ["all-bfp8"] * 2
    assert len({each.model_hash for each in bases}) == 2 and len(cells) == 4


@pytest.mark.parametrize(("plan", "num"), [("pareto", 13), ("table", 3)])
def test_a_plan_s_configurations(tiny_gguf: Path, plan: str, num: int) -> None:
    options = read_options([plan, "--models", str(tiny_gguf), "--rounds", "2"])
    cells = run.plan_cells(options)
    assert len({each.precision_id for each in cells}) == num
    accuracy = [each for each in cells if each.kind == "accuracy"]
    assert cells[: len(accuracy)] == accuracy and len(accuracy) == num
    assert {each.round for each in cells if each.kind == "speed"} == {0, 1}


def test_figures_of_other_code_are_not_taken_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Results of other code are refused by name, accepted or measured again, as requested."""
    ours, theirs = cell("ours"), cell("theirs")
    now = environment()
    journal = SweepJournal.create(tmp_path / "sweep.jsonl", header(), [ours, theirs])
    same = {"commit": now.commit, "versions": now.versions}
    older = {"commit": "0123456789abcdef", "versions": {**now.versions, "torch": "1.0"}}
    journal.append(
        done(ours, speed_result(ours, [100.0], **same)),
        done(theirs, speed_result(theirs, [100.0], **older)),
    )
    resumed = ["sweep", "--results", str(journal.path), "--resume"]
    before = journal.path.read_bytes()
    assert main(resumed) == 2
    (said,) = capfd.readouterr().err.splitlines()
    assert f"1 of the cells that are done were measured by other code ({OLDER}): " in said
    assert theirs.id in said and ours.id not in said
    assert "allowed: --other-code keep, or --other-code rerun" in said
    assert main([*resumed, "--other-code", "keep"]) == 0
    assert theirs.id in capfd.readouterr().err and journal.path.read_bytes() == before
    monkeypatch.setattr(run, "run_journal", lambda journal, options: 0)
    assert main([*resumed, "--other-code", "rerun"]) == 0
    assert [each.cell.id for each in SweepJournal.open(journal.path).state.open_cells()] == [
        theirs.id
    ]


def test_a_grid_has_a_dimension_of_calibrations(
    tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text(" ".join(f"word {n * n} of {n}" for n in range(150)))
    (tmp_path / "grid.yaml").write_text(
        f"models: {tiny_gguf}\ntargets: cpu\nprecisions: all-bfp4\nbase: all-bfp4\n"
        "calibration: [none, gptq]\ncalibration_text: text.txt\n"
        "cases: performance-device-perf\nrounds: '1'\n"
    )
    assert main(["sweep", "grid.yaml", "--results", "grid.jsonl"]) == 0
    plain, calibrated = SweepJournal.open(Path("grid.jsonl")).state.cells.values()
    assert plain.cell.calibration == "", "the base"
    assert calibrated.cell.name.startswith("all-bfp4 gptq ")
    assert plain.cell.precision_id == calibrated.cell.precision_id
    assert plain.result is not None and calibrated.result is not None
    assert plain.result.model_hash == calibrated.result.model_hash
    assert (plain.result.calibration, calibrated.result.calibration[:5]) == ("", "gptq,")
    assert plain.result.resident_bytes == calibrated.result.resident_bytes
    (folder,) = Path("grid-calibrated").glob("*/calibration.json")
    assert main(["sweep", "export", "grid.jsonl", "--markdown", "-"]) == 0
    assert "| all-bfp4 gptq " in capfd.readouterr().out
    text = ("--calibration-text", "text.txt")
    assert main(["sweep", "grid", "--precisions", "bf16", "--calibration", "awq", *text]) == 2
    assert "calibration 'awq'; allowed: none, rtn, imatrix, gptq" in capfd.readouterr().err
    assert folder.exists()
