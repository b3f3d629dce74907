"""What runs target ``cpu``, as a command chooses it and says so."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewright.cli.main import main
from tilewright.compiler.targets.cpu.native.library import binding as library
from tilewright.compiler.targets.cpu.native.library import build

FEW = ("--max-generated-tokens", "3", "--repeat-batches", "1", "--no-results")


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No library is there, nor anything to build it with."""
    monkeypatch.setenv("TILEWRIGHT_NATIVE", str(tmp_path / "native"))
    monkeypatch.setattr(build, "__file__", str(tmp_path / "package" / "build.py"))  # no kernels
    monkeypatch.setenv("CXX", "no-such-compiler")
    for each in (build.library_path, library.library):
        each.cache_clear()
    yield
    for each in (build.library_path, library.library):
        each.cache_clear()


@pytest.mark.usefixtures("no_compiler")
def test_a_machine_without_a_compiler_runs_onnx_runtime_and_says_so(
    tiny_gguf: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--model", str(tiny_gguf), "--prompt", "hello", *FEW]) == 0
    out, error = capfd.readouterr()
    said = "backend auto: onnxruntime, for native cannot be built: no C++ compiler"
    assert error.splitlines().count(f"{said} (CXX='no-such-compiler' is not found)") == 1
    assert "tiny on cpu, " in out
