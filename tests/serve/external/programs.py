"""Programs of others around a server: found or skipped, started, and ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

NODE_MODULES = "TILEWRIGHT_NODE_MODULES"


def needs(name: str) -> pytest.MarkDecorator:
    """Skip a test if no program of this name is installed."""
    return pytest.mark.skipif(find_program(name) is None, reason=f"{name} is not installed")


def find_program(name: str) -> str | None:
    """The path of a program; Debian keeps servers outside the PATH of users."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


def node_environment() -> Mapping[str, str]:
    """The environment in which Node finds the npm package openai."""
    modules = os.environ.get(NODE_MODULES, "")
    if not (Path(modules) / "openai").is_dir():
        pytest.skip(f"the npm package openai is not in ${NODE_MODULES}; make test-clients")
    return {**os.environ, "NODE_PATH": modules}


@contextlib.contextmanager
def running_program(command: Sequence[str], log: Path) -> Iterator[None]:
    """Run a program until the block ends; what it says is in ``log``."""
    program = find_program(command[0])
    assert program is not None
    with log.open("wb") as file:
        process = subprocess.Popen([program, *command[1:]], stdout=file, stderr=file)
    try:
        yield
        assert process.poll() is None, log.read_text()
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
