"""What a model and its state take on a target, and what a decode step moves of them, by group.

It is told before anything is compiled: no weight is read, and nothing is measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tilewright.compiler.driver import CompilableModel
from tilewright.compiler.precision import EXPERT_GROUPS, ResolvedPrecision
from tilewright.compiler.sweep.model import (
    Weight,
    blocks_of,
    experts_share,
    holding_of,
    layer_of,
    weights_of,
)
from tilewright.compiler.targets.base import Target

EMBEDDING, OTHER, CACHE, MEMORY = "embedding", "other", "kv_cache", "memory"
"""A table; norms and other vectors; keys and values; what a sequence keeps of any length."""

_NO_PRODUCT = ("hifi4", "hifi4")


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
    experts, grouped = experts_share(model, batch), weights_of(model)
    parts = [
        *_of_groups(grouped, precision, target, compute, experts=experts, batch=batch),
        *_of_others(model, grouped, target, compute),
    ]
    position = list(_of_positions(model, precision, target, compute))
    memory = list(_of_sequences(model, target, compute))
    parts += [_times(each, batch * context) for each in position]
    parts += [_times(each, batch) for each in memory]
    names = dict.fromkeys(part.group for part in parts)
    return BytePlan(
        shares=tuple(_joined(name, [p for p in parts if p.group == name]) for name in names),
        batch=batch,
        context=context,
        position_bytes=int(sum(each.held for each in position)),
        memory_bytes=int(sum(each.held for each in memory)),
        experts_read=experts if getattr(model.config, "num_experts", 0) else None,
    )


def _of_groups(
    weights: tuple[Weight, ...],
    precision: ResolvedPrecision,
    target: Target,
    compute: str,
    *,
    experts: float,
    batch: int,
) -> Iterator[Share]:
    blocks = blocks_of(weights)
    for weight in weights:
        others = blocks.get(weight, ())
        held = holding_of(weight, precision, target, compute, others=others)
        wanted = precision.format(weight.group, layer=weight.layer, fqn=weight.fqn)
        read = 1.0
        if weight.group == EMBEDDING:
            read = min(1.0, batch / weight.shape[0])
        elif weight.group in EXPERT_GROUPS:
            read = experts
        size = held.num_bytes
        count = math.prod(weight.shape)
        yield Share(weight.group, (wanted,), (held.kind,), count, size, size * read)


def _of_others(
    model: CompilableModel, grouped: tuple[Weight, ...], target: Target, compute: str
) -> Iterator[Share]:
    """Parameters that belong to no group, in float32 as every target has them."""
    known = {f"{weight.fqn}.weight" for weight in grouped}
    for name, parameter in model.module.named_parameters():
        if name not in known:
            shape = tuple(parameter.shape)
            held = target.holding(
                shape,
                "fp32",
                block_axis="in",
                group="",
                compute=compute,
                fidelities=_NO_PRODUCT,
            )
            size = held.num_bytes
            yield Share(OTHER, ("fp32",), (held.kind,), math.prod(shape), size, size)


def _of_positions(
    model: CompilableModel, precision: ResolvedPrecision, target: Target, compute: str
) -> Iterator[Share]:
    """The keys and values of one position, layer by layer."""
    shapes: Mapping[str, tuple[int, ...]] = model.module.cache_shapes()
    for fqn, shape in shapes.items():
        wanted = precision.format(CACHE, layer=layer_of(fqn), fqn=fqn)
        held = target.cache_holding(shape, wanted, compute=compute)
        yield Share(CACHE, (wanted,), (held.kind,), 0, held.num_bytes, held.num_bytes)


def _of_sequences(model: CompilableModel, target: Target, compute: str) -> Iterator[Share]:
    """What one sequence keeps besides, layer by layer."""
    sizes: Mapping[str, int] = model.module.memory_sizes()
    for count in sizes.values():
        held = target.cache_holding((count,), "fp32", compute=compute)
        yield Share(MEMORY, ("fp32",), (held.kind,), 0, held.num_bytes, 2 * held.num_bytes)


def _times(share: Share, count: int) -> Share:
    held, moved = count * share.held, count * share.moved
    return Share(share.group, share.formats, share.kinds, share.num_weights, held, moved)


def _joined(group: str, parts: tuple[Share, ...] | list[Share]) -> Share:
    return Share(
        group,
        tuple(dict.fromkeys(name for part in parts for name in part.formats)),
        tuple(dict.fromkeys(name for part in parts for name in part.kinds)),
        sum(part.num_weights for part in parts),
        sum(part.held for part in parts),
        sum(part.moved for part in parts),
    )
