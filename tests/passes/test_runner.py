"""The runner: reports, dumps, dead code, dead weights, lint and verification."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.fx import GraphModule

from tests.tiny import context_of, lowered, tiny_model
from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import emit, find_calls
from tilewright.compiler.ir.text import graph_text
from tilewright.compiler.passes.match_calls import match_calls
from tilewright.compiler.passes.match_swiglu import match_swiglu
from tilewright.compiler.passes.runner import (
    PassContext,
    graph_pass,
    numerics_changing_pass,
    run_passes,
)
from tilewright.errors import ConfigError


@pytest.fixture
def graph() -> tuple[GraphModule, PassContext]:
    return lowered(tiny_model(num_layers=1), until="match_calls")


def test_reports_tell_what_each_pass_did(graph: tuple[GraphModule, PassContext]) -> None:
    graph_module, ctx = graph
    ctx.reports.clear()
    run_passes(graph_module, [match_calls, match_swiglu], ctx)
    first, second = ctx.reports
    assert (first.name, first.num_rewrites) == ("match_calls", 9)
    assert first.op_changes == {
        "aten.embedding.default": -1,
        "aten.linear.default": -8,
        "embedding": 1,
        "linear": 8,
    }
    assert second.op_changes == {"aten.mul.Tensor": -1, "aten.silu.default": -1, "swiglu": 1}
    assert first.seconds > 0


def test_dumps_are_numbered_and_named(
    graph: tuple[GraphModule, PassContext], tmp_path: Path
) -> None:
    graph_module, ctx = graph
    ctx.reports.clear()
    ctx.dump_dir = tmp_path
    run_passes(graph_module, [match_calls], ctx)
    run_passes(graph_module, [match_swiglu], ctx)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["01_match_calls.txt", "02_match_swiglu.txt"]
    assert (tmp_path / names[1]).read_text(encoding="utf-8") == graph_text(graph_module.graph)


def test_a_dump_that_cannot_be_written_is_refused(
    graph: tuple[GraphModule, PassContext], tmp_path: Path
) -> None:
    graph_module, ctx = graph
    ctx.reports.clear()
    ctx.dump_dir = tmp_path
    (tmp_path / "01_match_calls.txt").mkdir()
    with pytest.raises(ConfigError, match=r"01_match_calls\.txt: the dump cannot be written"):
        run_passes(graph_module, [match_calls], ctx)


def test_dead_nodes_and_dead_weights_go_and_inputs_stay(
    graph: tuple[GraphModule, PassContext],
) -> None:
    graph_module, ctx = graph

    @graph_pass
    def cut_the_head(graph_module: GraphModule, ctx: PassContext) -> int:
        output = next(node for node in graph_module.graph.nodes if node.op == "output")
        table = next(n for n in graph_module.graph.nodes if n.op == "call_function")
        output.args = (table,)
        return 1

    run_passes(graph_module, [cut_the_head], ctx)
    left = [info(node).fqn or str(node.target) for node in graph_module.graph.nodes]
    assert left == [
        "tokens",
        "positions",
        "model.embed_tokens.weight",
        "model.embed_tokens",
        "output",
    ]
    assert cut_the_head.name == "cut_the_head"


def test_a_broken_graph_is_found_at_once(graph: tuple[GraphModule, PassContext]) -> None:
    graph_module, ctx = graph

    @graph_pass
    def use_before_definition(graph_module: GraphModule, ctx: PassContext) -> int:
        products = find_calls(graph_module.graph, torch.ops.aten.linear.default)
        late = emit(products[-1], ops.linear, products[-1].args[:2])
        products[0].args = (late, products[0].args[1])
        return 1

    with pytest.raises(RuntimeError, match="before it has been defined"):
        run_passes(graph_module, [use_before_definition, match_calls], ctx)


def test_verification_runs_after_the_stage(graph: tuple[GraphModule, PassContext]) -> None:
    graph_module, ctx = graph
    seen: list[int] = []

    def verify(after: GraphModule) -> None:
        seen.append(len(find_calls(after.graph, ops.linear)))

    run_passes(graph_module, [match_calls], ctx, verify=verify)
    assert seen == [8]


def test_passes_are_named_after_their_functions() -> None:
    @numerics_changing_pass
    def round_something(graph_module: GraphModule, ctx: PassContext) -> int:
        return 3

    graph_module = GraphModule(torch.nn.Module(), torch.fx.Graph())
    assert (round_something.name, round_something.changes_numerics) == ("round_something", True)
    assert round_something(graph_module, context_of(tiny_model())) == 3
