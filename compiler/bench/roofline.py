"""What a step of a compiled model must move and compute at the least, and how fast a device could
do that: a limit that measured times are compared with. It measures nothing (see ceilings).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule

from tilewright.compiler.bench.record import Ceilings
from tilewright.compiler.driver import Compiled
from tilewright.compiler.ir.cost import rows_read, step_costs
from tilewright.compiler.ir.info import info
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.state import PER_SEQUENCE, PER_TOKEN, StateSpec
from tilewright.compiler.targets.base import Target
from tilewright.compiler.targets.holdings import weight_uses
from tilewright.compiler.targets.table import get_target

EMBEDDING, OTHER, STATE = "embedding", "other", "state"
"""Parts of a step: rows of a table; norms, biases and constants; caches. The rest are tensor
groups."""

_FP32_BYTES = 4
"""Of an element of state that is rewritten in place, on every target."""

_MANY_POSITIONS = 1 << 16
"""State is kept in whole pages: over so many positions their rounding does not count."""


@dataclass(frozen=True, slots=True)
class Work:
    """One step: ``bytes_by_part`` read from memory at the least, and floating-point operations.

    Values that one kernel hands to the next are not counted, nor are logits: caches hold them.
    """

    bytes_by_part: Mapping[str, float]
    flops: float

    @property
    def num_bytes(self) -> float:
        """Of all parts."""
        return sum(self.bytes_by_part.values())


def limit_seconds(work: Work, ceilings: Ceilings) -> float:
    """The least time a step can take: the longer of reading and computing, fully overlapped."""
    return max(work.num_bytes / ceilings.bytes_per_s, work.flops / ceilings.flops_per_s)


def decode_work(compiled: Compiled, *, batch: int, context: float) -> Work:
    """One token of each of ``batch`` sequences of ``context`` positions (a mean may be broken)."""
    step = _step_of(compiled)
    return step(num_tokens=batch, batch=batch, context=context, attended=context)


def prefill_work(compiled: Compiled, *, num_tokens: int) -> Work:
    """A prompt from its start: attention is causal, and the last token alone wants logits."""
    attended = (num_tokens + 1) / 2
    step = _step_of(compiled)
    return step(num_tokens=num_tokens, batch=1, context=num_tokens, attended=attended)


def _step_of(compiled: Compiled) -> Callable[..., Work]:
    """`step_work` of a compiled model."""
    return functools.partial(
        step_work,
        compiled.graph(),
        target=get_target(compiled.target),
        compute=compiled.compute,
        state_bytes=compiled.executable.state_bytes,
    )


def step_work(
    graph_module: GraphModule,
    *,
    num_tokens: int,
    batch: int,
    context: float,
    attended: float,
    target: Target,
    compute: str,
    state_bytes: Callable[[int, int], int],
) -> Work:
    """The work of a step of a lowered graph; of every sequence the last token alone wants logits.

    Args:
        num_tokens: of all sequences; ``batch``: sequences.
        context: positions of each sequence's state after the step.
        attended: positions that a token sees, in the mean.
        state_bytes: `Executable.state_bytes`: positions and sequences in what the target keeps.
    """
    costs = step_costs(
        graph_module, num_tokens=num_tokens, context=math.ceil(attended), num_logits=batch
    )
    parts = weight_bytes(graph_module, num_tokens=num_tokens, target=target, compute=compute)
    parts[STATE] = batch * _sequence_bytes(graph_module, context, state_bytes)
    return Work(parts, sum(cost.flops for cost in costs))


def compiled_weight_bytes(compiled: Compiled, *, num_tokens: int = 1) -> dict[str, float]:
    """Bytes of the weights that a step of so many tokens reads, by part; see `weight_bytes`."""
    return weight_bytes(
        compiled.graph(),
        num_tokens=num_tokens,
        target=get_target(compiled.target),
        compute=compiled.compute,
    )


def weight_bytes(
    graph_module: GraphModule, *, num_tokens: int, target: Target, compute: str
) -> dict[str, float]:
    """Bytes of the weights that a step reads, as the target holds them, by part.

    A weight that several nodes read counts once, of an embedding only the tokens' rows, and of
    experts those that so many tokens are expected to choose.
    """
    parts: dict[str, float] = defaultdict(float)
    seen: set[WeightRecipe] = set()
    for use in weight_uses(graph_module):
        part, recipe = use.facts.tensor_group or OTHER, use.recipe
        if part != EMBEDDING and recipe in seen:
            continue
        share = min(1.0, rows_read(use.node, recipe, num_tokens) / recipe.shape[0])
        if part != EMBEDDING:
            seen.add(recipe)
        parts[part] += share * use.held_by(target, compute).num_bytes
    return dict(parts)


def product_groups(graph_module: GraphModule) -> list[str]:
    """The tensor groups of the graph's products, in the order in which they run."""
    groups = [use.facts.tensor_group for use in weight_uses(graph_module)]
    return [group for group in groups if group is not None and group != EMBEDDING]


def _sequence_bytes(
    graph_module: GraphModule, context: float, state_bytes: Callable[[int, int], int]
) -> float:
    """Bytes that a step moves of one sequence's state: caches are read, those of a layer with a
    window no further than that; what is rewritten in place is read and written.
    """
    states = _states(graph_module)
    kept = sum(spec.num_elements(0) for spec in states if spec.kind == PER_SEQUENCE)
    rewritten = 2.0 * _FP32_BYTES * kept
    specs = [spec for spec in states if spec.kind == PER_TOKEN]
    unbounded = sum(dataclasses.replace(spec, window=0).num_elements(1) for spec in specs)
    if not unbounded:
        return rewritten
    per_element = state_bytes(_MANY_POSITIONS, 0) / (_MANY_POSITIONS * unbounded)
    return rewritten + per_element * sum(
        math.prod(spec.shape) * (min(context, spec.window) if spec.window else context)
        for spec in specs
    )


def _states(graph_module: GraphModule) -> Sequence[StateSpec]:
    nodes = graph_module.graph.nodes
    return [state for node in nodes if (state := info(node).state) is not None]
