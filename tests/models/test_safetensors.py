"""Hugging Face folders: exact values, shards, tied heads, and files that lie."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from safetensors.torch import load_file, save_file

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.base import check_tensors
from tilewright.models.checkpoints.huggingface.checkpoint import SafetensorsCheckpoint

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path, make_llama: Callable[..., Any]) -> Path:
    make_llama().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def change_config(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    values.update(changes)
    kept = {key: value for key, value in values.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))


def expected_shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(weight.shape) for name, weight in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_tensor_as_stored(
    dtype: torch.dtype, tmp_path: Path, make_llama: Callable[..., Any]
) -> None:
    model = make_llama(tie_word_embeddings=False, attention_bias=True).to(dtype)
    model.save_pretrained(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    check_tensors(checkpoint, expected_shapes(model))
    names = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    for name, weight in model.named_parameters():
        got = checkpoint.get(name)
        assert got.dtype == dtype and torch.equal(got, weight)
        meta = checkpoint.names[name]
        assert (meta.dtype, meta.nbytes) == (names[dtype], weight.nbytes)
    name = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(checkpoint.get(name, slice(5, 9)), checkpoint.get(name)[5:9])
    assert torch.equal(checkpoint.get(name, slice(-3, None)), checkpoint.get(name)[-3:])
    assert checkpoint.config.attention_bias


def test_what_get_returns_is_not_the_file(folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder)
    checkpoint.get("model.norm.weight").zero_()
    assert checkpoint.get("model.norm.weight").abs().sum() > 0


def test_shards(tmp_path: Path, make_llama: Callable[..., Any]) -> None:
    model = make_llama()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    checkpoint = SafetensorsCheckpoint(tmp_path)
    check_tensors(checkpoint, expected_shapes(model))
    for name, weight in model.named_parameters():
        assert torch.equal(checkpoint.get(name), weight)
    first = checkpoint.content_hash()
    assert first == SafetensorsCheckpoint(tmp_path).content_hash()
    raw = shards[-1].read_bytes()
    shards[-1].write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    assert SafetensorsCheckpoint(tmp_path).content_hash() != first
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=rf"{shards[1].name}: the shard is missing"):
        SafetensorsCheckpoint(tmp_path)


def test_index_must_be_true(tmp_path: Path, make_llama: Callable[..., Any]) -> None:
    make_llama().save_pretrained(tmp_path, max_shard_size="60KB")
    index = json.loads((tmp_path / INDEX).read_text())
    shard = index["weight_map"]["model.norm.weight"]
    cases = {
        f"{shard}: tensor extra.weight, which": {**index["weight_map"], "extra.weight": shard},
        r"allowed: the name of a file": {"a": "../model.safetensors"},
        r"= 3; allowed": {"a": 3},
        "weight_map is missing": {},
    }
    for words, weight_map in cases.items():
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=words):
            SafetensorsCheckpoint(tmp_path)
    (tmp_path / INDEX).write_text("[")
    with pytest.raises(CheckpointError, match="not JSON"):
        SafetensorsCheckpoint(tmp_path)


def test_tied_head(folder: Path) -> None:
    checkpoint = SafetensorsCheckpoint(folder)
    assert checkpoint.config.tie_embeddings and "lm_head.weight" not in checkpoint.names
    with pytest.raises(CheckpointError, match="tied"):
        checkpoint.get("lm_head.weight")


def test_missing_head_is_tied_when_the_configuration_is_silent(folder: Path) -> None:
    change_config(folder, tie_word_embeddings=...)
    assert SafetensorsCheckpoint(folder).config.tie_embeddings


def test_missing_head_is_an_error_when_it_should_not_be_tied(
    folder: Path, make_llama: Callable[..., Any]
) -> None:
    change_config(folder, tie_word_embeddings=False)
    expected = expected_shapes(make_llama(tie_word_embeddings=False))
    with pytest.raises(
        CheckpointError, match=r"lm_head\.weight of shape \[262, 64\] is missing; all"
    ):
        check_tensors(SafetensorsCheckpoint(folder), expected)


def test_a_tied_head_stored_twice(folder: Path) -> None:
    weights = load_file(folder / SINGLE)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / SINGLE)
    assert "lm_head.weight" not in SafetensorsCheckpoint(folder).names
    weights["lm_head.weight"][200, 3] += 1
    save_file(weights, folder / SINGLE)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight differs"):
        SafetensorsCheckpoint(folder)


def test_missing_extra_and_misshaped_tensors(folder: Path, make_llama: Callable[..., Any]) -> None:
    expected = expected_shapes(make_llama())
    weights = load_file(folder / SINGLE)
    norm = weights.pop("model.norm.weight")
    save_file(weights, folder / SINGLE)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight of shape \[64\] is missing"):
        check_tensors(SafetensorsCheckpoint(folder), expected)
    save_file({**weights, "model.norm.weight": norm[:32]}, folder / SINGLE)
    with pytest.raises(CheckpointError, match=r"has shape \[32\]; allowed: \[64\], by"):
        check_tensors(SafetensorsCheckpoint(folder), expected)
    extra = {"model.norm.weight": norm, "model.odd": norm.clone(), "model.odder": norm.clone()}
    save_file({**weights, **extra}, folder / SINGLE)
    with pytest.raises(CheckpointError, match=r"model\.odd of shape \[64\] and 1 more"):
        check_tensors(SafetensorsCheckpoint(folder), expected)
    ignored = {"model.norm.weight": norm, "model.layers.0.self_attn.rotary_emb.inv_freq": norm + 1}
    save_file({**weights, **ignored}, folder / SINGLE)
    check_tensors(SafetensorsCheckpoint(folder), expected)


def test_refused_type(folder: Path) -> None:
    weights = load_file(folder / SINGLE)
    weights["model.norm.weight"] = weights["model.norm.weight"].double()
    save_file(weights, folder / SINGLE)
    with pytest.raises(
        CheckpointError, match=r"norm\.weight has type F64.*allowed: F32, F16, BF16"
    ):
        SafetensorsCheckpoint(folder)


def test_no_weights_and_other_names(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "other.safetensors")
    assert len(SafetensorsCheckpoint(folder).names) == 20
    (folder / "other.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has 0 \.safetensors files"):
        SafetensorsCheckpoint(folder)


def test_truncation_anywhere_is_an_error(folder: Path) -> None:
    raw = (folder / SINGLE).read_bytes()
    header = 8 + int.from_bytes(raw[:8], "little")
    for length in [*range(0, 24), *range(24, header + 8, 31), header, len(raw) // 2, len(raw) - 1]:
        (folder / SINGLE).write_bytes(raw[:length])
        with pytest.raises(CheckpointError) as caught:
            SafetensorsCheckpoint(folder)
        assert "\n" not in str(caught.value) and SINGLE in str(caught.value)


def problem(folder: Path) -> str:
    """Read all there is in a folder; the message of what is wrong with it, or nothing."""
    try:
        checkpoint = SafetensorsCheckpoint(folder)
        for name in checkpoint.names:
            checkpoint.get(name)
        checkpoint.content_hash()
        check_tensors(checkpoint, {"model.norm.weight": (64,)})
    except CheckpointError as error:
        return str(error)
    return ""


@hypothesis.settings(
    max_examples=150,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(data=st.data())
def test_flipped_bytes_give_values_or_our_errors(data: st.DataObject, folder: Path) -> None:
    original = folder / "original"
    if not original.exists():
        original.write_bytes((folder / SINGLE).read_bytes())
    raw = bytearray(original.read_bytes())
    header = 8 + int.from_bytes(raw[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        raw[data.draw(st.integers(0, header))] = data.draw(st.integers(0, 255))
    (folder / SINGLE).write_bytes(raw)
    assert "\n" not in problem(folder)
