"""Fuses a norm into the linears after it."""

from __future__ import annotations

from typing import Any

from torch.fx import GraphModule, Node

from tilewright.compiler import ops
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.rewrite import emit, find_calls, replace
from tilewright.compiler.passes.runner import PassContext, graph_pass

_PRODUCTS = (ops.linear.overload, ops.fused_linear.overload)


@graph_pass
def fuse_norm_linear(graph_module: GraphModule, ctx: PassContext) -> int:
    """Fuse a norm into its readers if all are linears. Return the norm count.

    Any other reader would still need the norm's result in memory. Each linear gets a copy of the
    norm and retains its metadata.
    """
    count = 0
    for norm in find_calls(graph_module.graph, ops.rms_norm):
        norm_args: tuple[Any, ...] = norm.args
        x, norm_weight, eps = norm_args
        readers = list(norm.users)
        if not readers or not all(_takes_the_norm(reader, norm) for reader in readers):
            continue
        for reader in readers:
            args = ops.FusedArguments.of(reader.args)
            args = args._replace(x=x, norm_weight=norm_weight, eps=eps)
            replace(reader, emit(reader, ops.fused_linear, args, facts=info(reader)))
        graph_module.graph.erase_node(norm)
        count += 1
    return count


def _takes_the_norm(reader: Node, norm: Node) -> bool:
    """Return whether a reader is a linear without a norm and reads this norm only as its ``x``."""
    if reader.target not in _PRODUCTS:
        return False
    args = ops.FusedArguments.of(reader.args)
    return args.norm_weight is None and all(each is not norm for each in args[1:])
