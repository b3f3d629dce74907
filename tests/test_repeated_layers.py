"""A trace with repeated layers equals the trace of all layers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tests.models.test_gemma3_text import make as make_gemma3
from tests.models.test_qwen3_5_moe import make as make_qwen3_5_moe
from tests.tiny import tiny_model
from tilewright.compiler import repeated_layers, tracer
from tilewright.compiler.ir.info import info


def described(graph_module: fx.GraphModule) -> list[tuple[str, ...]]:
    return [
        (node.op, node.name, str(node.target), str(node.args), str(node.kwargs), str(info(node)))
        + ((str(node.meta["val"].shape),) if isinstance(node.meta.get("val"), Tensor) else ())
        for node in graph_module.graph.nodes
    ]


def check_equal(monkeypatch: pytest.MonkeyPatch, module: Any, num_repeated: int) -> None:
    """Compare with the trace of all layers. The first trace repeats ``num_repeated`` calls."""
    counts = []

    def expand(graph: fx.Graph) -> bool:
        calls = [node.target for node in graph.nodes]
        counts.append(calls.count(torch.ops.tilewright_trace.repeat.default))
        return repeated_layers.expand(graph)

    monkeypatch.setattr(tracer, "expand", expand)
    found = described(tracer.trace(module))
    assert counts == [num_repeated]
    monkeypatch.setattr(tracer, "repeated_layers", lambda module: nullcontext())
    assert found == described(tracer.trace(module))


PERIODS: dict[str, Any] = {"model_type": "gemma3_text", "windows": (8, 8, 0, 8, 8, 0)}
MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "llama": (lambda: tiny_model(num_layers=3), 2),
    "biases": (lambda: tiny_model(num_layers=3, model_type="qwen2", attention_bias=True), 2),
    "windows": (lambda: make_gemma3("three_layers"), 1),
    "mixers and experts": (lambda: make_qwen3_5_moe("as_published"), 2),
    "two periods": (lambda: tiny_model(num_layers=6, **PERIODS), 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_graph_is_that_of_all_layers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, num_repeated = MODELS[name]
    check_equal(monkeypatch, make().module, num_repeated)


@dataclass
class Context:
    x: Tensor


GIVEN: list[Tensor] = []


def given() -> Tensor:
    """Return the sum of the called layer's input."""
    return GIVEN[-1]


class Layer(nn.Module):
    """Returns two results."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False, device="meta")
        self.register_buffer("size", torch.ones(1, dtype=torch.int64, device="meta"))
        self.factor, self.uses_size = 1.0, False
        self.context: Any = None
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: Tensor, *, other: Any = None) -> tuple[Tensor, Tensor]:
        y = self.linear(x) * self.factor
        if self.uses_size:
            y = y * self.get_buffer("size").item()
        if isinstance(other, list):
            other = other[0].sum()
        if self.context is given:
            y = y + given()
        if other is not None:
            y = y + (other.x if isinstance(other, Context) else other)
        return x + y, y.unflatten(1, (2, 4)).transpose(1, 2)


class Model(nn.Module):
    """Calls layers with an argument: none, the last result, the first input, or a context."""

    tensor_groups: dict[str, str] = {}  # noqa: RUF012

    def __init__(self, layers: list[Layer], calls: list[tuple[int, str]]) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8, device="meta")
        self.layers, self.calls = nn.ModuleList(layers), calls

    def sources(self) -> dict[str, Any]:
        return {}

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        first = x = self.embed(tokens)
        last = positions.float().unsqueeze(-1)
        for at, argument in self.calls:
            layer: Any = self.layers[at]
            layer.factor = layer.factor + 1.0 if argument == "factor" else layer.factor
            weight = self.get_parameter("layers.0.linear.weight")
            others = {"last": last, "first": first, "context": Context(first), "weight": [weight]}
            GIVEN[:] = [x.sum()]
            x, last = layer(x, other=others.get(argument))
            last = last.transpose(1, 2).view(-1, 8)
        return x + last


CALLS = [(0, ""), (1, ""), (2, "")]
SHARED = nn.SiLU()
TOYS: dict[str, tuple[list[dict[str, Any]], list[tuple[int, str]], int]] = {
    "equal": ([{}] * 3, CALLS, 2),
    "another number": ([{}, {"factor": 2.0}, {}], CALLS, 1),
    "a number of the model": ([{}] * 3, [(at, "factor") for at in range(3)], 2),
    "numbered": ([{"factor": 1.0 + at} for at in range(3)], CALLS, 0),
    "an unknown object": ([{"context": dict}, {"context": {}}, {"context": {}}], CALLS, 0),
    "another argument": ([{}] * 3, [(0, ""), (1, "last"), (2, "last")], 1),
    "called twice": ([{}] * 2, [(0, ""), (1, ""), (0, "last"), (1, "last"), (0, "")], 3),
    "an argument equal to the input": ([{}] * 3, [(at, "first") for at in range(3)], 1),
    "an argument equal to a weight": ([{}] * 3, [(at, "weight") for at in range(3)], 1),
    "a context": ([{}] * 3, [(at, "context") for at in range(3)], 0),
    "a module of all": ([{"act": SHARED} for _ in range(3)], CALLS, 0),
    "a layer in training": ([{}, {"training": False}, {}], CALLS, 1),
}


@pytest.fixture
def _toys_are_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_layers, "_PURE", ("torch.nn.", "tests."))


@pytest.mark.usefixtures("_toys_are_pure")
@pytest.mark.parametrize("name", TOYS)
def test_layers_and_calls_that_differ_are_traced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attributes, calls, num_repeated = TOYS[name]
    model = Model([Layer(**own) for own in attributes], calls)
    check_equal(monkeypatch, model, num_repeated)


@pytest.mark.usefixtures("_toys_are_pure")
@pytest.mark.parametrize(
    "attributes", [{"uses_size": True}, {"context": given}], ids=["values", "tensors"]
)
def test_layers_that_read_values_or_other_tensors_are_traced(
    attributes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trace with a repeated layer is discarded."""
    layers = [Layer(**attributes), Layer(**attributes)]
    check_equal(monkeypatch, Model(layers, CALLS[:2]), 1)


def test_layers_of_users_are_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may have state that changes."""
    check_equal(monkeypatch, Model([Layer(), Layer()], CALLS[:2]), 0)


@pytest.mark.usefixtures("_toys_are_pure")
def test_a_failing_trace_leaves_the_layers_unchanged() -> None:
    model: Any = Model([Layer(), Layer(linear=nn.Linear(9, 8, device="meta"))], CALLS[:2])
    with pytest.raises(RuntimeError, match="same reduction dim"):
        tracer.trace(model)
    assert not any("forward" in vars(layer) for layer in model.layers)
