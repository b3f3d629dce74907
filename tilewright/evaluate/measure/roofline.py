"""What a step must move and compute at the least, weight by weight as a target holds it, and how
fast a device could do that: a limit that measured times are compared with. It measures nothing.
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
from tilewright.compiler.targets.interface.base import Holding, Target
from tilewright.compiler.targets.interface.compiled import Compiled
from tilewright.compiler.targets.table import get_target
from tilewright.evaluate.results.record import Ceilings

EMBEDDING, OTHER, STATE = "embedding", "other", "state"
"""Parts of a step: rows of a table; norms, biases and constants; caches. The rest are tensor
groups."""
CACHE, MEMORY = "kv_cache", "memory"
"""What state is: keys and values; what a sequence keeps of any length."""


@dataclass(frozen=True, slots=True)
class TrafficShare:
    """A part of the bytes: of one weight or one piece of state, or of a whole group.

    ``formats`` are those asked for, ``kinds`` how the target keeps them. ``num_weights`` is 0 for
    state. ``held``: bytes kept; ``moved``: read by a step, or read and written again.
    """

    group: str
    formats: tuple[str, ...]
    kinds: tuple[str, ...]
    num_weights: int
    held: float
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
    """One share a use of a weight, for a step of so many tokens; see `state_shares` for ``count``.

    A weight that several nodes read is held and moved by the first of them alone; of an embedding
    only the tokens' rows move, and of experts those that so many tokens are expected to choose.

    Raises:
        CompileError: for a weight this target cannot hold.
    """
    held_already: set[tuple[WeightRecipe, Holding]] = set()
    read_already: set[WeightRecipe] = set()
    for use in weight_uses(graph_module):
        part, recipe = use.facts.tensor_group or OTHER, use.recipe
        held = use.held_by(target, compute)
        assert recipe.format is not None
        number, size = count(use.facts.layer), held.num_bytes
        read = min(1.0, rows_read(use.node, recipe, num_tokens) / recipe.shape[0])
        is_new, is_read = (recipe, held) not in held_already, recipe not in read_already
        held_already.add((recipe, held))
        if part != EMBEDDING:
            read_already.add(recipe)
        yield TrafficShare(
            part,
            (recipe.format,),
            (held.kind,),
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
    """One share a piece of one sequence's state at so many positions (a mean may be broken): keys
    and values are read, those of a layer with a window no further than that, and held as far as the
    target holds them; what is rewritten in place is read and written.

    ``count``: how many layers a layer of the graph stands for.
    """
    for node in graph_module.graph.nodes:
        spec = info(node).state
        if spec is None:
            continue
        held = target.state_holding(spec, compute=compute)
        size, kinds = count(info(node).layer) * held.num_bytes, (held.kind,)
        if spec.kind == PER_TOKEN:
            read = min(context, spec.window or context)
            reach = None if not spec.window else target.reach_back
            kept = context if reach is None else min(context, spec.window + reach)
            yield TrafficShare(CACHE, (spec.format,), kinds, 0, size * kept, size * read)
        else:
            yield TrafficShare(MEMORY, (spec.format,), kinds, 0, size, 2 * size)


@dataclass(frozen=True, slots=True)
class StepTraffic:
    """The least work of one step: bytes read from memory by part, floating-point operations.

    Values that one kernel hands to the next are not counted, nor are logits: caches hold them.
    """

    bytes_by_part: Mapping[str, float]
    flops: float

    @property
    def num_bytes(self) -> float:
        """The bytes that all parts read together."""
        return sum(self.bytes_by_part.values())


def limit_seconds(work: StepTraffic, ceilings: Ceilings) -> float:
    """The least time a step can take: the longer of reading and computing, fully overlapped."""
    return max(work.num_bytes / ceilings.bytes_per_s, work.flops / ceilings.flops_per_s)


def decode_work(compiled: Compiled, *, batch: int, context: float) -> StepTraffic:
    """One token of each of ``batch`` sequences of ``context`` positions (a mean may be broken)."""
    made = _made_for(compiled)
    return step_work(compiled.graph(), num_tokens=batch, batch=batch, context=context, **made)


def prefill_work(compiled: Compiled, *, num_tokens: int) -> StepTraffic:
    """A prompt from its start: attention is causal, and the last token alone wants logits."""
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
    """The work of a step of a lowered graph; of every sequence the last token alone wants logits.

    Args:
        num_tokens: of all sequences; ``batch``: sequences.
        context: positions of each sequence's state after the step.
        attended: positions that a token sees, in the mean; the same where nothing is said.
    """
    seen = math.ceil(context if attended is None else attended)
    costs = step_costs(graph_module, num_tokens=num_tokens, context=seen, num_logits=batch)
    parts = weight_bytes(graph_module, num_tokens=num_tokens, target=target, compute=compute)
    states = state_shares(graph_module, target, context=context, compute=compute)
    parts[STATE] = batch * sum(share.moved for share in states)
    return StepTraffic(parts, sum(cost.flops for cost in costs))


def compiled_weight_bytes(compiled: Compiled) -> dict[str, float]:
    """Bytes of the weights that a step of one token reads, by part; see `weight_bytes`."""
    return weight_bytes(compiled.graph(), num_tokens=1, **_made_for(compiled))


def weight_bytes(
    graph_module: GraphModule, *, num_tokens: int, target: Target, compute: str
) -> dict[str, float]:
    """Bytes of the weights that a step reads, by part; see `weight_shares`."""
    parts: dict[str, float] = defaultdict(float)
    for share in weight_shares(graph_module, target, num_tokens=num_tokens, compute=compute):
        parts[share.group] += share.moved
    return dict(parts)
