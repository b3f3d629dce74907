"""The text models of Ministral 3 and Mistral Small 3, alone and inside multimodal files."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.tiny import tiny_model
from tests.twins import Twin, twin_of
from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.base import check_tensors
from tilewright.models.checkpoints.containers import open_checkpoint
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.config import RopeConfig, YarnScaling
from tilewright.models.sources import stored_shapes

YARN = RopeConfig(1e6, YarnScaling(16.0, 64, 1.0), query_growth=0.1)
ON_CUDA: dict[str, Any] = {"rope": YARN, "max_positions": 64}


def _changes(config: Any) -> dict[str, Any]:
    return {"max_position_embeddings": 1024, "sliding_window": None}


TWIN = Twin(transformers.Ministral3Config, transformers.Ministral3ForCausalLM, _changes)


SHAPES: dict[str, dict[str, Any]] = {"tied": {}, "untied": {"tie_embeddings": False}}


def make(shape: str = "tied") -> Any:
    return tiny_model(std=0.2, model_type="ministral3", **ON_CUDA, **SHAPES[shape])


def test_the_context_ends_where_queries_begin_to_grow() -> None:
    values = twin_of(make().config).config.to_dict()
    assert values["max_position_embeddings"] == 1024
    config = config_of_hf(values, where="config.json")
    assert config.max_positions == 64 and config.rope == YARN
    values["rope_parameters"] |= {"llama_4_scaling_beta": 0.0}
    assert config_of_hf(values, where="config.json").max_positions == 1024


@pytest.mark.parametrize("prefixes", [("language_model.model.", "language_model."), ()])
@pytest.mark.parametrize("text_type", ["ministral3", "mistral"])
def test_the_text_model_of_a_multimodal_folder(
    text_type: str, prefixes: tuple[str, ...], tmp_path: Path
) -> None:
    """Mistral Small 3 and Ministral 3, with the published names and transformers' own."""
    changes = {"tie_embeddings": False, "model_type": text_type}
    model = make("untied") if text_type == "ministral3" else tiny_model(**changes)
    text = twin_of(model.config, model.checkpoint.tensors)
    text.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    outer, head = prefixes or ("model.language_model.", "")
    renamed = {
        outer + name.removeprefix("model.") if name.startswith("model.") else head + name: tensor
        for name, tensor in tensors.items()
    }
    others = {"vision_tower.patch_conv.weight": torch.zeros(2, 2)}
    save_file(renamed | others, tmp_path / "model.safetensors")
    inner = json.loads((tmp_path / "config.json").read_text())
    values = {"model_type": "mistral3", "text_config": inner, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(values))
    checkpoint = open_checkpoint(tmp_path)
    assert dataclasses.replace(checkpoint.config, name=model.config.name) == model.config
    check_tensors(checkpoint, stored_shapes(model.module))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(checkpoint.get(name), model.checkpoint.tensors[name])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"text_config": None}, "text_config = None .*allowed: an object"),
        ({"text_config": {"model_type": "llama"}}, "text_config.model_type.*mistral, ministral3"),
    ],
)
def test_what_is_not_read(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        config_of_hf({"model_type": "mistral3"} | changes, where="config.json")


def test_growth_of_another_type_is_refused() -> None:
    values = twin_of(make().config).config.to_dict()
    values["rope_parameters"] = {"rope_type": "default", "llama_4_scaling_beta": 0.1}
    with pytest.raises(CheckpointError, match=r"llama_4_scaling_beta = 0\.1"):
        config_of_hf(values, where="config.json")
