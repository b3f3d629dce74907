"""Programs that were kept are those that were compiled, and never those of something else."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.grids import WHOLE_GRID, grid
from tests.tiny import precision_of, prefill, random_tokens
from tilewright.compiler.artifacts import cache as cache_module
from tilewright.compiler.artifacts import program as program_module
from tilewright.compiler.artifacts.cache import ProgramCache
from tilewright.compiler.artifacts.folder import open_folder, seal_folder
from tilewright.compiler.artifacts.loading import load_program
from tilewright.compiler.artifacts.paths import digest_memory, is_compiled
from tilewright.compiler.artifacts.program import compile_cached, write_program
from tilewright.compiler.driver import compile_model
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.compiled import Compiled
from tilewright.compiler.targets.table import target_names
from tilewright.errors import CheckpointError, CompileError, ConfigError, NoRoomError

OPTIONS = CompileOptions(max_batch=2, max_context=32, num_threads=1)
TOKENS = random_tokens(9)
ENTRY_FILES = ["weights.bin", "model.onnx", "graph.json", "manifest.json"]
SAME_CHIP = ("qb2", "p150", "p300")
"""Boards with the chip of p100."""
BFP8 = precision_of("bfp8", "hifi2", embedding="bf16")


def logits_of(compiled: Compiled) -> torch.Tensor:
    logits = prefill(compiled.executable, TOKENS)
    compiled.executable.close()
    return logits


def cached(model: SimpleNamespace, cache: ProgramCache, **changes: Any) -> Compiled:
    asked = {"precision": BFP8, "options": OPTIONS, **changes}
    return compile_cached(model, asked.pop("precision"), cache, **asked)


def entry_of(cache: ProgramCache) -> Path:
    (entry,) = (path for path in (cache.root / "programs").iterdir() if path.is_dir())
    return entry


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(
            name,
            marks=pytest.mark.gpu if name == "cuda" else [WHOLE_GRID] * (name in SAME_CHIP),
        )
        for name in target_names()
        if name not in ("t3k", "tg", "loudbox", "bh-galaxy")  # more chips than heads
    ],
)
def test_a_folder_is_what_was_compiled(
    target: str, model: SimpleNamespace, tmp_path: Path, traces: list[object]
) -> None:
    direct = compile_model(model, BFP8, target=target, options=OPTIONS)
    folder = tmp_path / "out"
    folder.mkdir()
    manifest = write_program(model, BFP8, folder, target=target)
    assert not is_compiled(folder), "the manifest comes last"
    seal_folder(folder, manifest, digest_memory())
    assert is_compiled(folder)
    compiled_so_far = len(traces)
    found = open_folder(folder, digest_memory())
    loaded = load_program(folder, found, OPTIONS)
    assert len(traces) == compiled_so_far
    assert (found.model.name, found.model.num_layers, found.model.max_positions) == ("tiny", 1, 256)
    assert loaded.precision == direct.precision
    assert (loaded.target, loaded.compute, loaded.notes) == (target, "fast", direct.notes)
    assert loaded.executable.contract == direct.executable.contract
    assert loaded.executable.contract.effective_id == direct.executable.contract.effective_id
    assert loaded.executable.memory() == direct.executable.memory()
    assert loaded.executable.capabilities == direct.executable.capabilities
    assert graph_text(loaded.graph().graph) == graph_text(direct.graph().graph)
    assert torch.equal(logits_of(loaded), logits_of(direct))


@pytest.mark.parametrize("target", ["null", "cpu-native"])
def test_a_load_makes_none_of_torch_s_symbols(
    target: str, model: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which take longer to import than all else of a second start."""
    manifest = write_program(model, BFP8, tmp_path, target=target)
    monkeypatch.delattr("torch.fx.experimental.symbolic_shapes.ShapeEnv.create_symbol")
    loaded = load_program(tmp_path, manifest, OPTIONS)
    assert logits_of(loaded).shape[-1] == loaded.executable.vocab_size
    with pytest.raises(CheckpointError, match="create_symbol"):
        loaded.graph()


