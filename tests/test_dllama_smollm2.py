"""The default model through dllama's files: perplexities of a fixed text.

Measured on the `reference` target: 4.566427 from the GGUF file and from the F32 ``.m`` file;
8.00853 with q40 weights and q80 activations, from the Q40 ``.m`` file and from the GGUF file.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tests.tiny import prefill
from tilewright.compiler.cli import main
from tilewright.compiler.driver import compile_model
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.base import CompileOptions
from tilewright.models import load_model

pytestmark = pytest.mark.weights

TEXT = (
    "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is "
    "Rome. The sun rises in the east and sets in the west. Water freezes at zero degrees Celsius "
    "and boils at one hundred degrees Celsius."
)


ORDER = [*range(17, 49152), 1, 0, *range(2, 17)]
"""Which token of the model each token of the written files is: special ones stand last there."""


def perplexity(path: Path, *, precision: str) -> float:
    """Of TEXT from its second token on, teacher-forced, all in one prefill."""
    model = load_model(path)
    ids = model.tokenizer.encode(TEXT)
    options = CompileOptions(max_batch=1, max_context=64, compute="exact")
    compiled = compile_model(model, load_precision(precision), target="reference", options=options)
    logits = prefill(compiled.executable, ids)
    compiled.executable.close()
    loss = torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:]))
    return math.exp(loss)


@pytest.fixture
def f32(smollm2_path: Path, tmp_path: Path) -> Path:
    assert main(["convert", "-o", str(tmp_path / "f32"), "--weights", "f32"]) == 0
    return tmp_path / "f32"


def test_f32_has_every_weight_of_the_gguf_file(smollm2_path: Path, f32: Path) -> None:
    source, found = load_model(smollm2_path), load_model(f32)
    (file,) = f32.glob("*.m")
    assert file.stat().st_size == 0x88 + 4 * (134_515_008 + 49152 * 576)
    for name in source.checkpoint.names:
        values = source.checkpoint.get(name).float()
        if name == "model.embed_tokens.weight":
            values = values[ORDER]
            assert torch.equal(found.checkpoint.get("lm_head.weight"), values)
        assert torch.equal(found.checkpoint.get(name), values), name
    ids = [ORDER[index] for index in found.tokenizer.encode(TEXT)]
    assert ids == source.tokenizer.encode(TEXT)


@pytest.mark.slow
def test_f32_has_the_perplexity_of_the_gguf_file(smollm2_path: Path, f32: Path) -> None:
    expected = perplexity(smollm2_path, precision="reference")
    assert expected == pytest.approx(4.566427, rel=1e-3)
    assert perplexity(f32, precision="reference") == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_q40_times_q80(smollm2_path: Path, tmp_path: Path) -> None:
    assert main(["convert", "-o", str(tmp_path / "q40")]) == 0
    found = perplexity(tmp_path / "q40", precision="dllama")
    assert found == pytest.approx(8.00853, rel=1e-3)
    assert perplexity(tmp_path / "q40", precision="reference") != pytest.approx(found, rel=1e-3)
    assert perplexity(smollm2_path, precision="dllama") == pytest.approx(found, rel=1e-6)
