"""Which folder dumps go to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tilewright.compiler.passes.dumps import DUMP_VARIABLE, dump_folder
from tilewright.errors import ConfigError


def test_nothing_is_dumped_unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(DUMP_VARIABLE, raising=False)
    assert dump_folder() is None
    monkeypatch.setenv(DUMP_VARIABLE, "")
    assert dump_folder() is None
    monkeypatch.setenv(DUMP_VARIABLE, str(tmp_path / "a" / "b"))
    assert dump_folder() == tmp_path / "a" / "b"
    assert (tmp_path / "a" / "b").is_dir()


def test_a_dump_folder_that_cannot_be_made_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    file.touch()
    for named in (file, file / "below"):
        monkeypatch.setenv(DUMP_VARIABLE, str(named))
        with pytest.raises(ConfigError, match=f"TILEWRIGHT_DUMP={named}") as caught:
            dump_folder()
        assert "\n" not in str(caught.value)


def test_a_named_folder_beats_the_variable(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DUMP_VARIABLE, str(tmp_path / "variable"))
    assert dump_folder(tmp_path / "option") == tmp_path / "option"
    assert not (tmp_path / "variable").exists()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--dump .*file: not a folder"):
        dump_folder(tmp_path / "file")
