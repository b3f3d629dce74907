"""GGUF files in parts, written by the format's own library, and sets of parts that are no model."""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from tilewright.errors import CheckpointError
from tilewright.models import check_header, find_model, load_model, quantised_types
from tilewright.models.checkpoints.gguf.checkpoint import GGUFCheckpoint

Write = Callable[[str], Path]


@pytest.fixture
def write(
    tmp_path: Path,
    make_llama: Callable[..., Any],
    write_gguf: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> Write:
    """Write a whole tiny file, or its parts of at most 7 tensors, and return the first."""

    def run(name: str) -> Path:
        path = tmp_path / name
        if "-of-" not in name:
            return write_gguf(path, make_llama(), "Q8_0")
        parted = functools.partial(gguf.GGUFWriter, split_max_tensors=7)
        with monkeypatch.context() as patch:
            patch.setattr(gguf, "GGUFWriter", parted)
            write_gguf(path.with_name(name.partition("-0")[0] + ".gguf"), make_llama(), "Q8_0")
        return path

    return run


def named(path: Path, number: int) -> Path:
    return path.with_name(path.name.replace("-00001-", f"-{number:05}-"))


def test_parts_have_the_tensors_of_the_whole_file(write: Write) -> None:
    whole = GGUFCheckpoint(write("whole.gguf"))
    first = write("tiny-Q8_0-00001-of-00003.gguf")
    files = tuple(named(first, number) for number in (1, 2, 3))
    for path in files:
        parts = GGUFCheckpoint(path)
        assert (parts.path, parts.files, parts.names) == (first, files, whole.names)
        assert parts.config.name == "tiny"
        for name in whole.names:
            assert torch.equal(parts.get(name), whole.get(name))
        assert parts.content_hash() == GGUFCheckpoint(first).content_hash()
        assert quantised_types(path) == ("Q8_0",)
        check_header(path)
    assert load_model(files[2]).tokenizer.encode("hell")


def test_content_hash_covers_every_part(write: Write) -> None:
    first = write("m-00001-of-00003.gguf")
    before = GGUFCheckpoint(first).content_hash()
    raw = bytearray(named(first, 3).read_bytes())
    raw[-1] ^= 1
    named(first, 3).write_bytes(raw)
    assert GGUFCheckpoint(first).content_hash() != before


def test_folder_of_parts_is_a_model_without_its_vision_encoder(write: Write) -> None:
    first = write("m-00001-of-00003.gguf")
    first.with_name("mmproj-m-F16.gguf").write_bytes(b"GGUF")
    assert find_model(first.parent) == first
    write("other.gguf")
    with pytest.raises(CheckpointError, match=r"2 \.gguf files"):
        find_model(first.parent)


def renumber(path: Path, key: str, value: int) -> None:
    raw = bytearray(path.read_bytes())
    at = raw.index(key.encode()) + len(key) + 4
    raw[at : at + 2] = struct.pack("<H", value)
    path.write_bytes(raw)


def move(path: Path, target: Path) -> None:
    target.write_bytes(path.read_bytes())


def recount(path: Path) -> None:
    for number in (1, 2, 3):
        renumber(named(path, number), "split.tensors.count", 21)


def repeat(path: Path) -> None:
    move(named(path, 2), named(path, 3))
    renumber(named(path, 3), "split.no", 2)


@pytest.mark.parametrize(
    ("damage", "opened", "words"),
    [
        (lambda p: named(p, 2).unlink(), 1, r"m-00002-of-00003\.gguf: .*missing.*all 3 parts"),
        (lambda p: p.unlink(), 3, r"m-00001-of-00003\.gguf: .*missing.*all 3 parts"),
        (lambda p: renumber(named(p, 2), "split.count", 4), 1, r"00002.*split\.count = 4; .*: 3"),
        (lambda p: move(named(p, 3), named(p, 2)), 1, r"00002.*split\.no = 2; allowed: 1"),
        (lambda p: renumber(p, "split.count", 5), 2, r"first of 5 parts .*-00001-of-00005\.gguf"),
        (lambda p: renumber(p, "split.count", 1), 2, r"00002.*: m-00001.*is a whole file"),
        (
            recount,
            1,
            r"split\.tensors\.count = 21, but its 3 parts have 20 tensors",
        ),
        (
            repeat,
            1,
            r"m-00003.*tensor '.*' is in m-00002-of-00003\.gguf too",
        ),
        (lambda p: named(p, 3).write_bytes(b"GGUF"), 1, r"00003.*cut short"),
    ],
)
def test_parts_that_do_not_fit_are_refused(
    damage: Callable[[Path], object], opened: int, words: str, write: Write
) -> None:
    first = write("m-00001-of-00003.gguf")
    damage(first)
    for read in (GGUFCheckpoint, check_header):
        with pytest.raises(CheckpointError, match=words) as caught:
            read(named(first, opened))
        assert "\n" not in str(caught.value)


def test_parts_under_other_names_are_refused(write: Write) -> None:
    first = write("m-00001-of-00003.gguf")
    first.rename(first.with_name("model.gguf"))
    with pytest.raises(CheckpointError, match=r"model\.gguf: .*allowed: NAME-00001-of-00003"):
        GGUFCheckpoint(first.with_name("model.gguf"))
