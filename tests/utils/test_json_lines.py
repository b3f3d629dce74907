"""Files of JSON lines, as results use them: torn tails, full disks, writers side by side."""

from __future__ import annotations

import dataclasses
import multiprocessing
from pathlib import Path

import pytest

from tests.evaluate.results.test_results import full, make
from tilewright.errors import ConfigError
from tilewright.evaluate.results import result_file as results
from tilewright.utils.json_lines import TornLineWarning, check_writable


def test_a_torn_last_line_is_dropped_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    results.append(path, full())
    whole = path.read_bytes()
    for keep in (1, 20, len(whole) - 2):
        path.write_bytes(whole + whole[:keep])
        with pytest.warns(TornLineWarning, match=r"results\.jsonl:2"):
            assert results.read(path) == [full()]


def test_append_cuts_a_torn_line_off_and_completes_a_missing_newline(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    line = results.dumps(full()).encode()
    path.write_bytes(line + b"\n" + line[:40])
    with pytest.warns(TornLineWarning):
        results.append(path, make())
    assert results.read(path) == [full(), make()]
    path.write_bytes(line)
    results.append(path, make())
    assert results.read(path) == [full(), make()]


def test_a_torn_line_longer_than_a_read_is_cut_off_whole(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    path.write_bytes(results.dumps(full()).encode() + b'\n{"case":"' + b"x" * 200_000)
    with pytest.warns(TornLineWarning):
        results.append(path, make())
    assert results.read(path) == [full(), make()]


def test_paths_that_cannot_be_written_are_refused_early_and_late(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    for path in (tmp_path, file / "below.jsonl", file / "deep" / "er.jsonl"):
        with pytest.raises(ConfigError, match="results file"):
            check_writable(path)
        with pytest.raises(ConfigError, match="results file"):
            results.append(path, make())
    check_writable(tmp_path / "new" / "results.jsonl")
    check_writable(file)
    assert not (tmp_path / "new").exists()
    with pytest.raises(ConfigError, match="No such file"):
        results.read(tmp_path / "missing.jsonl")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error() -> None:
    with pytest.raises(ConfigError, match="No space left"):
        results.append("/dev/full", make())


def test_a_write_that_fails_midway_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "results.jsonl"
    results.append(path, make())
    before = path.read_bytes()
    write = results.os.write
    calls = iter([lambda handle, data: write(handle, bytes(data[:7]))])

    def failing(handle: int, data: memoryview) -> int:
        for call in calls:
            return call(handle, data)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(results.os, "write", failing)
    with pytest.raises(ConfigError, match="No space left"):
        results.append(path, full())
    assert path.read_bytes() == before


def _write_many(path: str, model: str) -> None:
    for _ in range(20):
        results.append(path, dataclasses.replace(full(), model=model))


def test_writers_side_by_side_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write_many, args=(str(path), f"m{i}")) for i in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(timeout=60)
    assert sorted(r.model for r in results.read(path)) == ["m0"] * 20 + ["m1"] * 20 + ["m2"] * 20
