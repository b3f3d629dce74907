"""Whether Triton compiles the kernels of whole steps. The interpreter accepts more than it."""

from __future__ import annotations

import os
import subprocess
import sys

CHANGED = {"TRITON_INTERPRET", "PYTHONWARNINGS"}
KERNELS = ("_attend_decode_kernel", "_coded_kernel", "_draw_kernel", "_states_kernel")


def test_launches_are_lowered_for_hopper() -> None:
    command = [sys.executable, "-m", "tests.targets.cuda.lowered_launches"]
    names = {name: value for name, value in os.environ.items() if name not in CHANGED}
    done = subprocess.run(command, env=names, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(KERNELS) <= set(done.stdout.split())
