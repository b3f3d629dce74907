"""Each rank is killed and stopped in each phase: an error in time, and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.distributed import rank_program
from tests.distributed.rank_program import LIMIT
from tests.utils.test_child_process import gone
from tilewright.utils.child_process import PYTHON

PHASES = ("hello", "join", "load", "capture", "prompt", "decode", "idle", "close")


def wait_for(path: Path, seconds: float = 120.0) -> int:
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"no {path.name}"
        time.sleep(0.02)
    return int(path.read_text())


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("phase", ["load", "capture", "decode"])
def test_rank_0_ends_in_time_though_it_does_not_come_back(
    phase: str, number: signal.Signals, tmp_path: Path
) -> None:
    """It is held in the phase, for longer than it may, while rank 1 goes."""
    path = Path(rank_program.__file__)
    command = [*PYTHON, str(path), str(tmp_path), phase, "0"]
    environment = {**os.environ, "PYTHONPATH": str(path.parents[2])}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as first:
        try:
            wait_for(tmp_path / f"0.{phase}")
            other = wait_for(tmp_path / f"1.{phase}")
            os.kill(other, number)
            assert first.wait(LIMIT + 5.0) == 3 and gone(other)
            assert first.stderr is not None
            assert first.stderr.read().startswith("tilewright: rank 1 ")
        finally:
            first.kill()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("rank", [0, 1])
def test_whoever_goes_in_whichever_phase_is_missed_in_time(
    rank: int, phase: str, number: signal.Signals, tmp_path: Path
) -> None:
    """Within a step's limit and 5 s rank 0 names the rank and ends, or its follower does: in phases
    too in which ranks that run may be silent for longer.
    """
    if (rank, phase, number) == (0, "hello", signal.SIGSTOP):
        pytest.skip("there is nobody yet who could miss it")
    path = Path(rank_program.__file__)
    command = [*PYTHON, str(path), str(tmp_path), phase, str(rank)]
    environment = {**os.environ, "PYTHONPATH": str(path.parents[2])}
    first = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        hit = wait_for(tmp_path / f"{0 if phase == 'idle' else rank}.{phase}")
        if phase == "idle":  # in which a follower does nothing that it could say
            hit = wait_for(tmp_path / f"{rank}.decode")
        has_other = rank == 1 or phase != "hello"
        # the other one is there, and waits
        place = {"join": "hello", "idle": "decode", "close": "decode"}.get(phase, phase)
        other = wait_for(tmp_path / f"{1 - rank}.{place}") if has_other else first.pid
        time.sleep(0.5)
        os.kill(hit, number)
        started = time.monotonic()
        while not gone(other) and time.monotonic() - started < LIMIT + 20:
            if other == first.pid:
                first.poll()
            time.sleep(0.05)
        took = time.monotonic() - started
        print(f"{phase}, rank {rank}, {number.name}: {took:.2f} s of {LIMIT + 5:g}")
        if has_other:
            assert gone(other) and took < LIMIT + 5.0
        if rank == 1 and phase != "close":
            assert first.wait(5) == 3 and first.stderr is not None
            assert "rank 1 " in first.stderr.read()
        if number != signal.SIGSTOP or rank == 1:
            assert gone(hit)
    finally:
        first.kill()
        first.wait()
