"""Folders of random codes: every scheme is read with its type, and finite."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import random_files
from bench.__main__ import main
from tilewright import models
from tilewright.models import shapes
from tilewright.models.checkpoints.base import check_tensors
from tilewright.models.checkpoints.containers import open_checkpoint

SMALL = {
    **shapes.SHAPES["gpt-oss-20b"],
    **{"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 512},
    **{"num_local_experts": 4, "num_attention_heads": 2, "num_key_value_heads": 1},
}

EVEN = {**shapes.SHAPES["tiny"], "hidden_size": 128, "num_attention_heads": 8}


@pytest.mark.parametrize(
    ("shape", "scheme", "name", "label"),
    [
        ("tiny", "fp8", "layers.0.mlp.up_proj.weight", "FP8 128x128"),
        ("even", "int4", "layers.0.mlp.up_proj.weight", "compressed-tensors int4"),
        ("even", "int8", "layers.0.mlp.up_proj.weight", "compressed-tensors int8"),
        ("tiny-moe", "nvfp4", "layers.1.mlp.experts.7.gate_proj.weight", "NVFP4 1x16"),
        ("tiny", "nvfp4", "layers.1.self_attn.q_proj.weight", "NVFP4 1x16"),
        ("small", "mxfp4", "layers.0.mlp.experts.gate_proj.weight", "MXFP4"),
    ],
)
def test_folder_is_read(
    shape: str, scheme: str, name: str, label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = {**shapes.SHAPES, "small": SMALL, "even": EVEN}
    for module in (models, shapes, random_files):
        monkeypatch.setattr(module, "SHAPES", known)
    assert main(["random-files", shape, scheme, str(tmp_path / "m")]) == 0
    checkpoint = open_checkpoint(tmp_path / "m")
    assert checkpoint.stored_type(f"model.{name}") == label
    expected = random_files.load_model(f"shape:{shape}").checkpoint.names
    check_tensors(checkpoint, {name: meta.shape for name, meta in expected.items()})
    assert not checkpoint.notes  # of modules that are dense and not listed
    for each, meta in checkpoint.names.items():
        module = each.removesuffix(".weight")
        is_dense = module.endswith(("embed_tokens", "lm_head", ".mlp.gate", ".mlp.router"))
        if scheme != "mxfp4" and len(meta.shape) == 2:
            assert (checkpoint.stored_type(each) == label) == (not is_dense), each
        values = checkpoint.get(each).float()
        assert bool(values.isfinite().all()) and float(values.abs().max()) <= 1


@pytest.mark.parametrize(
    ("shape", "scheme", "words"),
    [
        ("tiny", "int3", "scheme 'int3'; allowed: fp8, int4, int8"),
        ("tiny", "mxfp4", "mxfp4 files of llama; allowed: gpt_oss"),
    ],
)
def test_unknown_schemes_are_refused_in_a_line(
    shape: str, scheme: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["random-files", shape, scheme, str(tmp_path / "m")]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "m").exists()
