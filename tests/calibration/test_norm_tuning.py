"""Gradients of tuned norms, against torch's on the whole graph, and on further architectures."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.fx import Node

from tests.tiny import precision_of, tiny_model
from tilewright.compiler.calibration.forward import LayeredForward
from tilewright.compiler.calibration.norm_tuning import _TuningRun, tune_norms
from tilewright.compiler.driver import lower_model, resolve_precision, weight_source
from tilewright.compiler.ir.recipe import load_dense, load_values
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.pipeline import MATCH, PRECISION

LENGTH = 8


def forward_of(
    model: SimpleNamespace, precision: str, load: Callable[..., Tensor]
) -> LayeredForward:
    resolved = resolve_precision(model, precision_of(precision))
    graph_module, _ = lower_model(model, resolved, (MATCH, PRECISION), silent)
    tokens_ST = torch.randint(0, 61, (4, LENGTH), generator=torch.Generator().manual_seed(0))
    source = weight_source(model, model.config.max_positions)
    return LayeredForward(
        graph_module, source, tokens_ST, torch.device("cpu"), weight_of=load, exact=True
    )


def test_gradients_are_those_of_the_whole_graph() -> None:
    model = tiny_model(num_layers=3, std=0.3)
    forward = forward_of(model, "bfp4", load_values)
    run = _TuningRun(forward)
    group = forward.groups[0]
    wanted_TC = torch.randn(4 * LENGTH, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
    wanted_VC = run._head_VC
    run.set_gradients(group, wanted_TC, wanted_VC)
    own_gradients = [gain.grad for gain in run.gains.values()]

    values: dict[Node, Tensor] = dict(group)
    hidden: list[Tensor] = []
    head = forward.segments[-1].products[-1]
    for index, segment in enumerate(forward.segments):
        values = forward.step(
            segment,
            run._scaled(index),
            values,
            lambda node, arguments: hidden.append(arguments[0]) if node is head else None,
            skip=frozenset({head}),
            has_gradients=True,
        )
    logits = hidden[0].bfloat16().float() @ wanted_VC.float().T
    wanted = (wanted_TC.float() @ wanted_VC.float().T).log_softmax(-1)
    loss = (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1).mean()
    gradients = torch.autograd.grad(loss, list(run.gains.values()))
    assert len(own_gradients) == 2 * 3 + 1
    for own, other in zip(own_gradients, gradients, strict=True):
        assert own is not None
        assert torch.allclose(own, other, atol=2e-2 * float(other.abs().max()))


@pytest.mark.parametrize("model_type", ["qwen3", "gemma3_text", "qwen3_moe"])
def test_norms_of_other_architectures_are_tuned(model_type: str) -> None:
    model = tiny_model(model_type=model_type, num_layers=2, std=0.3)
    student, original = (
        forward_of(model, name, load)
        for name, load in (("bfp4", load_values), ("bf16", load_dense))
    )
    tuned = tune_norms(student, original, silent)
    assert tuned and all(bool(values.isfinite().all()) for values in tuned.values())
    names = {name for name in model.checkpoint.names if "norm" in name}
    assert set(tuned) == names
    for name, values in tuned.items():
        before = model.checkpoint.get(name).float()
        assert values.shape == before.shape and not torch.equal(values, before)
        assert torch.allclose(values, before, atol=0.2)
