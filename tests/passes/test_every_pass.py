"""Checks for all passes in the cpu pipeline and the fused dialect: expected rewrite counts, equal
numbers, and expected rewrites of a layer. A pass's own test file has its near misses.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from tests.expected_rewrites import expected_rewrites
from tests.function_graphs import function_graph
from tests.passes.rewrites import rewrite_text
from tests.tiny import (
    QWEN2,
    check_golden,
    context_of,
    lowered,
    pipeline,
    precision_of,
    run_graph,
    step_inputs,
    tiny_model,
)
from tilewright.compiler import ops
from tilewright.compiler.driver import trace_model
from tilewright.compiler.ir.cost import step_costs
from tilewright.compiler.ir.info import info, set_info
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.ir.serialise import graph_json, read_graph
from tilewright.compiler.ir.text import graph_text, operator_name
from tilewright.compiler.ir.verify import verify_precision
from tilewright.compiler.passes.runner import Pass, PassContext, run_passes
from tilewright.compiler.precision import PrecisionConfig
from tilewright.compiler.targets.table import get_target

CPU = {current.name: current for current in pipeline()}
OF_RANKS = {"shard", "slice_rank", "fuse_all_reduce_add"}
"""What does nothing for one device; all that holds of it is in the file of its name."""
FUSED = {each.name: each for each in pipeline("cuda") if each.name not in OF_RANKS}
PASSES = CPU | FUSED
OF_OTHER_TARGETS = {"round_activations", "merge_qkv"} | OF_RANKS
"""All that holds of it is in the file of its name."""
GOLDEN = {"canonicalize_graph", "match_calls", "assign_precision"}
FOLDER = Path(__file__).parents[2] / "compiler" / "passes"
NUM_LAYERS = 2
DEPENDS_ON_PRECISION = {
    "merge_parallel_linears": 2 * NUM_LAYERS,
    "fuse_swiglu_packed": NUM_LAYERS,
    "fuse_linear_swiglu": NUM_LAYERS,
}
WEIGHTS = 1 + 7 * NUM_LAYERS + 1


def given_to(
    name: str, model: SimpleNamespace, *, precision: PrecisionConfig | None = None
) -> tuple[GraphModule, PassContext]:
    """Return the input graph of a pass from the cpu pipeline or the fused dialect."""
    target = "cpu" if name in CPU else "cuda"
    return lowered(model, until=name, target=target, precision=precision)


def fused(model: SimpleNamespace, *, precision: PrecisionConfig | None = None) -> GraphModule:
    """Return the graph after all verified stages of the fused dialect."""
    graph_module, ctx = trace_model(model), context_of(model, precision)
    for stage in get_target("cuda").stages():
        run_passes(graph_module, stage.passes, ctx, verify=stage.verify)
    return graph_module


def test_every_file_is_a_pass_with_a_test_of_its_name() -> None:
    files = {path.stem for path in FOLDER.rglob("*.py")} - {
        "__init__",
        "runner",
        "dumps",
        "sharding_plan",
    }
    assert files == set(PASSES) | OF_OTHER_TARGETS
    tests = {path.stem.removeprefix("test_") for path in Path(__file__).parent.glob("test_*.py")}
    assert files <= tests


def test_the_reference_pipeline_is_a_part_of_the_cpu_one() -> None:
    reference = [current.name for current in pipeline("reference")]
    assert [name for name in reference if name not in OF_OTHER_TARGETS] == [
        name for name in CPU if name in reference
    ]


@pytest.mark.parametrize("architecture", [{}, QWEN2], ids=["llama", "qwen2"])
@pytest.mark.parametrize("name", PASSES)
def test_it_fires_as_often_as_expected(name: str, architecture: dict[str, Any]) -> None:
    model = tiny_model(num_layers=NUM_LAYERS, **architecture)
    expected = expected_rewrites(model.config) | DEPENDS_ON_PRECISION
    graph_module, ctx = given_to(name, model)
    before = graph_text(graph_module.graph)
    count = PASSES[name](graph_module, ctx)
    if name == "canonicalize_graph":
        assert count > 0
    else:
        assert count == ({"assign_precision": WEIGHTS} | expected).get(name, 0)
    assert (graph_text(graph_module.graph) != before) == (count > 0)


@pytest.mark.parametrize("name", sorted(PASSES.keys() - {"assign_precision", "gather_logit_rows"}))
def test_it_finds_nothing_the_second_time(name: str) -> None:
    """Two passes annotate a graph again at every run. Pipelines run them once."""
    graph_module, ctx = given_to(name, tiny_model())
    run_passes(graph_module, [PASSES[name]], ctx)
    assert PASSES[name](graph_module, ctx) == 0


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", [name for name in PASSES if name != "canonicalize_graph"])
def test_the_numbers_stay(name: str, bias: bool) -> None:
    model = tiny_model(attention_bias=bias, output_bias=bias, mlp_bias=bias, std=0.2)
    precision = precision_of("bfp8" if name != "assign_precision" else "fp32")
    graph_module, ctx = given_to(name, model, precision=precision)
    inputs = step_inputs(9)
    before = run_graph(graph_module, model, **inputs)
    run_passes(graph_module, [PASSES[name]], ctx)
    after = run_graph(graph_module, model, **inputs)
    assert after.shape == before.shape
    assert before.std() > 0.05
    torch.testing.assert_close(after, before, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", sorted(PASSES.keys() - GOLDEN))
def test_the_rewrite_of_a_layer_is_expected(name: str) -> None:
    """Compare `REWRITE` in the pass's test file. Passes for other models change nothing."""
    model = tiny_model(num_layers=1)
    graph_module, ctx = given_to(name, model, precision=precision_of("bfp8", "hifi2"))
    text = graph_text(graph_module.graph)
    run_passes(graph_module, [PASSES[name]], ctx)
    expected = ""
    if ctx.reports[-1].num_rewrites:
        expected = importlib.import_module(f"tests.passes.test_{name}").REWRITE
    assert rewrite_text(text, graph_text(graph_module.graph)) == expected


