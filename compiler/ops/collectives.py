"""Collectives: operators in a rank's graph, and their definition for a whole group.

Called on a tensor, an operator is a single-rank group's collective, as in an unsharded graph.
`GROUPS` defines the collective for several ranks: a pure function from all ranks' values to all
ranks' results. Sums are fp32 and pairwise in rank order. Each addend is first rounded to the link
format, even on its own rank, so that all ranks have equal bits.

Legend: T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from tilewright.compiler.formats import get_format
from tilewright.compiler.ops.dense import rms_norm
from tilewright.compiler.ops.library import Cost, like, operator


def on_wire(x: Tensor, wire: str) -> Tensor:
    """Return the float32 values of ``x`` after sending in the link format."""
    return x.float() if wire == "fp32" else get_format(wire).round_trip(x.float())


def tree_sum(parts: Sequence[Tensor]) -> Tensor:
    """Add neighbors, then neighboring sums. The order depends only on the addend count."""
    found = list(parts)
    while len(found) > 1:
        pairs = [found[i] + found[i + 1] for i in range(0, len(found) - 1, 2)]
        found = pairs + found[len(found) - len(found) % 2 :]
    return found[0]


def _reduce_cost(x: Tensor, count: int, *_: object) -> Cost:
    size = x.numel()
    return Cost(float(count - 1) * size, size, size, elements_sent=float(count - 1) * size)


@operator(fake=lambda x, count, wire: like(x), cost=_reduce_cost)
def all_reduce(x: Tensor, count: int, wire: str) -> Tensor:
    """Return the sum of ``x`` over the ``count`` ranks in a group. ``wire`` is the link format."""
    return all_reduce_group([x], wire)[0].clone()


def all_reduce_group(values: Sequence[Tensor], wire: str, *, hops: int = 1) -> list[Tensor]:
    """Compute :data:`all_reduce` from all ranks' values.

    With two ``hops``, each rank adds a shard and sends the sum in the link format. Its own copy is
    also rounded.
    """
    total = tree_sum([on_wire(x, wire) for x in values])
    if hops == 2:
        total = on_wire(total, wire)
    return [total.to(x.dtype) for x in values]


def _add_cost(
    x: Tensor, residual: Tensor, norm_weight: Tensor | None, eps: float, count: int, wire: str
) -> Cost:
    size = x.numel()
    return Cost((count + 4.0) * size, 2 * size, 2 * size, elements_sent=float(count - 1) * size)


@operator(
    fake=lambda x, residual, *_: (like(residual), like(residual)),
    cost=_add_cost,
)
def all_reduce_add(
    x: Tensor, residual: Tensor, norm_weight: Tensor | None, eps: float, count: int, wire: str
) -> tuple[Tensor, Tensor]:
    """Fuse :data:`all_reduce`, the residual add and the next norm.

    Return ``(rms_norm(s), s)`` for ``s = residual + all_reduce(x)``. Without ``norm_weight [C]``
    the first result is a copy of s. ``x`` and ``residual`` are ``[T, C]``. ``residual`` and
    ``norm_weight`` are whole on every rank.
    """
    normed, total = all_reduce_add_group([x], [residual], norm_weight, eps, wire)[0]
    return normed.clone(), total.clone()


def all_reduce_add_group(
    values: Sequence[Tensor],
    residuals: Sequence[Tensor],
    norm_weight: Tensor | None,
    eps: float,
    wire: str,
) -> list[tuple[Tensor, Tensor]]:
    """Compute :data:`all_reduce_add` from all ranks' values."""
    found = []
    for reduced, residual in zip(all_reduce_group(values, wire), residuals, strict=True):
        total = residual + reduced.to(residual.dtype)
        normed = total if norm_weight is None else rms_norm.reference(total, norm_weight, eps)
        found.append((normed, total))
    return found


def _gather_cost(x: Tensor, sizes: Sequence[int], axis: int = -1) -> Cost:
    mine = x.numel()
    return Cost(0.0, mine, mine, elements_sent=float(len(sizes) - 1) * mine)


def _gathered_fake(x: Tensor, sizes: Sequence[int], axis: int = -1) -> Tensor:
    shape = list(x.shape)
    shape[axis] = sum(sizes)
    return x.new_empty(shape)


