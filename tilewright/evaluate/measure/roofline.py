"""Minimum traffic and operations for a step, and a device's time limit for them.

The traffic is by weight, in the target's storage format. Measures nothing.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.fx import GraphModule

from tilewright.compiler.ir.cost import rows_read, step_costs
from tilewright.compiler.ir.info import CONSTANT, info
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.state import PER_TOKEN
from tilewright.compiler.targets.contract.weight_storage import weight_uses
from tilewright.compiler.targets.interface.base import Target, WeightStorage
from tilewright.compiler.targets.interface.compiled import Compiled
from tilewright.compiler.targets.table import get_target
from tilewright.evaluate.results.record import Ceilings

EMBEDDING, OTHER, STATE = "embedding", "other", "state"
"""Parts of a step: table rows; norms, biases and constants; caches. The remaining parts are tensor
groups.
"""
CACHE, MEMORY = "kv_cache", "memory"
"""Kinds for state: keys and values; fixed-size state."""


@dataclass(frozen=True, slots=True)
class TrafficShare:
    """Traffic for a weight, a state or a whole group.

    Attributes:
        formats: Requested formats.
        kinds: The target's storage formats.
        num_weights: Weight count. 0 for state.
        stored: Stored bytes.
        moved: Bytes read by a step, or read and written again.
    """

    group: str
    formats: tuple[str, ...]
    kinds: tuple[str, ...]
    num_weights: int
    stored: float
    moved: float
    is_constant: bool = False


def weight_shares(
    graph_module: GraphModule,
    target: Target,
    *,
    num_tokens: int,
    compute: str,
    count: Callable[[int | None], int] = lambda layer: 1,
) -> Iterator[TrafficShare]:
    """Yield the traffic for every weight use in a step with ``num_tokens`` tokens.

    A weight with several uses is stored and read once. An embedding reads the tokens' rows only.
    Experts count by the expected number selected.

    Args:
        count: Number of model layers that a graph layer represents.

    Raises:
        CompileError: The target does not support a weight.
    """
    seen: set[tuple[WeightRecipe, WeightStorage]] = set()
    read_already: set[WeightRecipe] = set()
    for use in weight_uses(graph_module):
        part, recipe = use.facts.tensor_group or OTHER, use.recipe
        stored = use.storage_by(target, compute)
        assert recipe.format is not None
        number, size = count(use.facts.layer), stored.num_bytes
        read = min(1.0, rows_read(use.node, recipe, num_tokens) / recipe.shape[0])
        is_new, is_read = (recipe, stored) not in seen, recipe not in read_already
        seen.add((recipe, stored))
        if part != EMBEDDING:
            read_already.add(recipe)
        yield TrafficShare(
            part,
            (recipe.format,),
            (stored.kind,),
            number * math.prod(recipe.shape),
            number * size if is_new else 0,
            number * size * read if is_read or part == EMBEDDING else 0,
            is_constant=use.facts.role == CONSTANT,
        )


def state_shares(
    graph_module: GraphModule,
    target: Target,
    *,
    context: float,
    compute: str,
    count: Callable[[int | None], int] = lambda layer: 1,
) -> Iterator[TrafficShare]:
    """Yield the traffic for every state in a sequence with ``context`` positions.

    Keys and values are read, within the window if there is one. Fixed-size state is read and
    written.

    Args:
        context: Positions; a mean may be fractional.
        count: Number of model layers that a graph layer represents.
    """
    for node in graph_module.graph.nodes:
        spec = info(node).state
        if spec is None:
            continue
        stored = target.state_storage(spec, compute=compute)
        size, kinds = count(info(node).layer) * stored.num_bytes, (stored.kind,)
        if spec.kind == PER_TOKEN:
            read = min(context, spec.window or context)
            reach = None if not spec.window else target.reach_back
            kept = context if reach is None else min(context, spec.window + reach)
            formats = (spec.format, spec.value_format) if spec.value_format else (spec.format,)
            yield TrafficShare(CACHE, formats, kinds, 0, size * kept, size * read)
        else:
            yield TrafficShare(MEMORY, (spec.format,), kinds, 0, size, 2 * size)


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """Minimum work for a step: bytes read from memory by part, and floating-point operations.

    Values between kernels and logits are excluded, because caches store them.
    """

    bytes_by_part: Mapping[str, float]
    flops: float

    @property
    def num_bytes(self) -> float:
        """Total bytes."""
        return sum(self.bytes_by_part.values())


def limit_seconds(work: StepTraffic, ceilings: Ceilings) -> float:
    """Return a step's minimum time in seconds, with reads and computation fully overlapped."""
    return max(work.num_bytes / ceilings.bytes_per_s, work.flops / ceilings.flops_per_s)


def decode_work(compiled: Compiled, *, batch: int, context: float) -> StepTraffic:
    """Return the work for a decode step with ``batch`` sequences and ``context`` positions (a
    mean).
    """
    made = _made_for(compiled)
    return step_work(compiled.graph(), num_tokens=batch, batch=batch, context=context, **made)


def prefill_work(compiled: Compiled, *, num_tokens: int) -> StepTraffic:
    """Return the work for a causal prefill from position 0, with logits for the last token only."""
    made = {"attended": (num_tokens + 1) / 2, **_made_for(compiled)}
    return step_work(compiled.graph(), num_tokens=num_tokens, batch=1, context=num_tokens, **made)


def _made_for(compiled: Compiled) -> dict[str, Any]:
    return {"target": get_target(compiled.target), "compute": compiled.compute}


def step_work(
    graph_module: GraphModule,
    *,
    num_tokens: int,
    batch: int,
    context: float,
    target: Target,
    compute: str,
    attended: float | None = None,
) -> StepTraffic:
    """Return the work for a step. Every sequence's last token has logits.

    Args:
        num_tokens: Tokens in all sequences.
        batch: Sequences.
        context: Positions in every sequence after the step.
        attended: Mean context for a token. None: ``context``.
    """
    seen = math.ceil(context if attended is None else attended)
    costs = step_costs(graph_module, num_tokens=num_tokens, context=seen, num_logits=batch)
    parts = weight_bytes(graph_module, num_tokens=num_tokens, target=target, compute=compute)
    states = state_shares(graph_module, target, context=context, compute=compute)
    parts[STATE] = batch * sum(share.moved for share in states)
    return StepTraffic(parts, sum(cost.flops for cost in costs))


def compiled_weight_bytes(compiled: Compiled, num_tokens: int = 1) -> dict[str, float]:
    """Return the weight bytes that a step reads, by part; see `weight_bytes`."""
    return weight_bytes(compiled.graph(), num_tokens=num_tokens, **_made_for(compiled))


def weight_bytes(
    graph_module: GraphModule, *, num_tokens: int, target: Target, compute: str
) -> dict[str, float]:
    """Return the weight bytes that a step reads, by part; see `weight_shares`."""
    parts: dict[str, float] = defaultdict(float)
    for share in weight_shares(graph_module, target, num_tokens=num_tokens, compute=compute):
        parts[share.group] += share.moved
    return dict(parts)