def test_a_folder_serves_any_batch_and_context(model: SimpleNamespace, tmp_path: Path) -> None:
    manifest = write_program(model, BFP8, tmp_path, compute="exact")
    for options in (CompileOptions(max_batch=7, max_context=256), CompileOptions(max_context=9)):
        loaded = load_program(tmp_path, manifest, options)
        assert loaded.executable.capabilities.max_num_seqs == options.max_batch
        assert loaded.executable.capabilities.max_context == options.max_context
        assert loaded.compute == "exact", "whatever the options say"
        logits_of(loaded)
    with pytest.raises(CompileError, match="the model allows 1 to 256"):
        load_program(tmp_path, manifest, CompileOptions(max_context=257))
    with pytest.raises(ConfigError, match="batch size 0"):
        load_program(tmp_path, manifest, CompileOptions(max_batch=0))


def test_positions_up_to_the_last_are_as_compiled_for_them(
    model: SimpleNamespace, tmp_path: Path
) -> None:
    """The tables of a program reach as far as the model's context."""
    manifest = write_program(model, BFP8, tmp_path)
    options = CompileOptions(max_context=256, num_threads=1)
    tokens = random_tokens(256)
    direct = compile_model(model, BFP8, options=options)
    expected = prefill(direct.executable, tokens)
    assert torch.equal(
        prefill(load_program(tmp_path, manifest, options).executable, tokens), expected
    )


def test_the_second_compilation_is_a_load(
    model: SimpleNamespace, cache: ProgramCache, traces: list[object]
) -> None:
    first = cached(model, cache)
    assert len(traces) == 1
    reads = len(model.checkpoint.reads)
    second = cached(model, cache, options=CompileOptions(max_batch=3, max_context=16))
    assert len(traces) == 1 and len(model.checkpoint.reads) == reads
    direct = compile_model(model, BFP8, options=OPTIONS)
    assert second.precision == direct.precision and second.notes == direct.notes
    assert graph_text(second.graph().graph) == graph_text(direct.graph().graph)
    expected = logits_of(direct)
    assert torch.equal(logits_of(first), expected)
    assert torch.equal(logits_of(second), expected)


def test_equal_settings_share_a_program_and_keep_their_names(
    model: SimpleNamespace, cache: ProgramCache, traces: list[object]
) -> None:
    import dataclasses

    cached(model, cache)
    again = cached(model, cache, precision=dataclasses.replace(BFP8, name="another name"))
    assert len(traces) == 1
    assert again.precision.name == "another name"


@pytest.mark.parametrize(
    "changes",
    [
        {"precision": precision_of("bfp8", "hifi2", ff2="bfp4")},
        {"precision": precision_of("bfp8", "hifi2", block_axis="out")},
        {"options": CompileOptions(max_context=32, compute="exact")},
        {"target": "reference"},
    ],
    ids=["format", "block axis", "compute", "target"],
)
def test_another_choice_is_another_program(
    changes: dict[str, Any], model: SimpleNamespace, cache: ProgramCache, traces: list[object]
) -> None:
    cached(model, cache)
    other = cached(model, cache, **changes)
    assert len(traces) == 2
    asked = {"precision": BFP8, "options": OPTIONS, **changes}
    direct = compile_model(model, asked.pop("precision"), **asked)
    assert torch.equal(logits_of(other), logits_of(direct))


