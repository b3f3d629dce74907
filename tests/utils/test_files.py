"""Files are replaced or made whole, or left as they were, with nothing beside them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tilewright.utils.files import create_file, replace_file


@pytest.fixture(autouse=True)
def umask() -> Iterator[None]:
    """The common one."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_and_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"one")
    assert path.read_bytes() == b"one" and path.stat().st_mode & 0o777 == 0o644
    path.chmod(0o600)
    replace_file(path, b"two")
    assert path.read_bytes() == b"two" and path.stat().st_mode & 0o777 == 0o600
    assert names(tmp_path) == ["file"]


def test_what_cannot_be_replaced_is_left(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(OSError, match="directory"):
        replace_file(folder, b"x")
    assert names(tmp_path) == ["folder"] and folder.is_dir()


def test_a_failing_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")

    def fail(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    for write in (replace_file, create_file):
        with pytest.raises(OSError, match="No space"):
            write(path, b"new")
    assert path.read_bytes() == b"old" and names(tmp_path) == ["file"]


def test_a_file_is_made_once(tmp_path: Path) -> None:
    path = tmp_path / "file"
    create_file(path, b"one")
    with pytest.raises(FileExistsError):
        create_file(path, b"two")
    assert path.read_bytes() == b"one" and names(tmp_path) == ["file"]
    assert path.stat().st_mode & 0o777 == 0o644


def test_new_files_are_as_open_as_the_umask_says(tmp_path: Path) -> None:
    for mask, mode in ((0o027, 0o640), (0o077, 0o600), (0o002, 0o664)):
        os.umask(mask)
        for write in (replace_file, create_file):
            path = tmp_path / f"{write.__name__}-{mask:o}"
            write(path, b"x")
            assert path.stat().st_mode & 0o777 == mode
