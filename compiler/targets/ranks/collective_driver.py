"""Running graphs of ranks up to each collective, independent of the transport.

A running graph yields each collective call and continues with its result. Running all ranks in one
process is the oracle for a process per rank.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from tilewright.compiler import ops
from tilewright.compiler.ops.collectives import GROUPS


@dataclass(frozen=True, slots=True)
class CollectiveCall:
    """A rank's collective call: the overload and its arguments."""

    target: Any
    args: tuple[Any, ...]


def advance(
    graph_module: GraphModule, arguments: Sequence[Any]
) -> Generator[CollectiveCall, Any, Any]:
    """Run a graph on its input values and return its result, as a generator.

    The generator yields the :class:`CollectiveCall` of the next collective, and receives its
    result. A value is freed after its last reader.
    """
    given, values = iter(arguments), dict[Node, Any]()
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":
            values[node] = next(given)
            continue
        args: Any = map_arg(node.args, values.__getitem__)
        if node.op == "output":
            return args[0]
        if node.target in ops.COLLECTIVES:
            values[node] = yield CollectiveCall(node.target, args)
        else:
            values[node] = node.target(*args, **node.kwargs)
        for source in node.all_input_nodes:
            if source.op != "placeholder" and _last_reader(source) is node:
                del values[source]
    raise AssertionError("a graph without an output")


def _last_reader(node: Node) -> Node:
    return max(node.users)


def run_together(programs: Sequence[tuple[GraphModule, Sequence[Any]]]) -> list[Any]:
    """Run all ranks' graphs together, in rank order. Return their results.

    A program is a graph with its input values.
    """
    running = [advance(graph_module, arguments) for graph_module, arguments in programs]
    sent: list[Any] = [None] * len(running)
    with torch.no_grad():
        while True:
            calls, results = [], []
            for rank, each in enumerate(running):
                try:
                    calls.append(each.send(sent[rank]))
                except StopIteration as ended:
                    results.append(ended.value)
            if results:
                assert not calls, "ranks disagree on their exchanges"
                return results
            assert len({call.target for call in calls}) == 1, "ranks disagree on an exchange"
            sent = GROUPS[calls[0].target]([call.args for call in calls])
