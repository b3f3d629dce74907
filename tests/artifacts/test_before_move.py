"""Folders compiled at 66e0da5, before the move of the tree: read, or refused with a remedy.

The native folder is without its weights, which its version keeps from being read.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from tilewright.cli.main import main
from tilewright.compiler.artifacts.folder import open_folder
from tilewright.compiler.artifacts.loading import load_program
from tilewright.compiler.artifacts.paths import digest_memory
from tilewright.compiler.ir.info import info
from tilewright.compiler.targets.cpu.native.library import build
from tilewright.compiler.targets.interface.base import CompileOptions


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("before_move.tar.gz")) as packed:
        packed.extractall(tmp_path, filter="data")
    return tmp_path / "before_move"


def test_folder_of_the_old_tree_runs(folders: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = folders / "null"
    manifest = open_folder(folder, digest_memory())
    loaded = load_program(folder, manifest, CompileOptions(max_context=64))
    assert (loaded.precision.name, loaded.target) == ("performance", "null")
    groups = {info(node).tensor_group for node in loaded.graph().graph.nodes}
    assert groups >= {"wqkv", "wo", "ff1_3", "ff2", "lm_head", "kv_cache"}
    assert main(["run", str(folder), "--prompt", "hello", "--max-tokens", "4"]) == 0
    assert "4 tokens" in capfd.readouterr().err


@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
def test_native_folder_of_the_old_tree_names_its_remedy(
    folders: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", str(folders / "cpu"), "--prompt", "hello"]) == 2
    *_, line = capfd.readouterr().err.splitlines()
    assert "program.json: version of the native library 7; allowed: " in line
    assert line.endswith("compile it again")
