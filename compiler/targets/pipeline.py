"""The first stages of every target: from a traced graph to our operators with precision."""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import GraphModule

from tilewright.compiler.ir.verify import (
    check_model,
    head_of,
    verify_lowered,
    verify_precision,
    verify_sharded,
)
from tilewright.compiler.passes.assign_precision import assign_precision
from tilewright.compiler.passes.canonicalize_graph import canonicalize_graph
from tilewright.compiler.passes.gather_logit_rows import gather_logit_rows
from tilewright.compiler.passes.insert_state import insert_state
from tilewright.compiler.passes.match_calls import match_calls
from tilewright.compiler.passes.match_rms_norm import match_rms_norm
from tilewright.compiler.passes.match_rope import match_rope
from tilewright.compiler.passes.match_router import match_router
from tilewright.compiler.passes.match_sigmoid_gate import match_sigmoid_gate
from tilewright.compiler.passes.match_swiglu import match_swiglu
from tilewright.compiler.passes.runner import Pass
from tilewright.compiler.passes.sharding.shard import shard
from tilewright.compiler.passes.sharding.slice_rank import slice_rank
from tilewright.compiler.targets.interface.base import Stage

MATCH = Stage(
    "match",
    (
        canonicalize_graph,
        match_calls,
        match_rms_norm,
        match_rope,
        match_swiglu,
        match_sigmoid_gate,
        match_router,
    ),
    check_model,
)
PRECISION = Stage("precision", (assign_precision,), verify_precision)


SHARD = Stage("shard", (shard,), verify_sharded)
RANK = Stage("rank", (slice_rank,), verify_precision)


def with_ranks(stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """Return the pipeline for a rank's program.

    The graph is sharded and cut to the rank's slice before fusions, while a weight has a single
    role and a single axis to cut.
    """
    names = [stage.name for stage in stages]
    if PRECISION.name not in names:
        return tuple(stages)
    end = names.index(PRECISION.name) + 1
    return (*stages[:end], SHARD, RANK, *stages[end:])


def vocab_size(graph_module: GraphModule) -> int:
    """How many logits a row of the graph's result has."""
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    return int(output.args[0].meta["val"].shape[-1])


def hidden_size(graph_module: GraphModule) -> int:
    """Return the width of the final hidden states; 0 if no product makes the logits."""
    head, _ = head_of(graph_module)
    return 0 if head is None else int(head.args[0].meta["val"].shape[-1])  # type: ignore[union-attr]


def fuse(*passes: Pass) -> Stage:
    """Make the stage of a target's own fusions."""
    return Stage("fuse", passes, verify_precision)


def lower(*passes: Pass) -> Stage:
    """State and the rows that want logits, then the target's own passes on them."""
    return Stage("lower", (insert_state, gather_logit_rows, *passes), verify_lowered)
