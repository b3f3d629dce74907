"""The default model in dllama files: perplexity on a fixed text, and KL.

Measured on the `reference` target: perplexity 4.566427 from GGUF and from the F32 ``.m`` file. KL
is 0.0042 between q40 weights with q80 activations and an eager model with these roundings. It is
0.0171 without rounding of block outputs.
"""

from __future__ import annotations

import math
from pathlib import Path

import gguf
import pytest
import torch

from tests.tiny import prefill
from tests.twins import twin_of
from tilewright.cli.main import main
from tilewright.compiler.driver import compile_model
from tilewright.compiler.precision import load_precision
from tilewright.compiler.targets.interface.base import CompileOptions
from tilewright.models import LoadedModel, load_model

pytestmark = pytest.mark.weights

TEXT = (
    "The capital of France is Paris. The capital of Germany is Berlin. The capital of Italy is "
    "Rome. The sun rises in the east and sets in the west. Water freezes at zero degrees Celsius "
    "and boils at one hundred degrees Celsius."
)


ORDER = [*range(17, 49152), 1, 0, *range(2, 17)]
"""Which token of the model each token of the written files is: special ones stand last there."""


def logits_of(model: LoadedModel, ids: list[int], *, precision: str) -> torch.Tensor:
    """Return teacher-forced logits for all positions from a single prefill."""
    options = CompileOptions(max_batch=1, max_context=64, compute="exact")
    compiled = compile_model(model, load_precision(precision), target="reference", options=options)
    logits = prefill(compiled.executable, ids)
    compiled.executable.close()
    return logits


def perplexity(path: Path) -> float:
    """Return the perplexity of TEXT from its second token."""
    model = load_model(path)
    ids = model.tokenizer.encode(TEXT)
    logits = logits_of(model, ids, precision="reference")
    loss = torch.nn.functional.cross_entropy(logits[:-1].double(), torch.tensor(ids[1:]))
    return math.exp(loss)


@pytest.fixture
def f32(smollm2_path: Path, tmp_path: Path) -> Path:
    assert main(["convert", "-o", str(tmp_path / "f32"), "--weights", "f32"]) == 0
    return tmp_path / "f32"


@pytest.mark.slow
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
    expected = perplexity(smollm2_path)
    assert expected == pytest.approx(4.566427, rel=1e-3)
    assert perplexity(f32) == pytest.approx(expected, rel=1e-4)


def rounded_to_q80(x: torch.Tensor) -> torch.Tensor:
    """Round with gguf's quantizer."""
    kind = gguf.GGMLQuantizationType.Q8_0
    blocks = gguf.quants.quantize(x.numpy(), kind)
    return torch.from_numpy(gguf.quants.dequantize(blocks, kind))


def eager_logits(model: LoadedModel, ids: list[int], *, outputs: bool) -> torch.Tensor:
    """Return logits of transformers' model with a ``.m`` file and q80 matmul inputs.

    ``outputs``: wo and down also have q80 outputs.
    """
    checkpoint = model.checkpoint
    theirs = twin_of(model.config, {name: checkpoint.get(name) for name in checkpoint.names})
    for name, module in theirs.named_modules():
        if isinstance(module, torch.nn.Linear):
            module.register_forward_pre_hook(lambda _, given: rounded_to_q80(given[0]))
            if outputs and name.endswith(("o_proj", "down_proj")):
                module.register_forward_hook(lambda _, given, result: rounded_to_q80(result))
    with torch.no_grad():
        logits: torch.Tensor = theirs(torch.tensor([ids])).logits[0]
    return logits


def kl(reference: torch.Tensor, other: torch.Tensor) -> float:
    """Return the mean over positions, in nats."""
    ours, theirs = (logits.double().log_softmax(-1) for logits in (reference, other))
    return float((ours.exp() * (ours - theirs)).sum(-1).mean())


@pytest.mark.slow
def test_q40_times_q80(smollm2_path: Path, tmp_path: Path) -> None:
    """Rounding amplifies the order of sums, so perplexity differs between implementations.

    KL detects an additional or missing rounding.
    """
    assert main(["convert", "-o", str(tmp_path / "q40")]) == 0
    model = load_model(tmp_path / "q40")
    ids = model.tokenizer.encode(TEXT)
    found = logits_of(model, ids, precision="dllama")
    figures = [kl(eager_logits(model, ids, outputs=outputs), found) for outputs in (True, False)]
    assert figures[0] < 0.008 < figures[1], figures