def rewrite_in_place(path: Path, data: bytes) -> None:
    """Other bytes of the same size, with the old modification time."""
    before = path.stat()
    assert len(data) == before.st_size
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_other_weights_are_another_program(
    model: SimpleNamespace, cache: ProgramCache, traces: list[object]
) -> None:
    cached(model, cache)
    data = model.checkpoint.path.read_bytes()
    rewrite_in_place(model.checkpoint.path, data[:350] + b"W" + data[351:])
    model.checkpoint.tensors["model.norm.weight"] *= 2
    changed = cached(model, cache)
    assert len(traces) == 2
    assert torch.equal(logits_of(changed), logits_of(compile_model(model, BFP8, options=OPTIONS)))
    rewrite_in_place(model.checkpoint.path, data)
    cached(model, cache)
    assert len(traces) == 3, "the direct one, and none for the first weights, which are kept"


@pytest.mark.parametrize("name", ["versions", "sources_digest"])
def test_another_version_is_another_program(
    name: str,
    model: SimpleNamespace,
    cache: ProgramCache,
    traces: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cached(model, cache)
    monkeypatch.setattr(cache_module, name, lambda: "another")
    cached(model, cache)
    assert len(traces) == 2


@pytest.mark.parametrize(("damage", "name"), grid([("changed",), ("cut",), ("gone",)], ENTRY_FILES))
def test_a_damaged_entry_is_built_again(
    damage: str,
    name: str,
    model: SimpleNamespace,
    cache: ProgramCache,
    traces: list[object],
) -> None:
    expected = logits_of(cached(model, cache))
    path = entry_of(cache) / name
    data = path.read_bytes()
    if damage == "gone":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        middle = len(data) // 2
        rewrite_in_place(path, data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :])
    assert torch.equal(logits_of(cached(model, cache)), expected)
    assert len(traces) == 2
    cached(model, cache)
    assert len(traces) == 2, "and it is sound again"


def test_an_entry_that_is_no_folder_is_built_again(
    model: SimpleNamespace, cache: ProgramCache, traces: list[object]
) -> None:
    cached(model, cache)
    entry = entry_of(cache)
    shutil.rmtree(entry)
    entry.write_text("no folder")
    cached(model, cache)
    assert len(traces) == 2 and entry.is_dir()


def test_a_cache_without_room_is_done_without(
    model: SimpleNamespace, cache: ProgramCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise NoRoomError(f"{path}: cannot be written (No space left on device)")

    monkeypatch.setattr(program_module, "write_file", full)
    compiled = cached(model, cache)
    assert compiled.notes[0].startswith("the cache has no room: ")
    assert not [path for path in (cache.root / "programs").iterdir() if path.is_dir()]
    logits_of(compiled)


def test_a_checkpoint_that_cannot_be_read_is_one_line(
    model: SimpleNamespace, cache: ProgramCache
) -> None:
    model.checkpoint.path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.file: cannot be read \(No such file"):
        cached(model, cache)


def test_a_checkpoint_that_changes_meanwhile_is_not_kept(
    model: SimpleNamespace, cache: ProgramCache
) -> None:
    def change(what: str, done: int, total: int) -> None:
        if what == "weights":
            model.checkpoint.path.write_bytes(b"other")

    with pytest.raises(CheckpointError, match=r"model\.file: changed while it was compiled"):
        cached(model, cache, progress=change)
    assert not [path for path in (cache.root / "programs").iterdir() if path.is_dir()]


def test_a_compilation_that_fails_leaves_nothing(
    model: SimpleNamespace, cache: ProgramCache
) -> None:
    model.checkpoint.tensors["model.norm.weight"][3] = float("nan")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight' holds NaN or inf"):
        cached(model, cache)
    assert not [path for path in (cache.root / "programs").iterdir() if path.is_dir()]


def test_without_a_usable_cache_a_note_says_so(
    model: SimpleNamespace, tmp_path: Path, traces: list[object]
) -> None:
    (tmp_path / "file").touch()
    unusable = ProgramCache(tmp_path / "file", max_bytes=10**9)
    compiled = cached(model, unusable)
    assert "cannot be used" in compiled.notes[0] and "\n" not in compiled.notes[0]
    assert len(traces) == 1
    assert torch.equal(logits_of(compiled), logits_of(compile_model(model, BFP8, options=OPTIONS)))
