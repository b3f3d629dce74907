"""What a model and its state take on a target, and what a decode step moves of them, by group.

It is told before anything is compiled: no weight is read, and nothing is measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from tilewright.compiler.bench.roofline import MEMORY, Share, state_shares, weight_shares
from tilewright.compiler.driver import CompilableModel
from tilewright.compiler.precision import ResolvedPrecision
from tilewright.compiler.sweep.outline import lower_outline
from tilewright.compiler.targets.base import Target


@dataclass(frozen=True, slots=True)
class BytePlan:
    """By group, for ``batch`` sequences of ``context`` positions; a step reads all of their state,
    and writes again what does not grow.

    ``position_bytes``: of the keys and values of one position; ``memory_bytes``: of what a sequence
    keeps besides.
    """

    shares: tuple[Share, ...]
    position_bytes: int
    memory_bytes: int

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
    """The plan of a loaded model; constants are not counted.

    Raises:
        CompileError: for a weight this target cannot hold.
    """
    outline = lower_outline(model, precision, target)
    count, graph = outline.count, outline.graph
    weights = weight_shares(graph, target, num_tokens=batch, compute=compute, count=count)
    states = list(state_shares(graph, target, context=context, compute=compute, count=count))
    parts = [each for each in weights if not each.is_constant]
    parts += [replace(e, held=batch * e.held, moved=batch * e.moved) for e in states]
    memory = sum(each.held for each in states if each.group == MEMORY)
    kept = sum(each.held for each in states if each.group != MEMORY)
    return BytePlan(
        shares=tuple(
            _joined(name, [part for part in parts if part.group == name])
            for name in dict.fromkeys(part.group for part in parts)
        ),
        position_bytes=round(kept / context),
        memory_bytes=int(memory),
    )


def _joined(group: str, parts: Iterable[Share]) -> Share:
    parts = list(parts)
    return Share(
        group,
        tuple(dict.fromkeys(name for part in parts for name in part.formats)),
        tuple(dict.fromkeys(name for part in parts for name in part.kinds)),
        sum(part.num_weights for part in parts),
        sum(part.held for part in parts),
        sum(part.moved for part in parts),
    )