@operator(fake=_gathered_fake, cost=_gather_cost)
def all_gather(x: Tensor, sizes: list[int], axis: int = -1) -> Tensor:
    """Concatenate all ranks' values along ``axis``. ``sizes`` are the ranks' sizes on this axis.

    In an unsharded graph ``x`` is already whole.
    """
    assert x.shape[axis] == sum(sizes), "a rank's own value was given where all ranks' are needed"
    return x.clone()


def all_gather_group(
    values: Sequence[Tensor], sizes: Sequence[int], axis: int = -1
) -> list[Tensor]:
    """Compute :data:`all_gather` from all ranks' values."""
    assert [x.shape[axis] for x in values] == list(sizes)
    whole = torch.cat(list(values), axis)
    return [whole for _ in values]


def _scatter_cost(x: Tensor, sizes: Sequence[int], wire: str, axis: int = -1) -> Cost:
    count, size = len(sizes), x.numel()
    sent = float(count - 1) * size / count
    return Cost(sent, size, size / count, elements_sent=sent)


@operator(fake=lambda x, sizes, wire, axis=-1: like(x), cost=_scatter_cost)
def reduce_scatter(x: Tensor, sizes: list[int], wire: str, axis: int = -1) -> Tensor:
    """Sum ``x`` over all ranks. Each rank gets its shard along ``axis``, with its size in
    ``sizes``.

    In an unsharded graph the result is the whole sum.
    """
    assert x.shape[axis] == sum(sizes)
    return all_reduce_group([x], wire)[0].clone()


def reduce_scatter_group(
    values: Sequence[Tensor], sizes: Sequence[int], wire: str, axis: int = -1
) -> list[Tensor]:
    """Compute :data:`reduce_scatter` from all ranks' values."""
    parts = all_reduce_group(values, wire)[0].split(list(sizes), axis)
    return [part.to(x.dtype) for part, x in zip(parts, values, strict=True)]


def _exchange_cost(x: Tensor, counts: Sequence[int]) -> Cost:
    size = x.numel()
    away = size * (len(counts) - 1) / len(counts)
    return Cost(0.0, size, size, elements_sent=away)


@operator(fake=lambda x, counts: like(x), cost=_exchange_cost)
def all_to_all(x: Tensor, counts: list[int]) -> Tensor:
    """Send rows of ``x [T, C]`` to all ranks: the first ``counts[0]`` rows to rank 0, and so on.

    In a graph all ranks send and receive equal counts.
    """
    assert x.shape[0] == sum(counts)
    return x.clone()


def all_to_all_group(values: Sequence[Tensor], counts: Sequence[Sequence[int]]) -> list[Tensor]:
    """Compute :data:`all_to_all` from all ranks' values. Each rank has its own counts."""
    sent = []
    for x, given in zip(values, counts, strict=True):
        bounds = [0, *accumulate(given)]
        sent.append([x[bounds[r] : bounds[r + 1]] for r in range(len(values))])
    return [torch.cat([parts[rank] for parts in sent]) for rank in range(len(values))]


_Arguments = Sequence[tuple[Any, ...]]


def _add_group(calls: _Arguments) -> list[Any]:
    xs, residuals = [call[0] for call in calls], [call[1] for call in calls]
    _, _, norm_weight, eps, _, wire = calls[0]
    return all_reduce_add_group(xs, residuals, norm_weight, eps, wire)


GROUPS: Mapping[Any, Callable[[_Arguments], list[Any]]] = {
    all_reduce.overload: lambda calls: all_reduce_group([c[0] for c in calls], calls[0][2]),
    all_reduce_add.overload: _add_group,
    all_gather.overload: lambda calls: all_gather_group([c[0] for c in calls], *calls[0][1:]),
    reduce_scatter.overload: lambda calls: reduce_scatter_group(
        [c[0] for c in calls], *calls[0][1:]
    ),
    all_to_all.overload: lambda calls: all_to_all_group(
        [c[0] for c in calls], [c[1] for c in calls]
    ),
}
"""By overload of a collective, what a whole group makes of it: from the arguments of every rank's
call, in the ranks' order, to every rank's result."""

COLLECTIVES = frozenset(GROUPS)
"""The overloads that are exchanges between ranks."""
