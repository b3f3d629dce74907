"""Compiled folders that lie: the manifest, the graph, the program and its weights.

Hashes are made anew where they would hide the damage: who wrote the folder can make them too.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings

from tests.fuzz.limits import guarded, guarded_apart
from tests.fuzz.mutations import ODD_VALUES, Mutation, damaged_trees, mutations
from tests.tiny import FakeCheckpoint, precision_of, tiny_model
from tilewright.compiler.artifacts.digests import file_digest
from tilewright.compiler.artifacts.folder import open_folder, seal_folder
from tilewright.compiler.artifacts.loading import load_program
from tilewright.compiler.artifacts.manifest import read_manifest
from tilewright.compiler.artifacts.paths import MANIFEST
from tilewright.compiler.artifacts.program import write_program
from tilewright.compiler.ir.serialise import read_graph
from tilewright.compiler.targets.cpu.onnxruntime.model_file import MODEL, WEIGHTS
from tilewright.compiler.targets.interface.base import CompileOptions

OPTIONS = CompileOptions(max_batch=1, max_context=16, num_threads=1)
GRAPH = "graph.json"
few = settings(max_examples=settings.default.max_examples * 2 // 3)


class HashedCheckpoint(FakeCheckpoint):
    """Tensors in memory that say what they are, as those of a file do."""

    files = (Path("model.gguf"),)

    def content_hash(self) -> str:
        return "c" * 64


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A program of the cpu target, as it was written."""
    folder = tmp_path_factory.mktemp("sound") / "folder"
    folder.mkdir()
    model = tiny_model(num_layers=1)
    model.checkpoint = HashedCheckpoint(model.checkpoint.tensors)
    manifest = write_program(model, precision_of("bfp8", "hifi2"), folder, target="cpu")
    seal_folder(folder, manifest, folder.parent / "memory")
    return folder


@pytest.fixture
def folder(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(sound, tmp_path / "folder"))


def use(folder: Path) -> None:
    manifest = open_folder(folder, folder.parent / "memory")
    compiled = load_program(folder, manifest, OPTIONS)
    compiled.graph()
    compiled.executable.close()


def size_of(folder: Path) -> int:
    return sum(path.lstat().st_size for path in folder.iterdir())


def test_the_sound_folder_is_used(sound: Path) -> None:
    assert guarded_apart(lambda: use(sound), file_size=size_of(sound)) == ""


@pytest.fixture(scope="module")
def manifest_tree(sound: Path) -> Any:
    return json.loads((sound / MANIFEST).read_bytes())


@pytest.fixture(scope="module")
def graph_tree(sound: Path) -> Any:
    return json.loads((sound / GRAPH).read_bytes())


def test_manifests_of_odd_values(sound: Path, manifest_tree: Any, scratch: Path) -> None:
    names = ("../x", "/etc/passwd", "", ".", "a\0b", "\ud800", "a\nb", MANIFEST, "x" * 5000)
    facts = {"num_bytes": 10**10, "sha256": "0" * 64}
    copy = Path(shutil.copytree(sound, scratch / "manifest"))

    @given(tree=damaged_trees(manifest_tree, (*ODD_VALUES, "reference", "exact", facts)))
    @example(tree={**manifest_tree, "target": "nothing"})
    @example(tree={**manifest_tree, "compute": "nothing"})
    @example(tree={**manifest_tree, "format": 2**70})
    @example(tree={**manifest_tree, "files": dict.fromkeys(names, facts)})
    def run(tree: Any) -> None:
        (copy / MANIFEST).write_text(json.dumps(tree))
        guarded_apart(lambda: use(copy), file_size=size_of(copy))

    run()
    for name in names:
        (copy / MANIFEST).write_text(json.dumps({**manifest_tree, "files": {name: facts}}))
        assert guarded_apart(lambda: use(copy), file_size=size_of(copy)), name


def test_graphs_of_odd_values(graph_tree: Any) -> None:
    first = graph_tree["inputs"][0]

    @given(
        tree=damaged_trees(graph_tree, (*ODD_VALUES, {"node": "tokens"}, {"node": "zz"}, [2**62]))
    )
    @example(tree={**graph_tree, "inputs": [{**first, "shape": [2**39, 2**39]}]})
    @example(tree={**graph_tree, "inputs": [{**first, "shape": ["__import__('os')"]}]})
    @example(tree={**graph_tree, "output": "\ud800"})
    def run(tree: Any) -> None:
        data = json.dumps(tree).encode()
        guarded_apart(lambda: read_graph(data, Path("graph.json")), file_size=len(data))

    run()


@few
@given(mutation=mutations())
def test_damaged_graphs(mutation: Mutation, sound: Path) -> None:
    data = mutation((sound / GRAPH).read_bytes())
    guarded_apart(lambda: read_graph(data, Path("graph.json")), file_size=len(data))


@few
@given(mutation=mutations())
def test_damaged_manifests(mutation: Mutation, sound: Path, scratch: Path) -> None:
    data = mutation((sound / MANIFEST).read_bytes())
    (scratch / MANIFEST).write_bytes(data)
    guarded(lambda: read_manifest(scratch), file_size=len(data))


@pytest.mark.parametrize(
    "raw",
    [b"", b"\0", b"\xff", b"[" * 100_000, b'{"format":' * 100_000, b'{"format": 1}', b"9" * 5000],
    ids=lambda raw: f"{raw[:9]!r}-{len(raw)}"[2:],
)
def test_any_other_bytes(raw: bytes, scratch: Path) -> None:
    (scratch / MANIFEST).write_bytes(raw)
    assert guarded(lambda: read_manifest(scratch), file_size=len(raw))
    assert guarded(lambda: read_graph(raw, Path("graph.json")), file_size=len(raw))


@few
@given(mutation=mutations())
def test_damaged_programs(mutation: Mutation, sound: Path, scratch: Path) -> None:
    copy = scratch / "program"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(sound, copy)
    (copy / MODEL).write_bytes(mutation((sound / MODEL).read_bytes()))
    seal_folder(copy, read_manifest(sound), scratch / "memory")
    guarded_apart(lambda: use(copy), file_size=size_of(copy))


@pytest.mark.parametrize("name", [GRAPH, MODEL, WEIGHTS])
@pytest.mark.parametrize("kept", [0, 1, 100])
def test_files_cut_short_and_sealed(name: str, kept: int, folder: Path) -> None:
    (folder / name).write_bytes((folder / name).read_bytes()[:kept])
    seal_folder(folder, read_manifest(folder), folder.parent / "memory")
    assert guarded_apart(lambda: use(folder), file_size=size_of(folder))


def link_to_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [os.mkfifo, link_to_zeros, link_to_itself, Path.mkdir])
@pytest.mark.parametrize("name", [MANIFEST, GRAPH, MODEL, WEIGHTS])
def test_what_is_no_file(name: str, make: Callable[[Path], None], folder: Path) -> None:
    (folder / name).unlink()
    make(folder / name)
    assert guarded_apart(lambda: use(folder), file_size=size_of(folder))


def test_a_pipe_has_no_digest(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(OSError, match="regular"):
        file_digest(tmp_path / "pipe", tmp_path)
