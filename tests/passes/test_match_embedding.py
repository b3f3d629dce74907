"""Only a look-up in a table is an embedding."""

from __future__ import annotations

from torch import Tensor

from tests.tiny import context_of, function_graph
from tilewright.compiler import ops
from tilewright.compiler.ir.rewrite import find_calls
from tilewright.compiler.passes.match_embedding import match_embedding


def test_another_way_to_pick_rows_is_left_alone() -> None:
    def pick(x: Tensor, positions: Tensor, table: Tensor) -> Tensor:
        return x + table.index_select(0, positions)

    graph_module, model = function_graph(pick, table=(256, 32))
    assert match_embedding(graph_module, context_of(model)) == 1, "the helper's own embedding"
    (found,) = find_calls(graph_module.graph, ops.embedding)
    assert [str(node.target) for node in found.all_input_nodes] == ["tokens", "embed_weight"]
