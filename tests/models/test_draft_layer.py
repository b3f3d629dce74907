"""Draft layers in folders and GGUF files: names, halves of a tensor, experts, and refusals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import gguf_models as files
from tests.draft_layers import SHARED, tiny_layer
from tests.models.test_experts_folder import saved
from tests.models.test_experts_gguf import make
from tilewright.errors import CheckpointError
from tilewright.models import load_draft_layer, load_model
from tilewright.models.checkpoints.gguf.checkpoint import GGUFCheckpoint
from tilewright.models.checkpoints.huggingface.checkpoint import SafetensorsCheckpoint
from tilewright.models.checkpoints.huggingface.draft_layer import DraftLayerCheckpoint

KINDS = ["qwen3_5", "qwen3_5_moe"]


def with_layer(
    kind: str,
    folder: Path,
    change: Callable[[dict[str, Tensor]], None] = lambda tensors: None,
    **keys: object,
) -> dict[str, Tensor]:
    """Save a tiny model with a draft layer. Return the layer's tensors under the model's names."""
    model = make(kind)
    layer = tiny_layer(model)
    own = {name: each for name, each in layer.checkpoint.tensors.items() if name not in SHARED}
    stored = {name.replace("model.layers.0.", "mtp.layers.0."): each for name, each in own.items()}
    halves = [stored.pop(f"mtp.fc_{part}.weight") for part in ("embedding", "hidden")]
    stored["mtp.fc.weight"] = torch.cat(halves, dim=1)
    change(stored)
    saved(model, folder)
    tensors = {**load_file(folder / "model.safetensors"), **stored}
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors"
    )
    config = json.loads((folder / "config.json").read_text())
    config |= {"mtp_num_hidden_layers": 1, **keys}
    (folder / "config.json").write_text(json.dumps(config))
    found: dict[str, Tensor] = layer.checkpoint.tensors
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_layer_of_a_folder_has_its_tensors(kind: str, tmp_path: Path) -> None:
    expected = with_layer(kind, tmp_path)
    found = DraftLayerCheckpoint(tmp_path)
    assert set(found.names) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found.get(name), tensor), name
    half = "mtp.fc_hidden.weight"
    part = found.get(half, slice(1, 5), slice(2, 9))
    assert torch.equal(part, expected[half][1:5, 2:9]) and found.stored_type(half) == "F32"
    assert not [name for name in SafetensorsCheckpoint(tmp_path).names if "mtp" in name]


def test_a_quantized_folder_may_have_a_dense_draft_layer(tmp_path: Path) -> None:
    method = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    expected = with_layer("qwen3_5", tmp_path, quantization_config=method)
    assert set(DraftLayerCheckpoint(tmp_path).names) == set(expected)


def drop(tensors: dict[str, Tensor]) -> None:
    del tensors["mtp.fc.weight"]


def add(tensors: dict[str, Tensor]) -> None:
    tensors["mtp.layers.1.mlp.gate_proj.weight"] = torch.ones(2, 2)


def narrow(tensors: dict[str, Tensor]) -> None:
    tensors["mtp.fc.weight"] = tensors["mtp.fc.weight"][:, 2:]


@pytest.mark.parametrize(
    ("change", "keys", "words"),
    [
        (drop, {}, "mtp_num_hidden_layers = 1, and no tensor mtp.fc.weight; allowed: a file with"),
        (add, {}, "a second draft layer; allowed: a single layer"),
        (narrow, {}, "mtp.fc_embedding.weight has shape"),
        (None, {"mtp_num_hidden_layers": 2}, "mtp_num_hidden_layers = 2 is not read; allowed: 0"),
        (None, {"mtp_use_dedicated_embeddings": True}, "dedicated_embeddings = true is not read"),
    ],
)
def test_a_wrong_draft_layer_is_an_error_of_a_line(
    change: Callable[[dict[str, Tensor]], None] | None,
    keys: dict[str, object],
    words: str,
    tmp_path: Path,
) -> None:
    with_layer("qwen3_5", tmp_path, change or (lambda tensors: None), **keys)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    model = SimpleNamespace(checkpoint=checkpoint, config=checkpoint.config)
    with pytest.raises(CheckpointError, match=words) as caught:
        load_draft_layer(model)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)


def test_a_model_without_draft_layers_refuses_the_method() -> None:
    with pytest.raises(CheckpointError, match=r'allowed: a folder or a GGUF file .*"mtp"'):
        load_draft_layer(load_model())


NEXTN = {
    "mtp.pre_fc_norm_embedding.weight": "enorm",
    "mtp.pre_fc_norm_hidden.weight": "hnorm",
    "mtp.norm.weight": "shared_head_norm",
}


def gguf_with_layer(
    kind: str, path: Path, dtype: str = "F32", **changed: np.ndarray | None
) -> tuple[SimpleNamespace, dict[str, Tensor]]:
    """Write a tiny model with a draft layer as llama.cpp's converter. Return as `with_layer`."""
    model = make(kind)
    layer, count = tiny_layer(model), model.config.num_layers
    own = {name: each for name, each in layer.checkpoint.tensors.items() if name not in SHARED}
    halves = [own.pop(f"mtp.fc_{part}.weight") for part in ("embedding", "hidden")]
    added: dict[str, np.ndarray | None] = {"eh_proj": torch.cat(halves, dim=1).numpy()}
    added |= {NEXTN[name]: (own.pop(name) + 1).numpy() for name in NEXTN}
    added = {f"blk.{count}.nextn.{name}.weight": each for name, each in (added | changed).items()}
    block = SimpleNamespace(config=layer.config, checkpoint=SimpleNamespace(tensors=own))
    names = gguf.get_tensor_name_map(files.ARCHITECTURES[kind], 1)
    for name, tensor in files.converted(block).items():
        theirs = names.get_name(name, (".weight", ".bias"))
        assert theirs is not None
        added[theirs.replace("blk.0.", f"blk.{count}.")] = tensor.contiguous().numpy()

    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_nextn_predict_layers(1)
        arch = gguf.MODEL_ARCH_NAMES[files.ARCHITECTURES[kind]]
        writer.kv_data[0][f"{arch}.block_count"].value = count + 1

    present = {name: each for name, each in added.items() if each is not None}
    files.write(model, path, kind=dtype, extra=extra, changed=present)
    checkpoint = GGUFCheckpoint(path)
    opened = SimpleNamespace(
        name="m", checkpoint=checkpoint, config=checkpoint.config, tokenizer=None
    )
    return opened, layer.checkpoint.tensors


