"""Whether Triton compiles the kernels of whole steps. The interpreter accepts more than it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CHANGED = {"TRITON_INTERPRET", "PYTHONWARNINGS"}
KERNELS = ("_attend_decode_kernel", "_coded_kernel", "_draw_kernel", "_states_kernel")


def lowered_kernels(*arguments: str) -> set[str]:
    command = [sys.executable, "-m", "tests.targets.cuda.lowered_launches", *arguments]
    names = {name: value for name, value in os.environ.items() if name not in CHANGED}
    done = subprocess.run(command, env=names, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return set(done.stdout.split())


def test_launches_are_lowered_for_their_gpus() -> None:
    """Programmatic dependent launch is for compute capability 9.0 and later only."""
    assert set(KERNELS) <= lowered_kernels()


@pytest.mark.slow
def test_launches_compile_and_fit_on_compute_capability_89() -> None:
    assert set(KERNELS) <= lowered_kernels("--compile")


@pytest.mark.slow
def test_each_launch_is_lowered_with_all_tiles() -> None:
    assert set(KERNELS) <= lowered_kernels("--all-tiles")
