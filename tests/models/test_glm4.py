"""GLM-4-0414: norms around blocks, and adjacent rotation pairs in half a head, on every target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from torch import Tensor

from tests import architecture_checks as checks
from tests.tiny import tiny_model
from tests.twins import Twin
from tilewright.models.checkpoints.containers import open_checkpoint
from tilewright.models.config import RopeConfig

HEAD_DIM, ROTATED = 32, 16
ROPE = {"rope": RopeConfig(10000.0, num_rotated=ROTATED), "head_dim": HEAD_DIM}
ON_CUDA: dict[str, Any] = {**ROPE, "attention_bias": True}
SHAPES: dict[str, dict[str, Any]] = {
    "biased": {"attention_bias": True},
    "plain": {"num_layers": 3, "num_kv_heads": 1, "tie_embeddings": False},
}


def adjacent(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of a file: rotation pairs of q and k are neighbors."""
    theirs = dict(tensors)
    for name, tensor in tensors.items():
        if ".q_proj." in name or ".k_proj." in name:
            heads = tensor.unflatten(0, (-1, HEAD_DIM))
            pairs = heads[:, :ROTATED].unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
            theirs[name] = torch.cat((pairs, heads[:, ROTATED:]), dim=1).flatten(0, 1)
    return theirs


def _changes(config: Any) -> dict[str, Any]:
    return {"attention_bias": config.attention_bias, "pad_token_id": 0, "eos_token_id": 1}


TWIN = Twin(transformers.Glm4Config, transformers.Glm4ForCausalLM, _changes, adjacent)


def make(shape: str = "biased") -> Any:
    return tiny_model(std=0.2, model_type="glm4", **{**ROPE, **SHAPES[shape]})


def test_slices_of_reordered_rows_are_those_of_the_whole_tensor(tmp_path: Path) -> None:
    checks.check_folder(make(), tmp_path / "tiny")
    checkpoint = open_checkpoint(tmp_path / "tiny")
    name = "model.layers.1.self_attn.q_proj"
    whole, bias = (checkpoint.get(f"{name}.{kind}") for kind in ("weight", "bias"))
    part = checkpoint.get(f"{name}.weight", slice(13, 41), slice(3, 20))
    assert torch.equal(part, whole[13:41, 3:20])
    assert torch.equal(checkpoint.get(f"{name}.bias", slice(13, 41)), bias[13:41])


def test_a_gguf_with_llama_cpps_names(tmp_path: Path) -> None:
    checks.check_gguf(
        make(),
        tmp_path / "tiny.gguf",
        architecture=gguf.MODEL_ARCH.GLM4,
        extra=lambda writer: writer.add_rope_dimension_count(ROTATED),
        adjacent=True,
    )
