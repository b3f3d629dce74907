"""Folders with a program for every rank are those ranks' own, and refused by any other group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.tiny import precision_of
from tilewright.compiler.artifacts import rank_programs as parts_module
from tilewright.compiler.artifacts.cache import ProgramCache
from tilewright.compiler.artifacts.folder import open_folder, seal_folder
from tilewright.compiler.artifacts.loading import load_program
from tilewright.compiler.artifacts.manifest import Manifest
from tilewright.compiler.artifacts.paths import digest_memory
from tilewright.compiler.artifacts.program import compile_cached, write_program, write_ranks
from tilewright.compiler.driver import compile_model
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.compiled import Compiled, silent
from tilewright.distributed.grouping import Grouping
from tilewright.distributed.parallel import ParallelConfig
from tilewright.errors import CheckpointError, TilewrightError
from tilewright.loading import program as source_module
from tilewright.loading.program import compile_program
from tilewright.loading.source import ModelHandle
from tilewright.options.engine_config import EngineConfig
from tilewright.options.resolve import ResolvedConfig

BFP8 = precision_of("bfp8", "hifi2", embedding="bf16")
TWO = ParallelConfig(2, wire="bf16")
OPTIONS = CompileOptions(max_batch=2, max_context=32, num_threads=1, parallel=TWO)


def written(model: SimpleNamespace, folder: Path, target: str = "null") -> Manifest:
    folder.mkdir()
    manifest = write_ranks(model, BFP8, folder, parallel=TWO, target=target)
    seal_folder(folder, manifest, digest_memory())
    return open_folder(folder, digest_memory())


@pytest.mark.parametrize("target", ["reference", "cpu-native"])
def test_every_rank_loads_what_it_would_compile(
    target: str, model: SimpleNamespace, tmp_path: Path
) -> None:
    manifest = written(model, tmp_path / "out", target)
    for rank in range(2):
        own = replace(OPTIONS, rank=rank)
        direct = compile_model(model, BFP8, target=target, options=own)
        asked = replace(own, parallel=ParallelConfig(2))  # the folder knows how it was dealt
        loaded = load_program(tmp_path / "out", manifest, asked)
        assert graph_text(loaded.graph().graph) == graph_text(direct.graph().graph)
        assert loaded.executable.memory() == direct.executable.memory()
        assert "bf16" in graph_text(loaded.graph().graph)
        loaded.executable.close()
        direct.executable.close()


def test_a_rank_s_part_is_kept_by_what_was_dealt(
    model: SimpleNamespace, cache: ProgramCache, traces: list[object]
) -> None:
    """Found again by the same rank of the same group, and by nobody else."""

    def said(found: Compiled) -> tuple[str, int]:
        weights = found.executable.memory().weights
        found.executable.close()
        return graph_text(found.graph().graph), weights

    def cached(options: CompileOptions) -> tuple[str, int]:
        return said(compile_cached(model, BFP8, cache, target="cpu-native", options=options))

    asked = [replace(OPTIONS, rank=rank) for rank in range(2)]
    first = [cached(each) for each in asked]
    assert len(traces) == 2
    assert [cached(replace(each, max_batch=1)) for each in asked] == first
    assert len(traces) == 2, "loaded"
    direct = [compile_model(model, BFP8, target="cpu-native", options=each) for each in asked]
    assert [said(each) for each in direct] == first
    count = len(traces)
    others = (
        ParallelConfig(),
        ParallelConfig(2, wire="fp32"),
        ParallelConfig(2, wire="bf16", shares=(3, 1)),
    )
    for number, other in enumerate(others, 1):
        cached(replace(OPTIONS, parallel=other))
        assert len(traces) == count + number


def test_a_rank_reads_no_other_rank_s_part(model: SimpleNamespace, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    written(model, folder)
    (folder / "rank_1" / "graph.json").write_bytes(b"{}")
    open_folder(folder, digest_memory())
    with pytest.raises(CheckpointError, match=r"rank_1/graph\.json: not the file"):
        open_folder(folder, digest_memory(), rank=1)


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (ParallelConfig(), "programs of 2 ranks for 1; allowed: --tensor-parallel-size 2"),
        (ParallelConfig(3), "programs of 2 ranks for 3; allowed: --tensor-parallel-size 2"),
        (
            ParallelConfig(2, wire="q80"),
            "--wire q80 with {}, which was compiled with bf16; allowed: without --wire",
        ),
        (
            ParallelConfig(2, shares=(2, 1)),
            "--shares 2,1 with {}, which was compiled with none; allowed: without --shares",
        ),
    ],
)
def test_another_group_is_refused(
    parallel: ParallelConfig, said: str, model: SimpleNamespace, tmp_path: Path
) -> None:
    folder = tmp_path / "out"
    manifest = written(model, folder)
    with pytest.raises(TilewrightError) as caught:
        load_program(folder, manifest, replace(OPTIONS, parallel=parallel))
    assert said.format(folder) in str(caught.value) and "\n" not in str(caught.value)


def test_a_folder_of_other_sources_or_of_one_device_is_refused_before_a_rank_is_started(
    model: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(folder: Path, manifest: Manifest) -> str:
        source = ModelHandle("tiny", "0", 1, 256, model, folder, "checkpoint", manifest=manifest)
        config, two = EngineConfig(use_cache=False), Grouping(TWO)
        choices = ResolvedConfig(
            config=config, path=folder, target="cpu", precision=None, grouping=two
        )
        with pytest.raises(TilewrightError) as caught:
            compile_program(source, choices, OPTIONS, silent)
        return str(caught.value)

    monkeypatch.setattr(source_module, "compile_ranks", lambda *_: pytest.fail("ranks started"))
    manifest = written(model, tmp_path / "two")
    one = tmp_path / "one"
    one.mkdir()
    assert refused(one, write_program(model, BFP8, one, target="null")).startswith(
        f"{one}: a program of one device for 2 ranks; allowed: the checkpoint"
    )
    monkeypatch.setattr(parts_module, "sources_digest", lambda: "f" * 64)
    said = refused(tmp_path / "two", manifest)
    assert "compiled for ranks by sources" in said and "are ffffffffffff here; compile ag" in said
