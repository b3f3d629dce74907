"""What holds of every pass of the cpu pipeline, which has all there are.

It fires as often as the model says, keeps the numbers, and gives the golden text; that it leaves
other graphs alone is in the file of its name.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from compiler.ir.text import graph_text
from compiler.passes.runner import Pass, run_passes
from tests.tiny import (
    QWEN2,
    check_golden,
    context_of,
    function_graph,
    lowered,
    pipeline,
    precision_of,
    run_graph,
    step_inputs,
    tiny_model,
)

PASSES = {current.name: current for current in pipeline()}
FOLDER = Path(__file__).parents[2] / "compiler" / "passes"
NUM_LAYERS = 2
DEPENDS_ON_PRECISION = {"merge_parallel_linears": 2 * NUM_LAYERS, "fuse_swiglu_packed": NUM_LAYERS}
WEIGHTS = 1 + 7 * NUM_LAYERS + 1


def test_every_file_is_a_pass_with_a_test_of_its_name() -> None:
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "runner", "dumps"}
    assert files == set(PASSES)
    tests = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert files <= tests


def test_the_reference_pipeline_is_a_part_of_the_cpu_one() -> None:
    reference = [current.name for current in pipeline("reference")]
    assert reference == [name for name in PASSES if name in reference]


@pytest.mark.parametrize("architecture", [{}, QWEN2], ids=["llama", "qwen2"])
@pytest.mark.parametrize("name", PASSES)
def test_it_fires_as_often_as_expected(name: str, architecture: dict[str, Any]) -> None:
    model = tiny_model(num_layers=NUM_LAYERS, **architecture)
    expected = model.module.expected_rewrites() | DEPENDS_ON_PRECISION
    graph_module, ctx = lowered(model, until=name)
    before = graph_text(graph_module.graph)
    count = PASSES[name](graph_module, ctx)
    if name == "canonicalize_graph":
        assert count > 0
    else:
        assert count == (expected | {"assign_precision": WEIGHTS})[name]
    assert graph_text(graph_module.graph) != before


@pytest.mark.parametrize("name", sorted(PASSES.keys() - {"assign_precision", "gather_logit_rows"}))
def test_it_finds_nothing_the_second_time(name: str) -> None:
    """Those two describe a graph anew at every run; pipelines have them once."""
    graph_module, ctx = lowered(tiny_model(), until=name)
    run_passes(graph_module, [PASSES[name]], ctx)
    assert PASSES[name](graph_module, ctx) == 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [name for name in PASSES if name != "canonicalize_graph"])
def test_the_numbers_stay(name: str, bias: bool) -> None:
    """canonicalize_graph is compared with the eager module in its own file."""
    model = tiny_model(attention_bias=bias, output_bias=bias, mlp_bias=bias, std=0.2)
    precision = precision_of("bfp8" if name != "assign_precision" else "fp32")
    graph_module, ctx = lowered(model, until=name, precision=precision)
    inputs = step_inputs(9)
    before = run_graph(graph_module, model, **inputs)
    run_passes(graph_module, [PASSES[name]], ctx)
    after = run_graph(graph_module, model, **inputs)
    assert after.shape == before.shape
    assert before.std() > 0.05
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", PASSES)
def test_the_golden_text(name: str) -> None:
    graph_module, ctx = lowered(tiny_model(), until=name, precision=precision_of("bfp8", "hifi2"))
    run_passes(graph_module, [PASSES[name]], ctx)
    check_golden(f"passes/{name}.txt", graph_text(graph_module.graph))


def test_a_layer_of_the_whole_pipeline() -> None:
    """At most 12 nodes: the gap between a compiler's graph and code written by hand."""
    graph_module, _ = lowered(tiny_model(), precision=precision_of("bfp8", "hifi2"))
    text = graph_text(graph_module.graph, layer=0)
    assert len(text.splitlines()) <= 12
    check_golden("passes/cpu_pipeline_layer.txt", text)


def test_only_assign_precision_changes_numbers() -> None:
    assert [name for name, current in PASSES.items() if current.changes_numerics] == [
        "assign_precision"
    ]
    assert all(isinstance(current, Pass) for current in PASSES.values())


@pytest.mark.parametrize("name", sorted(PASSES.keys() - {"match_embedding", "assign_precision"}))
def test_a_graph_without_a_decoder_is_left_alone(name: str) -> None:
    graph_module, model = function_graph(lambda x, positions: (x + 1).exp() * 2)
    before = graph_text(graph_module.graph)
    assert PASSES[name](graph_module, context_of(model)) == 0
    assert graph_text(graph_module.graph) == before
