"""SmolLM3: layers without a rotation, on every target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import transformers

from tests import architecture_checks as checks
from tests.tiny import tiny_model
from tests.twins import Twin

ON_CUDA: dict[str, Any] = {"num_layers": 2, "second_layers": (1,)}
SHAPES: dict[str, dict[str, Any]] = {
    "still": {"num_layers": 3, "second_layers": (0, 2)},
    "windowed": {"second_layers": (1,), "windows": (0, 5), "tie_embeddings": False},
}


def _changes(config: Any) -> dict[str, Any]:
    layers = range(config.num_layers)
    rotates = [int(layer not in config.second_layers) for layer in layers]
    changes: dict[str, Any] = {"no_rope_layers": rotates, "pad_token_id": 0, "mlp_bias": False}
    if config.windows:
        changes |= {"use_sliding_window": True, "sliding_window": max(config.windows)}
    return changes


TWIN = Twin(transformers.SmolLM3Config, transformers.SmolLM3ForCausalLM, _changes)


def make(shape: str = "still") -> Any:
    return tiny_model(std=0.2, model_type="smollm3", **SHAPES[shape])


NOT_READ: checks.NotRead = [
    ({"no_rope_layers": [1]}, r"no_rope_layers = \[1\].*a list of 3 of 0, 1"),
    ({"no_rope_layers": [1, 2, 1]}, "no_rope_layers = .*a list of 3 of 0, 1"),
    ({"no_rope_layers": None, "no_rope_layer_interval": 0}, "no_rope_layer_interval = 0"),
    ({"layer_types": ["conv"] * 3}, "layer_types = 'conv'"),
]


def test_a_gguf_with_llama_cpps_names(tmp_path: Path) -> None:
    model = tiny_model(model_type="smollm3", num_layers=8, second_layers=(3, 7))
    checks.check_gguf(
        model,
        tmp_path / "tiny.gguf",
        architecture=gguf.MODEL_ARCH.SMOLLM3,
        extra=lambda writer: None,
        adjacent=True,
    )
