"""Llama 3.2 Vision as a text model: layer numbers, embedding and head, on every target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import architecture_checks as checks
from tests.tiny import compiled, precision_of, prefill, random_tokens, tiny_model
from tests.twins import Twin, twin_of
from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.base import check_tensors
from tilewright.models.checkpoints.containers import open_checkpoint
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.shapes import SHAPES as NAMED
from tilewright.models.shapes import ShapeName, shape_config
from tilewright.models.sources import stored_shapes

SHAPES: dict[str, dict[str, Any]] = {
    "untied": {"tie_embeddings": False},
    "tied": {"tie_embeddings": True, "cross_layers": (0, 1, 4)},
}
VISION: dict[str, Any] = {
    **{"hidden_size": 32, "num_hidden_layers": 4, "num_global_layers": 2, "attention_heads": 4},
    **{"intermediate_size": 64, "image_size": 28, "patch_size": 14, "vision_output_dim": 96},
    **{"intermediate_layers_indices": [0, 2]},
}


class MllamaWithCrossLayers(transformers.MllamaForCausalLM):
    """transformers' text model. Cross layers that ours skips keep their random values."""

    def load_state_dict(self, tensors: Any, strict: bool = True) -> Any:
        own = self.state_dict()
        own["lm_head.weight"] = tensors["model.embed_tokens.weight"][: self.vocab_size]
        found = super().load_state_dict({**own, **tensors}, strict=strict)
        if "lm_head.weight" not in tensors:
            found.missing_keys.append("lm_head.weight")
        return found


def _changes(config: Any) -> dict[str, Any]:
    total = config.num_layers + len(config.cross_layers)
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    cross = {"num_hidden_layers": total, "cross_attention_layers": list(config.cross_layers)}
    return {**special, **cross}


TWIN = Twin(transformers.MllamaTextConfig, MllamaWithCrossLayers, _changes)


def make(shape: str = "untied") -> Any:
    sizes = {"hidden_size": 64, "num_layers": 2, "cross_layers": (1, 3), "max_positions": 64}
    return tiny_model(std=0.2, model_type="mllama", **{**sizes, **SHAPES[shape]})


def test_text_logits_equal_conditional_generation(tmp_path: Path) -> None:
    """The whole model with a tower, in both spellings of tensor names."""
    model = make()
    whole = _save_whole(model, tmp_path / "old")
    tokens = random_tokens(9)
    with torch.no_grad():
        expected = whole(torch.tensor([tokens])).logits[0]
    assert torch.equal(checks.their_logits(model, tokens), expected)
    _rename(tmp_path / "old", tmp_path / "new")
    for name in ("new", "old"):
        checkpoint = open_checkpoint(tmp_path / name)
        check_tensors(checkpoint, stored_shapes(model.module))
        for key, tensor in model.checkpoint.tensors.items():
            assert torch.equal(checkpoint.get(key), tensor)


def _save_whole(model: Any, folder: Path) -> Any:
    theirs = twin_of(model.config, model.checkpoint.tensors)
    config = transformers.MllamaConfig(vision_config=VISION, text_config=theirs.config.to_dict())
    whole: Any = transformers.MllamaForConditionalGeneration(config).eval()
    whole.model.language_model.load_state_dict(theirs.model.state_dict())
    whole.lm_head.load_state_dict(theirs.lm_head.state_dict())
    whole.save_pretrained(folder)
    return whole


def _rename(source: Path, folder: Path) -> None:
    """Copy a folder with the names that transformers has in memory. It saves the older names."""
    folder.mkdir()
    prefixes = {
        "language_model.model.": "model.language_model.",
        "language_model.lm_head.": "lm_head.",
    }
    prefixes |= {name: f"model.{name}" for name in ("vision_model.", "multi_modal_projector.")}
    renamed = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        prefix = next(each for each in prefixes if name.startswith(each))
        renamed[prefixes[prefix] + name.removeprefix(prefix)] = tensor
    save_file(renamed, folder / "model.safetensors")
    (folder / "config.json").write_text((source / "config.json").read_text())


def test_both_spellings_in_a_folder_are_refused(tmp_path: Path) -> None:
    _save_whole(make(), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    norm = tensors["language_model.model.norm.weight"].clone()
    save_file({**tensors, "model.language_model.norm.weight": norm}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is in model\.safetensors too"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("layers", [[3, 1], [0, 1, 2, 3], [4], [1, 1], "1", [True]])
def test_cross_layers_out_of_order_are_refused(layers: object) -> None:
    values = json.loads(json.dumps(dict(NAMED["llama-3.2-11b"])))
    values |= {"num_hidden_layers": 4, "cross_attention_layers": layers}
    with pytest.raises(CheckpointError, match=r"cross_attention_layers = .* allowed: an ascending"):
        config_of_hf(values, where="config.json")


@pytest.mark.parametrize("name, like", [("11b", "3.1-8b"), ("90b", "3.1-70b")])
def test_named_shapes_are_llamas_without_cross_layers(name: str, like: str) -> None:
    ours, llama = (shape_config(ShapeName(f"llama-{each}")) for each in (f"3.2-{name}", like))
    sizes = ("num_layers", "hidden_size", "intermediate_size", "num_heads", "rope", "vocab_size")
    assert [getattr(ours, size) for size in sizes] == [getattr(llama, size) for size in sizes]


def test_text_is_emulated_on_a_board() -> None:
    model, tokens = make(), random_tokens(9)
    precision = precision_of("bfp8", embedding="bf16")
    expected = prefill(compiled(model), tokens)
    got = prefill(compiled(model, "n150", compute="fast", precision=precision), tokens)
    assert 0 < (got - expected).std() / expected.std() < 0.1
