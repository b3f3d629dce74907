"""The byte plan that ``bench`` and ``compile`` print with ``--explain``, before they compile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tilewright.cli.main import main
from tilewright.compiler.targets.interface.modes import COMPUTE_MODES
from tilewright.errors import CompileError

RUN = [
    "--prompt",
    "a",
    "--max-generated-tokens",
    "3",
    "--repeat-batches",
    "1",
    "--no-results",
    "--explain",
]
SHOWN = {
    "tiny": ["wqkv", "ff1_3", "kv_cache", "total"],
    "tiny-moe": ["router", "experts_ff1_3", "experts_ff2", "kv_cache", "total"],
    "tiny-hybrid": ["delta_in", "delta_gates", "delta_out", "shared_ff2", "kv_cache", "memory"],
}


def said(argv: list[str], capfd: pytest.CaptureFixture[str]) -> str:
    """Beside what the command is asked for."""
    assert main(argv) == 0
    out, err = capfd.readouterr()
    assert "bytes of" not in out and "moved a step" not in out
    return err


@pytest.mark.parametrize("shape", SHOWN)
def test_a_run_prints_it_beside_its_text(shape: str, capfd: pytest.CaptureFixture[str]) -> None:
    argv = ["bench", f"shape:{shape}", "--target", "reference", "--batch-size", "2", *RUN]
    plan = said(argv, capfd)
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


def test_it_comes_before_anything_is_compiled(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any, **__: Any) -> None:
        raise CompileError("stopped here")

    monkeypatch.setattr("tilewright.cli.measure.measure.compile_for", stop)
    assert main(["bench", "--model", "shape:tiny-moe", "--target", "reference", *RUN]) == 2
    _, err = capfd.readouterr()
    assert err.index("experts_ff1_3") < err.index("tilewright: stopped here\n")


def test_compile_prints_it(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    argv = [
        "compile",
        "shape:tiny-moe",
        "-o",
        str(tmp_path / "out"),
        "--target",
        "reference",
        "--explain",
    ]
    out = said(argv, capfd)
    assert "│ experts_ff2 " in out and "1 sequence of 2,048 positions" in " ".join(out.split())


def test_what_is_compiled_already_has_none(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = str(tmp_path / "out")
    said(["compile", "shape:tiny", "-o", folder, "--target", "reference", "--explain"], capfd)
    assert "bytes of" not in said(["bench", "--model", folder, *RUN], capfd)


@pytest.mark.parametrize("compute", COMPUTE_MODES)
def test_layers_of_their_own(compute: str, capfd: pytest.CaptureFixture[str]) -> None:
    precision = (
        "precision_cfg = {experts_ff1_3: q40, experts_ff2: bf16, shared_ff2: fp32, delta_in: q80}, "
        "layer_cfg = {1: {experts_ff1_3: bf16}}"
    )
    argv = ["bench", "--model", "shape:tiny-hybrid", "--target", "reference", "--compute", compute]
    out = " ".join(said([*argv, "--precision", precision, *RUN], capfd).split())
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
