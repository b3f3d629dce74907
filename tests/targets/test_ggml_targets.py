"""q40 and q80 weights run as their values wherever no kernel takes their blocks."""

from __future__ import annotations

import pytest
import torch

from tests.tiny import compiled, precision_of, prefill, random_tokens, tiny_model
from tilewright.compiler.precision import PrecisionConfig

NOT_WEIGHTS = {"kv_cache": "fp32", "activation": "fp32", "router": "fp32"}


def ggml_precision(name: str, axis: str = "in") -> PrecisionConfig:
    return precision_of(name, block_axis=axis, **NOT_WEIGHTS)


@pytest.mark.parametrize("name", ["q40", "q80"])
@pytest.mark.parametrize("axis", ["in", "out"])
def test_cpu_exact_is_the_reference(name: str, axis: str) -> None:
    """Rows of 40 and 56 end inside a block of 32."""
    model = tiny_model(std=0.2, hidden_size=40, intermediate_size=56, head_dim=48, vocab_size=131)
    tokens = random_tokens(19, vocab_size=131)
    expected = prefill(compiled(model, precision=ggml_precision(name, axis)), tokens)
    cpu = compiled(model, "cpu", precision=ggml_precision(name, axis))
    torch.testing.assert_close(prefill(cpu, tokens), expected, atol=1e-4, rtol=0)
    cpu.close()


def test_formats_and_axes_differ() -> None:
    """So that the agreement above means something."""
    model = tiny_model(std=0.2)
    tokens = random_tokens(9)
    dense = prefill(compiled(model, precision=precision_of("fp32")), tokens)
    found = {
        (name, axis): prefill(compiled(model, precision=ggml_precision(name, axis)), tokens)
        for name in ("q80", "q40")
        for axis in ("in", "out")
    }
    distance = {key: float((logits - dense).abs().max()) for key, logits in found.items()}
    for axis in ("in", "out"):
        assert 1e-3 < distance["q80", axis] < distance["q40", axis] / 4
    assert not torch.equal(found["q40", "in"], found["q40", "out"])
