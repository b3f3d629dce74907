"""Logits of quantized Llamas: those of transformers in float32 with the dequantized values.

Other tests compare these values with the schemes' packages, bit for bit.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.architecture_checks import assert_near
from tests.cli.test_quantized_text import MODELS, PACKAGES, REPEATED, write_case
from tests.grids import WHOLE_GRID
from tests.tiny import prefill, random_tokens
from tilewright.compiler.driver import compile_model
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.models import LoadedModel, load_model
from tilewright.models.checkpoints.huggingface.config import hf_values

CASES = [
    pytest.param(name, marks=[WHOLE_GRID] if name in REPEATED else [])
    for name in (*MODELS, *PACKAGES)
    if name != "gpt-oss MXFP4"  # tests/models/test_gpt_oss.py
]


def logits_of_transformers(model: LoadedModel, tokens: list[int]) -> torch.Tensor:
    config = transformers.LlamaConfig(**hf_values(model.config))
    theirs = transformers.LlamaForCausalLM(config).eval()
    checkpoint: Any = model.checkpoint
    values = {name: checkpoint.get(name) for name in checkpoint.names}
    left_out = theirs.load_state_dict(values, strict=False)
    assert not left_out.unexpected_keys
    assert left_out.missing_keys == (["lm_head.weight"] if config.tie_word_embeddings else [])
    with torch.no_grad():
        return theirs(torch.tensor([tokens])).logits[0].float()


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    model = load_model(write_case(case, tmp_path))
    tokens = random_tokens(9, vocab_size=96)
    expected = logits_of_transformers(model, tokens)
    scale = max(1.0, float(expected.std()))  # random blocks have logits with hundreds
    options = CompileOptions(max_context=32, compute="exact", num_threads=1)
    for target in ("reference", "cpu-native"):
        compiled = compile_model(model, load_precision("stored"), target=target, options=options)
        assert_near(prefill(compiled.executable, tokens) / scale, expected / scale)
        compiled.executable.close()
