"""A tiny model whose checkpoint is a file, and a cache of its own for every test."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import MACHINE_CODE
from tests.tiny import FakeCheckpoint, tiny_model
from tilewright.compiler.artifacts.cache import ProgramCache
from tilewright.utils.files import CACHE_VARIABLE, cache_dir


class FileCheckpoint(FakeCheckpoint):
    """Tensors in memory, and one file that stands for them."""

    def __init__(self, path: Path, checkpoint: FakeCheckpoint) -> None:
        super().__init__(checkpoint.tensors)
        self.path = path
        self.files = (path,)
        path.write_bytes(b"weights" * 100)

    def content_hash(self) -> str:
        return "c" * 64


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where `cache_dir` points to during a test; machine code is not compiled anew for each."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for name in MACHINE_CODE:
        if (shared := cache_dir() / name).is_dir():
            (folder / name).symlink_to(shared)
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def cache(own_cache: Path) -> ProgramCache:
    return ProgramCache(own_cache, max_bytes=10**9)


@pytest.fixture
def model(tmp_path: Path) -> SimpleNamespace:
    """One layer, with weights large enough for formats to differ."""
    found = tiny_model(num_layers=1, std=0.2)
    found.checkpoint = FileCheckpoint(tmp_path / "model.file", found.checkpoint)
    return found


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Grows by one whenever a model's graph is asked for, which only compiling does."""
    import tilewright.compiler.driver

    seen: list[object] = []
    trace: Callable[..., object] = tilewright.compiler.driver.trace_model

    def counted(model: object) -> object:
        seen.append(model)
        return trace(model)

    monkeypatch.setattr(tilewright.compiler.driver, "trace_model", counted)
    return seen
