"""``python -m bench bench-cuda`` started as a script, from a folder that is not the clone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).resolve().parents[3] / "bench"


def script(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    surroundings = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, str(SCRIPT), "bench-cuda", *argv],
        cwd=folder,
        env=surroundings,
        capture_output=True,
        text=True,
    )


def test_the_list_from_another_folder(tmp_path: Path) -> None:
    found = script(tmp_path, "--list")
    assert (found.returncode, found.stderr) == (0, "")
    assert "8b-bf16-b1" in found.stdout and "random weights" in found.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_mistake_is_one_line(tmp_path: Path) -> None:
    found = script(tmp_path, "--rows", "nosuch")
    assert (found.returncode, found.stdout) == (2, "")
    assert len(found.stderr.splitlines()) == 1 and "'nosuch'; allowed: " in found.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_one_line(tmp_path: Path) -> None:
    found = script(tmp_path, "--results", str(tmp_path / "results.jsonl"))
    assert (found.returncode, found.stdout) == (2, "")
    assert len(found.stderr.splitlines()) == 1 and "no GPU" in found.stderr
    assert not any(path.read_bytes() for path in tmp_path.iterdir()), "no record of nothing"


@pytest.mark.gpu(memory_gb=14)
def test_a_row_is_measured_and_profiled(tmp_path: Path) -> None:
    found = script(tmp_path, "--rows", "1b-bf16-b1", "--quick", "--profile")
    assert found.returncode == 0, found.stderr
    assert "1b-bf16-b1: decode, t/s: " in found.stdout and "gemv_bf16" in found.stdout
    assert "1b-bf16-b1: kernels by GPU time" in found.stdout