@pytest.mark.parametrize("kind", KINDS)
def test_a_draft_layer_of_a_gguf_file_has_its_tensors(kind: str, tmp_path: Path) -> None:
    model, expected = gguf_with_layer(kind, tmp_path / "m.gguf")
    layer = load_draft_layer(model)  # type: ignore[arg-type]
    found, config = layer.checkpoint, tiny_layer(make(kind)).config
    assert dataclasses.replace(layer.config, name=config.name) == config
    assert set(found.names) == set(expected)
    for name, tensor in expected.items():
        torch.testing.assert_close(found.get(name), tensor, atol=1e-6, rtol=0)
    half = "mtp.fc_hidden.weight"
    part = found.get(half, slice(1, 5), slice(2, 9))
    assert torch.equal(part, expected[half][1:5, 2:9])


def test_halves_of_a_quantized_gguf_tensor_are_its_blocks(tmp_path: Path) -> None:
    model, _ = gguf_with_layer("qwen3_5", tmp_path / "m.gguf", "Q8_0")
    found = load_draft_layer(model).checkpoint  # type: ignore[arg-type]
    for name in ("mtp.fc_embedding.weight", "mtp.fc_hidden.weight"):
        kind, stored = found.stored(name, slice(1, 4))  # type: ignore[attr-defined]
        values = gguf.quants.dequantize(stored, gguf.GGMLQuantizationType[kind])
        assert kind == "Q8_0" and np.array_equal(values, found.get(name, slice(1, 4)).numpy())
        assert found.stored_type(name) == "F32", "rows narrower than the widest block"


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"eh_proj": None}, r"no tensor blk\.\d+\.nextn\.eh_proj\.weight; allowed: a file with"),
        ({"hnorm": None}, r"mtp\.pre_fc_norm_hidden\.weight of shape .* is missing"),
        (
            {"shared_head_head": np.ones((4, 4), np.float32)},
            r"nextn\.shared_head_head\.weight is not read; allowed: the model's embedding",
        ),
    ],
)
def test_a_wrong_gguf_draft_layer_is_an_error_of_a_line(
    changed: dict[str, np.ndarray | None], words: str, tmp_path: Path
) -> None:
    model, _ = gguf_with_layer("qwen3_5", tmp_path / "m.gguf", **changed)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=words) as caught:
        load_draft_layer(model)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
