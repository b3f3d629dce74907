"""What a model and its state take on a target, and what a decode step moves of them, by group.

It is told before anything is compiled: no weight is read, and nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilewright.compiler.driver import CompilableModel
from tilewright.compiler.ir.cost import rows_read
from tilewright.compiler.ir.info import CONSTANT, info
from tilewright.compiler.ir.recipe import WeightRecipe
from tilewright.compiler.ir.state import PER_TOKEN
from tilewright.compiler.precision import EXPERT_GROUPS, ResolvedPrecision
from tilewright.compiler.sweep.outline import Outline, lower_outline
from tilewright.compiler.targets.base import Holding, Target
from tilewright.compiler.targets.holdings import weight_uses

OTHER, CACHE, MEMORY = "other", "kv_cache", "memory"
"""Norms and other vectors; keys and values; what a sequence keeps of any length."""


@dataclass(frozen=True, slots=True)
class Share:
    """A part of the bytes: of one weight or one layer's state, or of a whole group.

    ``formats`` are those asked for, ``kinds`` how the target keeps them. ``num_weights`` is 0 for
    state. ``held``: bytes kept; ``moved``: read by a decode step, or read and written again.
    """

    group: str
    formats: tuple[str, ...]
    kinds: tuple[str, ...]
    num_weights: int
    held: float
    moved: float


@dataclass(frozen=True, slots=True)
class BytePlan:
    """By group, for ``batch`` sequences of ``context`` positions; a step reads all of their state,
    and writes again what does not grow.

    ``position_bytes``: of the keys and values of one position; ``memory_bytes``: of what a sequence
    keeps besides. ``experts_read``: the share of the experts that a decode step is expected to
    read; None where there are none.
    """

    shares: tuple[Share, ...]
    batch: int
    context: int
    position_bytes: int
    memory_bytes: int
    experts_read: float | None

    @property
    def total(self) -> Share:
        """Of all groups."""
        return _joined("total", self.shares)


def byte_plan(
    model: CompilableModel,
    precision: ResolvedPrecision,
    target: Target,
    *,
    batch: int,
    context: int,
    compute: str,
) -> BytePlan:
    """The plan of a loaded model.

    Raises:
        CompileError: for a weight this target cannot hold.
    """
    outline = lower_outline(model, precision, target)
    position, memory = _of_state(outline, target, compute, context=context)
    parts = [
        *_of_weights(outline, target, compute, batch=batch),
        *(
            replace(each, held=count * each.held, moved=count * each.moved)
            for count, shares in ((batch * context, position), (batch, memory))
            for each in shares
        ),
    ]
    names = dict.fromkeys(part.group for part in parts)
    return BytePlan(
        shares=tuple(_joined(name, [p for p in parts if p.group == name]) for name in names),
        batch=batch,
        context=context,
        position_bytes=int(sum(each.held for each in position)),
        memory_bytes=int(sum(each.held for each in memory)),
        experts_read=_experts_read(outline, batch),
    )


def _of_weights(outline: Outline, target: Target, compute: str, *, batch: int) -> Iterator[Share]:
    """One share a use, of what is no constant; two uses of one copy are held by the first alone."""
    seen: set[tuple[WeightRecipe, Holding]] = set()
    for use in weight_uses(outline.graph):
        if use.facts.role == CONSTANT:
            continue
        recipe, held = use.recipe, use.held_by(target, compute)
        is_new = (recipe, held) not in seen
        seen.add((recipe, held))
        assert recipe.format is not None
        count = outline.count(use.facts.layer)
        read = min(1.0, rows_read(use.node, recipe, batch) / recipe.shape[0])
        yield Share(
            use.facts.tensor_group or OTHER,
            (recipe.format,),
            (held.kind,),
            count * math.prod(recipe.shape),
            count * held.num_bytes if is_new else 0,
            count * held.num_bytes * read,
        )


def _of_state(
    outline: Outline, target: Target, compute: str, *, context: int
) -> tuple[list[Share], list[Share]]:
    """Of one position, and of one sequence whatever its length. A window bounds what is read."""
    position, memory = [], []
    for node in outline.graph.graph.nodes:
        spec = info(node).state
        if spec is None:
            continue
        held, count = target.state_holding(spec, compute=compute), outline.count(info(node).layer)
        size, asked = count * held.num_bytes, (spec.format,)
        if spec.kind == PER_TOKEN:
            read = min(context, spec.window) / context if spec.window else 1.0
            position.append(Share(CACHE, asked, (held.kind,), 0, size, size * read))
        else:
            memory.append(Share(MEMORY, asked, (held.kind,), 0, size, 2 * size))
    return position, memory


def _experts_read(outline: Outline, batch: int) -> float | None:
    for use in weight_uses(outline.graph):
        if use.facts.tensor_group in EXPERT_GROUPS:
            return rows_read(use.node, use.recipe, batch) / use.recipe.shape[0]
    return None


def _joined(group: str, parts: tuple[Share, ...] | list[Share]) -> Share:
    return Share(
        group,
        tuple(dict.fromkeys(name for part in parts for name in part.formats)),
        tuple(dict.fromkeys(name for part in parts for name in part.kinds)),
        sum(part.num_weights for part in parts),
        sum(part.held for part in parts),
        sum(part.moved for part in parts),
    )
