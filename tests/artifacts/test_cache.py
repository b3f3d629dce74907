"""The cache beside other processes: one builds, others wait; room is made; leftovers go."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tilewright.compiler.artifacts.cache import DEFAULT_GB, ProgramCache
from tilewright.compiler.artifacts.digests import file_digest, write_whole
from tilewright.compiler.artifacts.folder import seal_folder
from tilewright.compiler.artifacts.manifest import Manifest, ModelFacts
from tilewright.compiler.precision import PrecisionSummary
from tilewright.compiler.targets.contract.record import NumericContract
from tilewright.errors import CompileError, ConfigError

FORK = multiprocessing.get_context("fork")

MANIFEST = Manifest(
    model=ModelFacts("tiny", "c" * 64, 1, 256),
    precision=PrecisionSummary("bfp8", "id", "heading", ()),
    target="null",
    compute="fast",
    contract=NumericContract((), ()),
    notes=(),
    versions={},
    commit=None,
    created="2026-01-01T00:00:00+00:00",
)


def builder(cache: ProgramCache, size: int = 10, log: Path | None = None) -> Callable[[Path], None]:
    """Fills an entry slowly, noting in ``log`` that it did."""

    def build(folder: Path) -> None:
        if log is not None:
            with log.open("a") as file:
                file.write(f"{os.getpid()}\n")
            time.sleep(0.2)
        (folder / "weights.bin").write_bytes(b"w" * size)
        seal_folder(folder, MANIFEST, cache.memory)

    return build


def never() -> None:
    raise AssertionError("nobody else is there")


def never_built(folder: Path) -> None:
    raise AssertionError("it is there")


def get(cache: ProgramCache, key: str, build: Callable[[Path], None]) -> None:
    with cache.entry(key, build, wait=never):
        pass


def names(cache: ProgramCache) -> set[str]:
    return {path.name for path in (cache.root / "programs").iterdir() if path.is_dir()}


def test_processes_at_the_same_entry_build_it_once(cache: ProgramCache, tmp_path: Path) -> None:
    log = tmp_path / "log"

    def use() -> None:
        with cache.entry("key", builder(cache, log=log), wait=lambda: None) as (folder, manifest):
            assert (folder / "weights.bin").read_bytes() == b"w" * 10
            assert manifest.files["weights.bin"].num_bytes == 10

    processes = [FORK.Process(target=use) for _ in range(6)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 6
    assert len(log.read_text().split()) == 1
    assert names(cache) == {"key"}


def test_what_a_killed_process_left_is_removed(cache: ProgramCache, tmp_path: Path) -> None:
    started = tmp_path / "started"

    def build_forever(folder: Path) -> None:
        (folder / "weights.bin").write_bytes(b"half")
        started.touch()
        time.sleep(60)

    process = FORK.Process(target=get, args=(cache, "key", build_forever))
    process.start()
    while not started.exists():
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    assert names(cache) == {"key.partial"}
    get(cache, "key", builder(cache))
    assert names(cache) == {"key"}


def test_leftovers_of_other_entries_go_too(cache: ProgramCache) -> None:
    (cache.root / "programs" / "old.partial").mkdir(parents=True)
    (cache.root / "programs" / "old.partial" / "weights.bin").touch()
    get(cache, "key", builder(cache))
    assert names(cache) == {"key"}


def test_a_place_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE", "~nobody-of-this-name/x")
    with pytest.raises(ConfigError, match="TILEWRIGHT_CACHE"):
        ProgramCache.default()


def test_waiting_is_told(cache: ProgramCache, tmp_path: Path) -> None:
    """The other one builds until it is: it would not wait for a busy machine."""
    told: list[str] = []
    log, heard = tmp_path / "log", tmp_path / "heard"

    def build(folder: Path) -> None:
        log.touch()
        while not heard.exists():
            time.sleep(0.01)
        builder(cache)(folder)

    def wait() -> None:
        told.append("waits")
        heard.touch()

    process = FORK.Process(target=get, args=(cache, "key", build), daemon=True)
    process.start()
    while not log.exists():
        time.sleep(0.01)
    with cache.entry("key", never_built, wait=wait):
        pass
    process.join()
    assert told == ["waits"]


def test_a_failing_build_leaves_nothing_and_the_next_one_works(cache: ProgramCache) -> None:
    def fail(folder: Path) -> None:
        (folder / "weights.bin").touch()
        raise CompileError("no")

    with pytest.raises(CompileError, match="no"):
        get(cache, "key", fail)
    assert names(cache) == set()
    get(cache, "key", builder(cache))
    assert names(cache) == {"key"}


def test_the_least_recently_used_entries_make_room(cache: ProgramCache) -> None:
    small = ProgramCache(cache.root, max_bytes=3 * 4000)
    for number, key in enumerate("abc"):
        get(small, key, builder(small, 3000))
        os.utime(small.root / "programs" / key / "manifest.json", (number, number))
    get(small, "a", builder(small, 3000))  # used again: now the newest
    get(small, "d", builder(small, 3000))
    assert names(small) == {"a", "c", "d"}
    get(small, "e", builder(small, 10**6))
    assert "e" in names(small), "the one just made stays, however large"
    assert len(names(small)) == 1


def test_an_entry_in_use_is_not_removed(cache: ProgramCache) -> None:
    small = ProgramCache(cache.root, max_bytes=1)
    with small.entry("a", builder(small), wait=never):
        get(small, "b", builder(small))
        assert names(small) == {"a", "b"}
    get(small, "c", builder(small))
    assert names(small) == {"c"}


@pytest.mark.parametrize("text", ["", "many", "-1", "nan", "1e12"])
def test_a_size_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_CACHE_GB", text)
    with pytest.raises(ConfigError, match=r"TILEWRIGHT_CACHE_GB=.*; allowed: gigabytes"):
        ProgramCache.default()


def test_the_default_cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TILEWRIGHT_CACHE_GB", raising=False)
    assert ProgramCache.default() == ProgramCache(own_cache, int(DEFAULT_GB * 1e9))
    monkeypatch.setenv("TILEWRIGHT_CACHE_GB", "0.5")
    assert ProgramCache.default().max_bytes == 500_000_000


def test_digests_are_remembered_until_the_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, memory = tmp_path / "file", tmp_path / "memory"
    path.write_bytes(b"one")
    first = file_digest(path, memory)
    assert not memory.exists(), "changed just now: another write could look the same"
    real = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: real() + 10**10)
    assert file_digest(path, memory) == first
    (kept,) = memory.iterdir()
    kept.write_text(kept.read_text().replace(first, "f" * 64))
    assert file_digest(path, memory) == "f" * 64, "it is taken from there"
    before = path.stat()
    path.write_bytes(b"two")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file_digest(path, memory) not in (first, "f" * 64)
    for damaged in ("", "[]", "{}", "[[1], 2]", "\x00"):
        kept.write_text(damaged)
        assert len(file_digest(path, memory)) == 64


def test_a_memory_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "memory").touch()
    (tmp_path / "file").write_bytes(b"one")
    assert len(file_digest(tmp_path / "file", tmp_path / "memory")) == 64
    write_whole(tmp_path / "memory" / "below" / "x.json", b"{}")
    write_whole(tmp_path / ("x" * 300), b"{}")
