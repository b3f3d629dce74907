"""Paths that are no files: pipes, devices, folders, links in a circle. No reader waits at one."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fuzz.limits import guarded, guarded_apart
from tilewright.compiler.precision import load_precision
from tilewright.evaluate.cases.prompts import read_prompts
from tilewright.evaluate.cases.reference import Subject, load_reference
from tilewright.evaluate.report import perf_md
from tilewright.evaluate.results import result_file as results
from tilewright.models import load_model
from tilewright.models.checkpoints.base import TokenizerSource
from tilewright.models.checkpoints.containers import open_checkpoint
from tilewright.models.checkpoints.gguf.checkpoint import GGUFCheckpoint
from tilewright.models.checkpoints.json_file import read_json
from tilewright.models.tokenizer.load import load_tokenizer

READERS: dict[str, Callable[[Path], object]] = {
    "x.gguf": GGUFCheckpoint,
    "model.gguf": load_model,
    "config.json": read_json,
    "x.yaml": lambda path: load_precision(str(path)),
    "x.json": lambda path: load_precision(str(path)),
    "PERF.md": perf_md.load,
    "results.jsonl": results.read,
    "prompts.json": read_prompts,
    "reference.json": lambda path: load_reference(path, Subject("", "", "", "")),
}
IN_FOLDERS: dict[str, Callable[[Path], object]] = {
    "config.json": open_checkpoint,
    "model.safetensors": open_checkpoint,
    "model.safetensors.index.json": open_checkpoint,
    "tokenizer.json": lambda path: load_tokenizer(TokenizerSource(path)),
    "x.gguf": load_model,
}


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


KINDS = [make_pipe, link_to_zeros, link_to_itself, Path.mkdir]


def check(read: Callable[[], object]) -> None:
    assert guarded(read, file_size=0, seconds=5)
    assert guarded_apart(read, file_size=0, seconds=5)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file(name: str, make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / name)
    check(lambda: READERS[name](tmp_path / name))


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("name", IN_FOLDERS)
def test_a_folder_with_what_is_no_file(
    name: str, make: Callable[[Path], None], tmp_path: Path
) -> None:
    if name.startswith("model."):
        (tmp_path / "config.json").write_text("{}")
    make(tmp_path / name)
    check(lambda: IN_FOLDERS[name](tmp_path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
@pytest.mark.parametrize("name", READERS)
def test_a_file_that_may_not_be_read(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"{}")
    (tmp_path / name).chmod(0)
    assert "ermission" in guarded(lambda: READERS[name](tmp_path / name), file_size=2)
