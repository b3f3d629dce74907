"""Canonical graphs of plain functions: near-misses, which a pass must leave alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx, nn

from tests.tiny import FakeCheckpoint, context_of, tiny_config
from tilewright.compiler.passes.canonicalize_graph import canonicalize_graph
from tilewright.compiler.passes.runner import run_passes
from tilewright.compiler.tracer import trace


class _Function(nn.Module):
    """``function(x, positions, **weights)`` on embedded tokens ``[T, 32]``, as a model.

    ``inv_freq`` is a buffer, as in models; everything else a parameter.
    """

    tensor_groups: Mapping[str, str] = {}

    def __init__(self, function: Callable[..., Tensor], shapes: dict[str, tuple[int, ...]]) -> None:
        super().__init__()
        self.function = function
        self.embed = nn.Embedding(61, 32)
        self.names = tuple(shapes)
        for name, shape in shapes.items():
            if name == "inv_freq":
                self.register_buffer(name, torch.empty(shape))
            else:
                self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        weights = {name: getattr(self, name) for name in self.names}
        return self.function(self.embed(tokens), positions, **weights)

    def sources(self) -> dict[str, Any]:
        return {}

    def constants(self, max_context: int | None = None) -> dict[str, Tensor]:
        return {}


def function_graph(
    function: Callable[..., Tensor], **shapes: tuple[int, ...]
) -> tuple[fx.GraphModule, SimpleNamespace]:
    """A canonical graph of ``function(x [T, 32], positions [T], **weights)``, and its model.

    For near-misses: graphs that a pass must leave alone.
    """
    with torch.device("meta"):
        module = _Function(function, shapes)
    named = [*module.named_parameters(), *module.named_buffers()]
    tensors = {name: torch.randn(weight.shape) for name, weight in named}
    model = SimpleNamespace(
        name="function", config=tiny_config(), module=module, checkpoint=FakeCheckpoint(tensors)
    )
    graph_module = trace(module)
    run_passes(graph_module, [canonicalize_graph], context_of(model))
    return graph_module, model
