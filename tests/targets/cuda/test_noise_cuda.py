"""In bf16 every architecture stays as close to its fp32 logits on cuda as transformers does.

Weights are bf16 on both sides; what differs is the arithmetic: transformers keeps activations and
the residual stream in bf16, the kernels round what a product reads and keep the rest in fp32. Every
token has all experts here: which ones it would choose is a matter of chance on either side, in so
small a model.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

from tests.grids import only
from tests.targets.cuda.test_architectures_cuda import SHAPES, SMALL, UNLIKE
from tests.targets.cuda.test_conformance_cuda import on_cuda
from tests.tiny import FakeCheckpoint, precision_of, prefill, random_tokens, tiny_model
from tests.twins import twin_of
from tilewright.compiler.formats import get_format

NUM_SEQUENCES, LENGTH = 2, 8
WITH_A_TWIN = [
    name for name, shape in SHAPES.items() if not all(shape.get("linear_layers", (False,)))
]
"""transformers runs no model without a layer of attention."""
YOUNG = {"olmo3": "5.24"}
"""Older versions of transformers compute another model, by 3 in divergence."""


def divergence(got: Tensor, expected: Tensor) -> float:
    """The mean KL divergence to the fp32 logits, over all positions."""
    wanted = expected.double().log_softmax(-1)
    log_ratio = wanted - got.double().log_softmax(-1)
    return float((wanted.exp() * log_ratio).sum(-1).mean())


@pytest.mark.parametrize("model_type", only(["llama", *UNLIKE[:1]], ["llama", *WITH_A_TWIN]))
def test_it_is_no_noisier_than_transformers(model_type: str) -> None:
    least = Version(YOUNG.get(model_type, "5"))
    if Version(transformers.__version__) < least:
        pytest.skip(f"{model_type} needs transformers {least} or later")
    changes = {"hidden_size": 32, **SMALL, **SHAPES.get(model_type, {})}
    if "linear_layers" not in changes:
        changes |= {"num_layers": 2, "windows": (tuple(changes.get("windows", ())) * 2)[:2]}
    if "swiglu_limit" in changes:
        changes["swiglu_limit"] = 7.0  # older transformers have no other
    if "num_experts" in changes:
        changes["experts_per_token"] = changes["num_experts"]
    model = tiny_model(std=0.2, model_type=model_type, **changes)
    rounded = {
        name: get_format("bf16").round_trip(tensor)
        for name, tensor in model.checkpoint.tensors.items()
    }
    model.checkpoint = FakeCheckpoint(rounded)
    wide, narrow = (twin_of(model.config, rounded).to(t) for t in (torch.float32, torch.bfloat16))
    ours = on_cuda(model, precision_of("bf16"), "fast")
    theirs_off, ours_off = [], []
    for seed in range(NUM_SEQUENCES):
        tokens = random_tokens(LENGTH, seed=seed)
        with torch.no_grad():
            expected, theirs = (each(torch.tensor([tokens])).logits[0] for each in (wide, narrow))
        theirs_off.append(divergence(theirs.float(), expected))
        ours_off.append(divergence(prefill(ours, tokens, [LENGTH - 2, 1]), expected))
    assert sum(theirs_off) > 0
    assert sum(ours_off) <= 1.1 * sum(theirs_off)
