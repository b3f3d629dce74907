"""Memory of the forward by layers."""

from __future__ import annotations

import torch

from tests.tiny import precision_of, tiny_model
from tilewright.compiler.calibration.forward import LayeredForward
from tilewright.compiler.driver import lower_model, resolve_precision, weight_source
from tilewright.compiler.targets.interface.compiled import silent
from tilewright.compiler.targets.pipeline import MATCH, PRECISION


def test_layered_forward_keeps_no_values_of_finished_layers() -> None:
    model = tiny_model(num_layers=5)
    precision = resolve_precision(model, precision_of("bf16"))
    graph_module, _ = lower_model(model, precision, (MATCH, PRECISION), silent)
    tokens_ST = torch.randint(0, 61, (2, 8), generator=torch.Generator().manual_seed(0))
    source = weight_source(model, model.config.max_positions)
    forward = LayeredForward(graph_module, source, tokens_ST, torch.device("cpu"))
    counts = []
    for segment in forward.segments:
        weights = forward.load(segment)
        list(forward.run(segment, weights, lambda *_: None, skip=frozenset()))
        counts.append(len(forward.groups[0]))
    assert len(set(counts[1:-2])) == 1  # the same values after each layer but the last
    assert counts[-1] <= 2  # the outputs
