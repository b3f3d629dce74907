"""The end of a command's process: exit code, handlers and output."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

_IMPORT = "from tilewright.utils.garbage import run_process"
_MAIN = f"""
import atexit, sys
{_IMPORT}

atexit.register(print, "tool")  # as coverage does, before the command

def main():
    atexit.register(print, "handler")
    print("answer")
"""


def _run(ending: str, stdout: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    script: list[Any] = [sys.executable, "-c", f"{_MAIN}    {ending}\nsys.exit(run_process(main))"]
    environment = {**os.environ, "PYTHONUNBUFFERED": ""}
    return subprocess.run(
        script, stdout=stdout, stderr=subprocess.PIPE, env=environment, text=True, check=False
    )


@pytest.mark.parametrize("code", [0, 3])
def test_run_process_ends_with_the_code_after_the_handlers_of_main(code: int) -> None:
    done = _run(f"return {code}")
    assert (done.returncode, done.stdout, done.stderr) == (code, "answer\nhandler\n", "")


def test_run_process_leaves_an_exception_to_python() -> None:
    done = _run("raise KeyError('lost')")
    assert (done.returncode, done.stdout) == (1, "answer\nhandler\ntool\n")
    assert "KeyError: 'lost'" in done.stderr


@pytest.mark.parametrize("switch", ["settrace", "setprofile"])
def test_run_process_leaves_the_end_to_tools(switch: str) -> None:
    done = _run(f"sys.{switch}(lambda *event: None); return 3")
    assert (done.returncode, done.stdout) == (3, "answer\nhandler\ntool\n")


def test_run_process_leaves_a_closed_pipe_to_python() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = _run("return 0", stdout=writer)
    os.close(writer)
    assert done.returncode == 120
    assert "BrokenPipeError" in done.stderr


def test_run_process_without_standard_output_ends_in_silence() -> None:
    command = f"exec '{sys.executable}' -c 'import sys\n{_IMPORT}\nsys.exit(run_process(int))' >&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize(
    "module", ["tilewright.cli.main", "tilewright.loading.follower", "bench.__main__"]
)
def test_modules_of_processes_register_no_handler_at_import(module: str) -> None:
    script = f"import atexit, {module}; print(atexit._ncallbacks())"
    assert subprocess.check_output([sys.executable, "-c", script], text=True) == "0\n"
