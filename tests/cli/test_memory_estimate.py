"""The memory estimate of ``--explain``, printed before a compile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tilewright.cli.main import main
from tilewright.compiler.targets.interface.modes import COMPUTE_MODES
from tilewright.errors import CompileError

RUN = ["--prompt", "a", "--max-generated-tokens", "3", "--repeat-batches", "1"]
RUN += ["--no-results", "--explain"]
SHOWN = {
    "tiny": ["wqkv", "ff1_3", "kv_cache", "total"],
    "tiny-moe": ["router", "experts_ff1_3", "experts_ff2", "kv_cache", "total"],
    "tiny-hybrid": ["delta_in", "delta_gates", "delta_out", "shared_ff2", "kv_cache", "memory"],
}


def said(argv: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Return the errors of a command that prints no plan on its standard output."""
    assert main(argv) == 0
    out, err = capfd.readouterr()
    assert "bytes of" not in out and "moved a step" not in out
    return err


Planned = Callable[[list[str]], str]


@pytest.fixture
def planned(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Planned:
    """Run a command until it compiles. Return the plan."""

    def stop(*_: Any, **__: Any) -> None:
        raise CompileError("stopped here")

    def run(argv: list[str]) -> str:
        assert main(argv) == 2
        plan, _, after = capfd.readouterr().err.rpartition("tilewright: stopped here")
        assert after == "\n"
        return plan

    monkeypatch.setattr("tilewright.cli.measure.measure.compile_for", stop)
    return run


@pytest.mark.parametrize("shape", SHOWN)
def test_a_run_prints_it_before_anything_is_compiled(shape: str, planned: Planned) -> None:
    argv = ["bench", f"shape:{shape}", "--target", "reference", "--batch-size", "2", *RUN]
    plan = planned(argv)
    assert "on reference, performance" in plan and "2 sequences of" in plan
    for group in SHOWN[shape]:
        assert f"│ {group} " in plan
    assert ("% of the experts" in plan) == (shape != "tiny")
    assert ("bytes a sequence, whatever its length" in plan) == (shape == "tiny-hybrid")


def test_a_run_without_explain_prints_its_text_and_one_table(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """And the name and formats of the configuration, not its heading."""
    argv = ["bench", "--model", "shape:tiny-moe", "--target", "cpu", "--repeat-batches", "2"]
    argv += ["--prompt", "a", "--max-generated-tokens", "3", "--no-results"]
    assert main([*argv, "--precision", "all-q80"]) == 0
    out, err = capfd.readouterr()
    assert all(line.startswith("backend auto: onnxruntime") for line in err.splitlines())
    assert out.count("┏") == 1 and out.splitlines()[-1].endswith("; all-q80 (q80)")
    assert "precision_cfg" not in out


def test_compile_prints_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["compile", "shape:tiny-moe", "-o", str(tmp_path / "out"), "--target", "reference"]
    out = said([*argv, "--explain"], capfd)
    assert "│ experts_ff2 " in out and "1 sequence of 2,048 positions" in " ".join(out.split())


def test_what_is_compiled_already_has_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "out")
    said(["compile", "shape:tiny", "-o", folder, "--target", "reference", "--explain"], capfd)
    assert "bytes of" not in said(["bench", "--model", folder, *RUN], capfd)


@pytest.mark.parametrize("compute", COMPUTE_MODES)
def test_layers_of_their_own(compute: str, planned: Planned) -> None:
    precision = (
        "precision_cfg = {experts_ff1_3: q40, experts_ff2: bf16, shared_ff2: fp32, delta_in: q80}, "
        "layer_cfg = {1: {experts_ff1_3: bf16}}"
    )
    argv = ["bench", "--model", "shape:tiny-hybrid", "--target", "reference", "--compute", compute]
    out = " ".join(planned([*argv, "--precision", precision, *RUN]).split())
    assert "│ experts_ff1_3 │ q40, bf16 │" in out and "│ experts_ff2 │ bf16 │" in out
    assert "│ shared_ff2 │ fp32 │" in out and "│ delta_in │ q80 │" in out


def test_both_tables_of_an_explained_run_agree(capfd: pytest.CaptureFixture[str]) -> None:
    """What a step reads of products is told before and after compiling, as the target holds it."""
    argv = ["bench", "--model", "shape:tiny", "--target", "cpu", "--explain", *RUN]
    assert main([*argv, "--precision", "performance"]) == 0
    out, err = capfd.readouterr()

    def read(text: str, column: int) -> dict[str, str]:
        rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines()]
        groups = ("wqkv", "wo", "ff1_3", "ff2", "lm_head")
        return {row[0]: row[column] for row in rows if len(row) > 4 and row[0] in groups}

    before, after = read(err, 5), read(out[out.index("one decode step") :], 3)
    assert before == after and len(before) == 5
