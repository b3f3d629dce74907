"""``tilewright sweep search`` from its options to its file; its cells are answered at once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.evaluate.sweep.planted import Planted, known_sensitivities, planted_kl, planted_model
from tilewright.cli.arguments.sweep import SweepOptions
from tilewright.cli.main import main
from tilewright.cli.sweep import search
from tilewright.compiler.precision import load_precision
from tilewright.evaluate.results.record import Result
from tilewright.evaluate.sweep.calibrated import CalibratedFolders
from tilewright.evaluate.sweep.journal import SweepJournal
from tilewright.evaluate.sweep.model import SweptModel, swept_model
from tilewright.evaluate.sweep.trial import Trial
from tilewright.models import load_model
from tilewright.utils.child_process import Child


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SweptModel:
    return planted_model(tmp_path_factory.mktemp("searched model") / "three")


@pytest.fixture(autouse=True)
def runners(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Planted]:
    """No process is started; those who would have are kept."""
    found: list[Planted] = []

    @contextmanager
    def runner_of(journal: SweepJournal, options: SweepOptions) -> Iterator[Planted]:
        argument = next(iter(journal.state.cells.values())).cell.model
        found.append(Planted(journal, swept_model(load_model(argument), argument)))
        with journal.hold():
            yield found[-1]

    def started(*args: object, **options: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(search.run, "runner_of", runner_of)
    monkeypatch.setattr(Child, "__init__", started)
    monkeypatch.chdir(tmp_path)
    return found


def command(model: SweptModel, *argv: str) -> int:
    """A search with two levels."""
    planted = ("--targets", "cpu-onnxruntime")  # whose bytes the planted times are of
    given = ("--models", model.argument, "--levels", "q80", "bfp4", *planted, *argv)
    return main(["sweep", "search", *given])


def test_a_search_writes_what_it_found(
    model: SweptModel, runners: list[Planted], capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(model, "--max-kl", "0.05") == 0
    out, err = capfd.readouterr()
    path = Path("results/sweeps/search.yaml")
    assert f"written: {path}" in out and "search: KL <= 0.05" in out
    assert "Beside all=q80:hifi2: " in out and "guided by predicted times" in out
    assert "the search measures the sensitivities first" in err
    resolved = model.resolve(load_precision(str(path)))
    assert 1e-4 < planted_kl(model, resolved.heading()) <= 0.05
    journal = SweepJournal.open(path.with_suffix(".jsonl"))
    assert journal.state.planned.base == model.resolve(load_precision("bf16")).id
    assert resolved.id in {each.cell.precision_id for each in journal.state.cells.values()}

    before = path.read_bytes(), journal.path.read_bytes()
    assert main(["sweep", "search", "--resume", "--other-code", "keep"]) == 0
    assert runners[-1].measured == [], "a resumed search has nothing left to measure"
    assert (path.read_bytes(), journal.path.read_bytes()) == before
    assert main(["sweep", "search", "--resume"]) == 2
    assert "measured by other code" in capfd.readouterr().err
    assert main(["sweep", "search", "--resume", "--max-kl", "0.06"]) == 2
    assert "differs in" in capfd.readouterr().err


def test_known_sensitivities_are_found_or_named(
    model: SweptModel,
    runners: list[Planted],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    known_sensitivities(tmp_path / "my sensitivities.jsonl", model, level="q80")
    argv = ["--min-top1", "95", "--from", "my sensitivities.jsonl", "-o", "found/it.yaml"]
    assert command(model, *argv) == 0
    assert (tmp_path / "found" / "it.yaml").exists()
    assert "measures the sensitivities" not in capfd.readouterr().err
    assert not any("." in cell.part.partition("=")[0] for cell in runners[-1].measured)
    assert main(["sweep", "search", "--resume", "--other-code", "keep"]) == 0
    assert runners[-1].measured == []


def test_a_bound_that_nothing_meets(
    model: SweptModel, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert command(model, "--max-kl", "1e-9") == search.EXIT_NOTHING_FOUND
    out, err = capfd.readouterr()
    assert "no configuration within KL <= 1e-09 " in err and "bf16" in out
    assert not list(tmp_path.rglob("*.yaml"))


def test_a_failed_cell_is_one_line(
    model: SweptModel,
    runners: list[Planted],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    plain = Planted.__init__

    def failing(self: Planted, *args: object) -> None:
        plain(self, *args)  # type: ignore[arg-type]
        self.fails = lambda cell: cell.precision.startswith("step-")

    monkeypatch.setattr(Planted, "__init__", failing)
    assert command(model, "--max-kl", "0.05") == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert "has no accuracy (failed: exit code 1: why)" in line and "restart" in line


def test_sensitivities_of_another_model_leave_no_file(
    model: SweptModel, tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    known_sensitivities(tmp_path / "other.jsonl", model)
    argv = ["sweep", "search", "--models", str(tiny_gguf), "--max-kl", "1", "--from", "other.jsonl"]
    assert main(argv) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "another model, target" in line
    assert not (tmp_path / "results").exists()


def test_what_cannot_be_written_in_the_end_is_said(
    model: SweptModel,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(search, "check_writable", lambda *args: None)
    (tmp_path / "file").write_text("")
    assert command(model, "--max-kl", "0.05", "-o", "file/x.yaml") == 2
    assert "file/x.yaml" in capfd.readouterr().err.splitlines()[-1]


def test_a_calibrated_search_writes_its_weights_beside_the_yaml(
    model: SweptModel, runners: list[Planted], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, plain = CalibratedFolders(Path("results/sweeps/search-calibrated")), Planted.result

    def calibrated(self: Planted, cell: Trial) -> Result:
        if cell.calibration:
            folder = weights.folder(cell)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "calibration.json").write_text(cell.precision_id)
        return plain(self, cell)

    monkeypatch.setattr(Planted, "result", calibrated)
    assert command(model, "--max-kl", "0.05", "--calibration", "gptq") == 0
    path = Path("results/sweeps/search.yaml")
    assert "# Calibrated: gptq." in path.read_text()
    found = model.resolve(load_precision(str(path))).id
    assert (path.with_suffix(".calibrated") / "calibration.json").read_text() == found
    cells = [each.cell for each in runners[-1].journal.state.cells.values()]
    assert {"", "gptq"} == {cell.calibration for cell in cells}
    assert all(bool(cell.calibration) == ("bfp4" in cell.heading) for cell in cells)
    Path("results/sweeps/search.calibrated/calibration.json").unlink()
    assert command(model, "--max-kl", "0.05", "--calibration", "gptq", "--resume") == 2
