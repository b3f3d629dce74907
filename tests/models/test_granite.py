"""Granite: multipliers of embedding, residual, scores and logits, on every target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import transformers

from tests import architecture_checks as checks
from tests.tiny import tiny_model
from tests.twins import Twin

ON_CUDA: dict[str, Any] = {
    **{"embedding_factor": 3.0, "residual_factor": 0.25},
    **{"score_factor": 0.125, "logit_divisor": 2.0},
}
SHAPES: dict[str, dict[str, Any]] = {
    "factors": ON_CUDA,
    "only_scores": {"score_factor": 0.5, "tie_embeddings": False},
}


def factors(config: Any) -> dict[str, Any]:
    return {
        "embedding_multiplier": config.embedding_factor,
        "residual_multiplier": config.residual_factor,
        "attention_multiplier": config.score_factor,
        "logits_scaling": config.logit_divisor,
    }


TWIN = Twin(transformers.GraniteConfig, transformers.GraniteForCausalLM, factors)


def make(shape: str = "factors") -> Any:
    return tiny_model(std=0.2, model_type="granite", **SHAPES[shape])


NOT_READ: checks.NotRead = [
    ({key: 0.0}, f"{key} = 0.0 is not read; allowed: a number above")
    for key in ("embedding_multiplier", "logits_scaling")
]


def test_a_gguf_with_llama_cpps_names(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_embedding_scale(3.0)
        writer.add_residual_scale(0.25)
        writer.add_attention_scale(0.125)
        writer.add_logit_scale(2.0)

    path = tmp_path / "tiny.gguf"
    architecture = gguf.MODEL_ARCH.GRANITE
    checks.check_gguf(make(), path, architecture=architecture, extra=extra, adjacent=True)
