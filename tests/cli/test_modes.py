"""What commands leave behind is as open as the umask says: folders 0750, files 0640 under 027."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers

from tests.cli.conftest import Run
from tests.models.conftest import tiny_hf_config


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0o027)
    yield
    os.umask(before)


EMITTED = {
    "program": ("compile", "--target", "cpu"),
    "values": ("compile", "--target", "reference"),
    "onnx": ("compile", "--emit", "onnx"),
    "mlir": ("compile", "--emit", "mlir"),
    "dllama": ("convert", "--weights", "q40"),
}


@pytest.mark.parametrize("name", EMITTED)
def test_emitted_folders_have_the_modes_of_new_ones(
    name: str, umask: None, run: Run, tiny_gguf: Path, tmp_path: Path
) -> None:
    verb, *options = EMITTED[name]
    folder = tmp_path / "made" / name
    run(verb, tiny_gguf, "-o", folder, *options)
    check(folder.parent)


def test_a_file_for_a_board_has_them_too(
    umask: None, run: Run, tiny_folder: Path, tmp_path: Path
) -> None:
    heads = tiny_hf_config(num_attention_heads=2, num_key_value_heads=2, head_dim=32)
    transformers.LlamaForCausalLM(heads).save_pretrained(tmp_path / "heads")
    shutil.copy(tiny_folder / "tokenizer.json", tmp_path / "heads")
    options = ("--target", "n150", "--context", "64", "--emit", "ttnn")
    run("compile", tmp_path / "heads", "-o", tmp_path / "made" / "board", *options)
    check(tmp_path / "made")


def check(folder: Path) -> None:
    paths = [folder, *folder.rglob("*")]
    wanted = {path: 0o750 if path.is_dir() else 0o640 for path in paths}
    assert {path: path.stat().st_mode & 0o777 for path in paths} == wanted
    assert any(path.is_file() for path in paths)
