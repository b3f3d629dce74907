"""``LLM`` with method ``mtp``: a folder with a draft layer, its formats, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.draft_layers import SHARED, tiny_layer
from tests.images.tiny_vl import save_vl, tiny_vl
from tilewright.cli.commands import bench
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.distributed.grouping import Grouping
from tilewright.distributed.parallel import ParallelConfig
from tilewright.errors import CheckpointError, ConfigError, RequestError
from tilewright.llm import LLM
from tilewright.loading import program
from tilewright.loading.draft import with_draft_layer
from tilewright.models.checkpoints.huggingface.checkpoint import SafetensorsCheckpoint

CONFIG = '{"method": "mtp", "num_speculative_tokens_per_batch_size": [[1, 9, 3]]}'
HOW: dict[str, Any] = {"use_cache": False, "max_num_seqs": 2, "max_model_len": 64, "num_threads": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole model: text, tower, tokenizer and draft layer."""
    path = save_vl(tiny_vl(), tmp_path_factory.mktemp("mtp") / "tiny")
    found = SafetensorsCheckpoint(path)
    shared = {name: found.get(name) for name in SHARED if name in found.names}
    model = SimpleNamespace(config=found.config, checkpoint=SimpleNamespace(tensors=shared))
    own = {
        name.replace("model.layers.0.", "mtp.layers.0."): tensor
        for name, tensor in tiny_layer(model).checkpoint.tensors.items()
        if name not in SHARED
    }
    halves = [own.pop(f"mtp.fc_{half}.weight") for half in ("embedding", "hidden")]
    own["mtp.fc.weight"] = torch.cat(halves, dim=1)
    tensors = load_file(path / "model.safetensors") | own
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors"
    )
    return path


@pytest.mark.parametrize("target", ["reference", "cpu"])
def test_drafts_of_the_layer_change_no_answer(folder: Path, target: str) -> None:
    precision = (
        "precision_cfg = {ff1_3: bf16, ff2: bf16, wqkv: bf16, wo: bf16, lm_head: bf16, "
        "draft_ff1_3: bfp8, draft_lm_head: q80}"
    )
    answers = []
    for config in (None, CONFIG):
        how = {**HOW, "target": target, "precision": precision, "speculative_config": config}
        with LLM(folder, **how) as llm:
            answers.append(llm.generate("abcabc", max_tokens=20, end_tokens=()))
            layer = getattr(llm.compiled.executable, "draft_layer", None)
            refused = llm.generate("abcabc", max_tokens=9, end_tokens=(), speculative=False)
            assert not refused.num_draft_tokens and refused.tokens == answers[0].tokens[:9]
            with pytest.raises(RequestError, match="speculative 0; allowed: True, False"):
                llm.generate("a", speculative=0)
            with pytest.raises(RequestError, match="did you mean 'speculative'"):
                llm.generate("a", speculatif=False)
    assert layer is not None
    assert target == "reference" or layer.executable._engine is None, "closed with the model"
    plain, drafted = answers
    assert drafted.tokens == plain.tokens
    assert drafted.num_draft_tokens >= 20 and not plain.num_draft_tokens


def test_bench_records_the_acceptance_of_the_layer(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(folder), "--target", "reference", "--prompt", "abcabc", "--json"]
    words += ["--max-generated-tokens", "8", "--repeat-batches", "1", "--no-stop-at-eos"]
    words += ["--precision", "bf16", "--no-results", "--speculative-config", CONFIG, "--no-cache"]
    words += ["--explain"]
    assert bench.main(words) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out.strip().rpartition("\n")[2])["drafts"]
    assert "draft_ff2" in printed.err
    assert (found["method"], found["precision"]) == ("mtp", "")
    assert found["num_drafts"] and len(found["num_accepted"]) == 3
    with pytest.raises(ConfigError, match="emulated board: it verifies no drafts; allowed: cpu"):
        bench.main(["n150" if word == "reference" else word for word in words])


def test_a_file_without_the_layer_is_refused(folder: Path, tmp_path: Path) -> None:
    for path in folder.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith("mtp.")}
    save_file(kept, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"= 1, and no tensor mtp\.fc\.weight; allowed: "):
        LLM(tmp_path, speculative_config=CONFIG, target="reference", **HOW)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param("cpu", marks=pytest.mark.slow),
        pytest.param("cuda", marks=pytest.mark.multigpu),
    ],
)
def test_a_layer_on_two_ranks_drafts_on_the_leader(folder: Path, target: str) -> None:
    """Real processes. Drafts change no output."""
    how = {**HOW, "target": target, "tensor_parallel_size": 2}
    answers = []
    for config in (None, CONFIG):
        with LLM(folder, speculative_config=config, **how) as llm:
            answers.append(llm.generate("abcabc", max_tokens=20, end_tokens=()))
    plain, drafted = answers
    assert drafted.tokens == plain.tokens
    assert drafted.num_draft_tokens >= 20 and not plain.num_draft_tokens


def test_the_leader_compiles_with_the_layer_and_sends_a_job_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    jobs = []

    def compile_ranks(job: Any, grouping: object, facts: object, run: Any, **_: object) -> Any:
        jobs.append(job)
        return run(job.options, lambda: None)

    monkeypatch.setattr(program, "compile_ranks", compile_ranks)
    monkeypatch.setattr(program, "compile_alone", lambda _, __, options, report: options)
    monkeypatch.setattr(program, "facts_of", lambda *_: {})
    config = SimpleNamespace(num_heads=4, num_kv_heads=2)
    model = SimpleNamespace(config=config)
    source: Any = SimpleNamespace(manifest=None, path="tiny", checkpoint_model=lambda: model)
    resolved: Any = SimpleNamespace(
        grouping=Grouping(ParallelConfig(tensor=2)),
        target="cuda",
        precision=None,
        config=SimpleNamespace(use_cache=False),
    )
    layer, given = object(), CompileOptions(max_batch=2, max_context=64)
    options = replace(given, draft_layer=layer)
    own: Any = program._compile_ranks(source, resolved, options, silent, ends_process=False)
    assert own.draft_layer is layer and own.parallel == resolved.grouping.parallel
    assert jobs[0].options.draft_layer is None


def test_a_layer_on_ranks_of_the_reference_is_refused_before_compilation() -> None:
    given: Any = SimpleNamespace(grouping=SimpleNamespace(is_alone=False), target="reference")
    with pytest.raises(
        ConfigError, match="method mtp with several ranks; allowed: a single rank, or target cuda"
    ):
        with_draft_layer(given, given, given, given)


def test_a_target_without_draft_layers_decodes_without_drafts(folder: Path) -> None:
    with pytest.warns(UserWarning, match="this target runs no draft layer; decoding goes on"):
        llm = LLM(folder, speculative_config=CONFIG, target="null", **HOW)
    with llm:
        assert not llm.generate("abc", max_tokens=4, end_tokens=()).num_draft_tokens
