"""Qwen3: norms of the heads of q and k, on every target, and from both containers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest

from tests import architecture_checks as checks
from tests.tiny import tiny_model
from tests.twins import twin_of
from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.base import check_tensors
from tilewright.models.checkpoints.containers import open_checkpoint
from tilewright.models.config import RopeConfig
from tilewright.models.sources import stored_shapes

SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "untied_with_biases": {
        **{"tie_embeddings": False, "attention_bias": True, "output_bias": True},
        **{"hidden_size": 48, "num_heads": 3, "num_kv_heads": 1, "head_dim": 32},
    },
    "windows": {"windows": (0, 5), "rope": RopeConfig(theta=1e6)},
}


ON_CUDA: dict[str, Any] = {"attention_bias": True, "output_bias": True}
"""For tests/targets/cuda."""


def make(shape: str = "grouped") -> Any:
    return tiny_model(std=0.2, model_type="qwen3", **SHAPES[shape])


def test_a_gguf_with_llama_cpps_names(tmp_path: Path) -> None:
    checks.check_gguf(
        make(), tmp_path / "tiny.gguf", architecture=gguf.MODEL_ARCH.QWEN3, extra=lambda _: None
    )


def test_a_folder_without_the_norms_is_refused(tmp_path: Path) -> None:
    model = make()
    twin = twin_of(model.config, model.checkpoint.tensors)
    kept = {name: each for name, each in twin.state_dict().items() if "q_norm" not in name}
    twin.save_pretrained(tmp_path, state_dict=kept)
    with pytest.raises(CheckpointError, match=r"q_norm\.weight of shape \[16\] is missing"):
        check_tensors(open_checkpoint(tmp_path), stored_shapes(model.module))
