"""Qwen3.5's dense models: Gated DeltaNet and gated attention in turns, on every target."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from tests import architecture_checks as checks
from tests.models.test_qwen3_5_moe import SIZES, delta_keys
from tests.tiny import compiled, prefill, random_tokens, tiny_model
from tests.twins import Twin
from tilewright.models.config import DeltaShape

SHAPES: dict[str, dict[str, Any]] = {
    "as_published": {},
    "other_sizes": {
        **{"linear_layers": (False, True), "num_layers": 2, "attention_bias": True},
        **{"output_bias": True, "delta": DeltaShape(4, 4, 8, 16, 2)},
    },
}
ON_CUDA: dict[str, Any] = {
    **{name: size for name, size in SIZES.items() if "expert" not in name},
    **{"num_layers": 2, "linear_layers": (True, False), "intermediate_size": 32},
    **{"delta": DeltaShape(2, 2, 16, 8, 4), "shared_size": 0},
}

TWIN = Twin(transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM, delta_keys)


def make(shape: str = "as_published") -> Any:
    sizes = {name: size for name, size in SIZES.items() if "expert" not in name}
    sizes |= {"shared_size": 0, "intermediate_size": 48}
    return tiny_model(std=0.2, model_type="qwen3_5", **{**sizes, **SHAPES[shape]})


@pytest.mark.parametrize("target", checks.TARGETS)
def test_150_tokens_stay_together(target: str) -> None:
    """In chunks that do not meet those of the delta rule."""
    model, tokens = make(), random_tokens(150)
    expected = checks.their_logits(model, tokens)
    executable = compiled(model, target, max_context=160)
    for sizes in ([], [1] * 149, [63, 2, 70]):
        got = prefill(executable, tokens, sizes)
        torch.testing.assert_close(got, expected, atol=5e-4, rtol=0)
    executable.close()