@pytest.mark.parametrize("name", sorted(GOLDEN))
def test_the_golden_text(name: str) -> None:
    """For passes that rewrite nearly every line."""
    graph_module, ctx = given_to(name, tiny_model(), precision=precision_of("bfp8", "hifi2"))
    run_passes(graph_module, [PASSES[name]], ctx)
    check_golden(f"passes/{name}.txt", graph_text(graph_module.graph))


def test_a_layer_of_the_whole_pipeline() -> None:
    """A layer has at most 12 nodes, close to handwritten code."""
    graph_module, _ = lowered(tiny_model(), precision=precision_of("bfp8", "hifi2"))
    text = graph_text(graph_module.graph, layer=0)
    assert len(text.splitlines()) <= 12
    check_golden("passes/cpu_pipeline_layer.txt", text)


@pytest.mark.parametrize("architecture", [{}, QWEN2], ids=["llama", "qwen2"])
def test_a_decoder_in_the_fused_dialect_is_five_kernels_a_layer(
    architecture: dict[str, Any],
) -> None:
    graph = fused(tiny_model(num_layers=NUM_LAYERS, **architecture)).graph
    calls = [node for node in graph.nodes if node.op == "call_function"]
    products = [["norm"], ["residual"], ["norm", "swiglu"], ["residual"]]
    assert [operator_name(node) for node in calls] == [
        "embedding",
        *["fused_linear", "rope_attention_step", *["fused_linear"] * 3] * NUM_LAYERS,
        "aten.index_select.default",
        "fused_linear",
    ]
    inside = []
    for node in find_calls(graph, ops.fused_linear):
        args = ops.FusedArguments.of(node.args)
        has = {"norm": args.norm_weight, "swiglu": args.swiglu, "residual": args.residual}
        inside.append([name for name, value in has.items() if value not in (None, False)])
    assert inside == [*products * NUM_LAYERS, ["norm"]]


def test_a_fused_product_without_a_fidelity_is_refused() -> None:
    graph_module = fused(tiny_model(num_layers=1))
    verify_precision(graph_module)
    set_info(find_calls(graph_module.graph, ops.fused_linear)[1], compute=None)
    with pytest.raises(AssertionError, match=r"o_proj: no fidelity"):
        verify_precision(graph_module)


def test_a_layer_of_the_fused_dialect() -> None:
    graph_module = fused(tiny_model(), precision=precision_of("bfp8", "hifi2"))
    check_golden("passes/fused_pipeline_layer.txt", graph_text(graph_module.graph, layer=0))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("layers", ["", "*.q_proj: {wqkv: bfp4}, *.up_proj: {ff1_3: bfp4}"])
def test_the_fused_dialect_computes_what_the_reference_does(layers: str, bias: bool) -> None:
    model = tiny_model(attention_bias=bias, output_bias=bias, mlp_bias=bias, std=0.2)
    precision = precision_of("bfp8", layers=layers)
    inputs = step_inputs(9) | {"logit_rows": torch.tensor([8, 0, 3])}
    reference, _ = lowered(model, target="reference", precision=precision)
    expected = run_graph(reference, model, **inputs)
    got = run_graph(fused(model, precision=precision), model, **inputs)
    assert expected.std() > 0.05
    torch.testing.assert_close(got, expected, atol=2e-6, rtol=2e-6)


def test_a_fused_graph_comes_back_from_json_and_costs_the_same() -> None:
    precision = precision_of("bfp8", "hifi2", layers="*.q_proj: {wqkv: bfp4}")
    graph_module = fused(tiny_model(attention_bias=True), precision=precision)
    data = graph_json(graph_module)
    back = read_graph(data, Path("graph.json"))
    assert graph_text(back.graph) == graph_text(graph_module.graph)
    pairs = zip(graph_module.graph.nodes, back.graph.nodes, strict=True)
    assert all(info(one) == info(other) for one, other in pairs)
    assert graph_json(back) == data
    asked = {"num_tokens": 7, "context": 50}
    assert step_costs(back, **asked) == step_costs(graph_module, **asked)


def test_fusing_moves_no_weight_from_its_group() -> None:
    """Operation counts stay equal, except in norms and SwiGLU."""
    model, precision = tiny_model(attention_bias=True), precision_of("bfp8", "hifi2")
    plain, _ = lowered(model, precision=precision)
    asked = {"num_tokens": 7, "context": 50, "num_logits": 2}
    expected = {cost.group: cost for cost in step_costs(plain, **asked)}
    found = {cost.group: cost for cost in step_costs(fused(model, precision=precision), **asked)}
    assert found.keys() == expected.keys()
    other = found.pop("other")
    assert other.weight_bytes == expected.pop("other").weight_bytes == 4 * (2 * NUM_LAYERS + 1) * 32
    assert found == expected


def test_only_assign_precision_changes_numbers() -> None:
    assert [name for name, current in PASSES.items() if current.changes_numerics] == [
        "assign_precision"
    ]
    assert all(isinstance(current, Pass) for current in PASSES.values())


@pytest.mark.parametrize("name", sorted(PASSES.keys() - {"match_calls", "assign_precision"}))
def test_a_graph_without_a_decoder_is_left_alone(name: str) -> None:
    graph_module, model = function_graph(lambda x, positions: (x + 1).exp() * 2)
    before = graph_text(graph_module.graph)
    assert PASSES[name](graph_module, context_of(model)) == 0
    assert graph_text(graph_module.graph) == before
