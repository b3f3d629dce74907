"""``bench compare-targets``: runs on a tiny model, joined with lines made before; refusals."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.targets.command import FIGURES, PAIRED
from tilewright.evaluate.report.table import Table
from tilewright.evaluate.results.record import Paired
from tilewright.evaluate.results.stats import Ratio
from tilewright.evaluate.results.target_runs import Compared, compare_runs, latest, read_runs


def script(argv: list[str]) -> int:
    return main(["compare-targets", *argv])


@pytest.fixture(scope="module")
def made(tiny_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two windows of the tiny model on the CPU, as another machine would have made them."""
    path = tmp_path_factory.mktemp("made") / "cpu.jsonl"
    assert script([*of(tiny_gguf), "--runs", "cpu", "cpu:exact", "--out", str(path)]) == 0
    return path


def of(model: Path, *, windows: int = 2) -> list[str]:
    common = ["--model", str(model), "--precision", "all-bfp4", "--threads", "1"]
    return [*common, "--windows", str(windows)]


def said_of(capfd: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """The one line of a refused command."""
    assert script(argv) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("tilewright: ")
    return line


def test_lines_are_complete(made: Path) -> None:
    first, second = (each.record for each in read_runs(made))
    assert (first.run, second.run) == ("cpu", "cpu:exact")
    for run in (first, second):
        assert (run.num_windows, run.num_positions, run.batch) == (2, 1024, 1)
        assert run.precision == "all-bfp4" and run.heading.startswith("precision_cfg = {")
        assert run.versions["torch"] and run.host and run.device_detail.endswith(", 1 threads")
        assert 0 < run.num_top1 < run.num_top5 < 1024 and run.kl_mean > 1e-4
    assert first.expected == second.expected and first.kl != second.kl
    assert first.effective_id != second.effective_id


def test_other_runs_are_joined_with_ours(
    made: Path, tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "ours.jsonl"
    argv = [*of(tiny_gguf), "--runs", "reference", "--batch", "2", "--out", str(path)]
    assert script([*argv, "--merge", str(made)]) == 0
    shown = capfd.readouterr()
    (ours,) = read_runs(path)
    assert (ours.record.run, ours.record.batch) == ("reference", 2)
    rows = compare_runs(latest([*read_runs(made), ours]))
    for row in rows:
        for cell in (*FIGURES.values(), *PAIRED.values()):
            assert cell(row) in shown.out
    assert "tiny: 2 windows, 1024 positions" in shown.out.lower()
    assert "all-bfp4 on reference: " in shown.err
    ratio = rows[2].kl_ratio
    assert ratio is not None and ratio.ratio == pytest.approx(1.0, abs=0.01), "bfp4 everywhere"
    assert script(["--merge", str(made), str(path)]) == 0
    assert capfd.readouterr().out == shown.out, "the lines say all that the runs did"


def test_side_by_side_or_not_a_run_is_the_same(made: Path, tiny_gguf: Path, tmp_path: Path) -> None:
    path = tmp_path / "again.jsonl"
    argv = [*of(tiny_gguf), "--runs", "cpu:exact", "--batch", "8", "--out", str(path)]
    assert script(argv) == 0
    (again,), known = read_runs(path), read_runs(made)[1]
    assert again.record.batch == 2, "no more than there are windows"
    assert again.record.guesses == known.record.guesses
    # products of another number of rows are added up in another order
    assert again.record.kl == pytest.approx(known.record.kl, rel=1e-4)


def test_other_windows_are_refused_before_anything_is_run(
    made: Path, tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    argv = [*of(tiny_gguf, windows=1), "--runs", "cpu", "--out", str(out), "--merge", str(made)]
    said = said_of(capfd, argv)
    assert f"{made}:1: is of another text, " in said and "in 2 windows" in said
    assert not out.exists()


def test_another_model_is_refused(
    made: Path, tiny_gguf: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    values = json.loads(made.read_text().splitlines()[0]) | {"model_hash": "f" * 64}
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps(values) + "\n")
    for argv in (
        ["--merge", str(made), str(other)],
        [*of(tiny_gguf), "--runs", "cpu", "--merge", str(other)],
    ):
        said = said_of(capfd, argv)
        assert f"{other}:1: is of another model, 'ffffffffffff'" in said


def test_a_damaged_line_is_refused(
    made: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "damaged.jsonl"
    path.write_text(made.read_text().replace('"num_windows":2', '"num_windows":"two"', 1))
    assert f"{path}:1: not a run: " in said_of(capfd, ["--merge", str(path)])


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "nothing to compare"),
        (["--runs", "tpu"], "'tpu'; allowed: cpu, cpu:exact, cuda, cuda:exact, reference"),
        (["--runs", "cpu:fast"], "'cpu:fast'"),
        (["--runs", "cpu:"], "'cpu:'"),
        (["--runs", "null"], "'null'"),
        (["--runs"], "--runs"),
        (["--runs", "cpu", "--precision", "nosuch"], "nosuch"),
        (["--runs", "cpu", "--windows", "0"], "--windows"),
        (["--runs", "cpu", "--batch", "0"], "--batch"),
        (["--runs", "cpu", "--out", "/"], "folder"),
        (["--runs", "cpu", "--model", "no/such/model.gguf"], "no/such/model.gguf"),
        (["--runs", "cpu", "--model", "shape:llama-3.2-1b"], "shape:llama-3.2-1b"),
        (["--merge", "no/such/file.jsonl"], "no/such/file.jsonl"),
        (["--merge", "/dev/null"], "/dev/null"),
        (["--unknown"], "--unknown"),
    ],
)
def test_bad_arguments_are_one_line(
    capfd: pytest.CaptureFixture[str], argv: list[str], said: str
) -> None:
    assert said in said_of(capfd, argv)


def test_more_windows_than_there_is_text_are_refused(
    tiny_gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    argv = [*of(tiny_gguf, windows=1000), "--runs", "cpu"]
    assert "1000 windows; allowed: 1 to " in said_of(capfd, argv)


def test_an_empty_file_and_lines_nobody_is_to_write(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    assert f"{empty}: holds no run" in said_of(capfd, ["--merge", str(empty)])
    out = str(tmp_path / "out.jsonl")
    assert "without --runs" in said_of(capfd, ["--merge", str(empty), "--out", out])


def test_an_interruption_ends_it_quietly(
    tiny_gguf: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object) -> object:
        raise KeyboardInterrupt

    monkeypatch.setattr("bench.targets.command.find_model", interrupted)
    assert script([*of(tiny_gguf), "--runs", "cpu"]) == 130
    captured = capfd.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_cells_by_hand(made: Path) -> None:
    row = Compared(
        run=read_runs(made)[0].record,
        num_top1=512,
        num_unlike=0,
        paired=None,
        paired_exact=Paired("cpu:exact", b=31, c=68, p=0.00025),
        kl_ratio=Ratio(1.0234, (0.9876, 1.0592), 1024, False),
    )
    (figures,), (paired,) = (Table.by(columns, [row]).rows for columns in (FIGURES, PAIRED))
    assert figures[:3] == ("all-bfp4", "cpu", "50.00")
    assert paired[2:] == ("1.023 ± 0.036", "-", "-31 +68 p<0.001")
    row = dataclasses.replace(row, paired=Paired("cpu", b=1, c=2, p=0.001), kl_ratio=None)
    (paired,) = Table.by(PAIRED, [row]).rows
    assert paired[2:4] == ("-", "-1 +2 p=0.001")
