"""``bench perf-check``: which records are measured again, how, and when one is reproduced."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import perf_check
from bench.perf_check import EXIT_NOT_REPRODUCED, Claim, claims, command_of, compare, main
from tests.evaluate.report.perf_records import accuracy, make, measured_accuracy
from tilewright.compiler.devices import CpuDescription
from tilewright.errors import ConfigError
from tilewright.evaluate.results.record import Repeat, Result, medians
from tilewright.evaluate.results.result_file import append

TWO_CORES = CpuDescription("a processor", 2, None, ())


def timed(*speeds: float, ttft_ms: float = 100.0, **changes: Any) -> Result:
    repeats = tuple(Repeat(ttft_ms=ttft_ms, decode_tsu=speed) for speed in speeds)
    fields = {"device_detail": "a processor, 2 threads", "repeats": repeats, **medians(repeats)}
    return make(**{**fields, **changes})


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf_check, "describe_cpu", lambda: TWO_CORES)


def same(old: Result, now: Result, **kinds: bool) -> dict[str, bool]:
    claim = Claim(old, **{"has_speed": True, "has_accuracy": False, **kinds})
    return {each.figure: each.is_reproduced for each in compare(claim, now, tolerance=0.05)}


def test_a_speed_is_reproduced_where_the_intervals_meet() -> None:
    old = timed(99, 100, 101)  # 97.5 to 102.5, widened to 95 and 105
    both = {"Speed (t/s/u)": True, "TTFT (ms)": True}
    assert same(old, timed(100)) == both
    assert same(old, timed(109.9)) == both  # from 104.4 on
    assert same(old, timed(112)) == {**both, "Speed (t/s/u)": False}
    assert same(old, timed(90)) == {**both, "Speed (t/s/u)": False}
    assert same(timed(60, 100, 140), timed(112)) == both, "a wide interval is one"
    assert same(old, timed(100, ttft_ms=120)) == {**both, "TTFT (ms)": False}
    assert same(old, timed(100, effective_id="x")) == {"arithmetic": False, **both}


def test_an_accuracy_is_reproduced_within_half_a_point() -> None:
    kinds = {"has_speed": False, "has_accuracy": True}
    old = measured_accuracy(accuracy=accuracy(470))
    for count, is_same in ((470, True), (472, True), (468, True), (473, False), (467, False)):
        found = same(old, measured_accuracy(accuracy=accuracy(count)), **kinds)
        assert found == {"Top-1 (%)": is_same, "Top-5 (%)": True}
    assert not any(same(old, make(), **kinds).values()), "no accuracy is not the same one"


def test_what_stands_in_rows_is_measured_again_and_nothing_else() -> None:
    old, new = make(), make(day=2)
    unplaced, predicted = make(num_generated=7), make(kind="predicted")
    of_accuracy, many = measured_accuracy(), make(batch=32)
    found = claims([old, new, unplaced, predicted, of_accuracy, many])
    kinds = [(each.record, each.has_speed, each.has_accuracy) for each in found]
    assert kinds == [(new, True, False), (many, True, False), (of_accuracy, False, True)]


def test_commands_are_the_recorded_ones_or_what_the_fields_say() -> None:
    """The backend is the record's, whatever would be chosen here."""
    words = ["bench", "--case", "performance-ci-1", "--precision", "performance"]
    ours = ["--backend", "onnxruntime"]
    assert command_of(timed()) == [*words, *ours, "--threads", "2"]
    random = make(weights="random", model="Llama-3.2-1B", target="cuda", device="H200")
    assert command_of(random) == [*words, "--model", "shape:llama-3.2-1b", "--target", "cuda"]
    said = make(command="tilewright bench 'my model' --threads 4")
    assert command_of(said) == ["bench", "my model", "--threads", "4", *ours]
    wide = replace(random, batch=8, model="Llama-3.1-8B", precision_name="bf16")
    assert perf_check.cuda_row(wide) == "8b-bf16-b8" and perf_check.cuda_row(timed()) is None
    file = replace(wide, batch=32, model="llama-3.1-8b-nvfp4", precision_name="stored")
    assert perf_check.cuda_row(file) == "8b-nvfp4-b32"


def test_what_this_machine_cannot_run_is_skipped_with_the_reason(
    here: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "some.jsonl"
    for each in (
        timed(99, model="Mine"),
        timed(99, device_detail="another, 2 threads", batch=32),
        timed(99, device_detail="a processor, 4 threads", prompt_length=2048),
        timed(99, device="H200", target="cuda", device_detail="NVIDIA H200"),
        timed(99, device="N150", target="ttnn"),
        timed(99, prompt_length=1024, command="rm -r results"),
    ):
        append(path, each)
    with pytest.raises(ConfigError, match="none of 6 rows can be measured here"):
        main(["--results", str(path)])
    said = capsys.readouterr().out
    assert said.count("skipped") == 6 and "where the weights of Mine lie" in said
    assert said.count("; this is a processor with 2 cores") == 2
    assert "its command is none that is run here: rm -r results" in said
    assert "no H200 here" in said and "no N150 here" in said


def test_the_exit_code_says_whether_all_is_reproduced(
    here: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cpu.jsonl"
    append(path, timed(99, 100, 101))
    append(path, timed(50, 50, 50, batch=32, case="performance-ci-32"))
    found: dict[str, list[Result] | str] = {
        "performance-ci-1": [timed(100)],
        "performance-ci-32": [timed(50, batch=32)],
    }
    monkeypatch.setattr(perf_check, "run", lambda words: found[words[2]])
    assert main(["--results", str(path)]) == 0
    assert "4 of 4 figures of 2 records reproduced" in capsys.readouterr().out
    found["performance-ci-32"] = [timed(80, batch=32)]
    assert main(["--results", str(path)]) == EXIT_NOT_REPRODUCED
    said = capsys.readouterr().out
    assert "NOT REPRODUCED  CPU, SmolLM2-135M-Instruct, performance, performance-ci-32: " in said
    assert "Speed (t/s/u) 50.0 (47.5-52.5), now 80.0 (76.0-84.0)" in said
    found["performance-ci-32"] = "exit code 2: no room"
    assert main(["--results", str(path), "--cases", "performance-ci-32"]) == EXIT_NOT_REPRODUCED
    assert "not measured , now exit code 2: no room" in capsys.readouterr().out
    assert main(["--results", str(path), "--cases", "performance-ci-1"]) == 0
    assert main(["--results", str(path), "--list"]) == 0
    assert capsys.readouterr().out.count("to be measured") == 2


def test_a_record_of_calibrated_weights_is_not_measured_again() -> None:
    assert "calibrated folder" in perf_check.reason_to_skip(make(calibration="gptq, 1 token (1a)"))
