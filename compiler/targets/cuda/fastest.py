"""Which algorithm of the library a product takes: of those that it proposes, the one that was
measured to be the fastest on this device.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from tilewright.compiler.targets.base import CompileOptions
from tilewright.compiler.targets.cuda.cublaslt import Library, Product, RefusedError, Shape, takes
from tilewright.compiler.targets.cuda.trials import FASTEST, read_trials

_PROPOSALS = 24
_ROUNDS = 5
_HOPEFUL = 1.15
"""Of the fastest's time in the first round: who takes longer is not tried again."""
_GAIN = 0.985
"""Of the time that the library's own choice takes, what another must take at most."""
_OVER_CACHE = 512 << 20
"""Bytes that are written before a product is timed: none of its weight is in the cache then, and
the host has launched it before they are.
"""
_MOST_KEPT = 4096

_LARGE = (1024, 2048)
"""Rows of prompts that are not captured, which others take after."""

Default = Callable[[Tensor, Tensor, Tensor], None]
"""A product by the library's own choice."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Of a shape, what runs it, and microseconds: ``algorithm``, None: the library's own choice;
    of which ``own`` is the time.
    """

    product: Product
    algorithm: bytes | None
    own: float = math.nan
    time: float = math.nan


class Fastest:
    """Products of bfloat16 on a device, each shape by its fastest algorithm.

    Shapes with as many rows as ``rows`` has are measured when they first come outside of a capture;
    others take what the nearest of these takes, as far as it can run them.
    """

    def __init__(self, device: torch.device, rows: Collection[int]) -> None:
        self._library, self._rows = Library(device), frozenset(rows)
        self.found: dict[Shape, Chosen] = {}

    def run(self, out: Tensor, x: Tensor, weight: Tensor, default: Default, *, adds: bool) -> None:
        """``out = x weight^T``, or added to it, with float32 sums; by ``default`` where that is
        faster, or nothing is known of the shape. Capturable.
        """
        chosen = self._chosen(out, x, weight, default, adds) if takes(out, x, weight) else None
        if chosen is None or chosen.algorithm is None:
            default(out, x, weight)
        else:
            chosen.product.run(chosen.algorithm, out, x, weight)

    def _chosen(
        self, out: Tensor, x: Tensor, weight: Tensor, default: Default, adds: bool
    ) -> Chosen | None:
        shape = Shape.of(out, x, weight, adds=adds)
        found = self.found.get(shape)
        if found is not None or torch.cuda.is_current_stream_capturing():
            return found
        if len(self.found) >= _MOST_KEPT:
            self.found = {
                key: each for key, each in self.found.items() if key.num_rows in self._rows
            }
        product = self._library.product(shape)
        if shape.num_rows in self._rows:
            self.found[shape] = _measured(product, out, x, weight, default)
        else:
            self.found[shape] = Chosen(product, self._near(product))
        return self.found[shape]

    def _near(self, product: Product) -> bytes | None:
        """What the nearest number of rows that was measured takes with an alike weight."""
        shape = product.shape

        def distance(other: Shape) -> float:
            return abs(math.log(other.num_rows / shape.num_rows))

        alike = [each for each in self.found if each.num_rows in self._rows and _alike(each, shape)]
        if not alike:
            return None
        algorithm = self.found[min(alike, key=distance)].algorithm
        return algorithm if algorithm is not None and product.takes(algorithm) else None


def fastest_for(
    options: CompileOptions, device: torch.device, rows: Collection[int]
) -> Fastest | None:
    """What chooses for a program whose captured steps have so many rows; None where the library's
    own choice stands: a row's bits are promised, or ranks have to compute alike.
    """
    is_free = options.compute == "fast" and not options.is_strict and options.parallel.tensor == 1
    if not is_free or device.type != "cuda" or read_trials().library != FASTEST:
        return None
    return Fastest(device, {*rows, *_LARGE})


def _alike(one: Shape, other: Shape) -> bool:
    def kind(shape: Shape) -> tuple[object, ...]:
        return shape.num_outputs, shape.num_columns, shape.dtype, shape.adds, shape.aligned

    return kind(one) == kind(other)


def _measured(product: Product, out: Tensor, x: Tensor, weight: Tensor, default: Default) -> Chosen:
    """The fastest way, on these operands; what ``out`` holds stays."""
    scratch = out.new_empty(len(out) * out.stride(0)).as_strided(out.shape, out.stride())
    scratch.zero_()
    flushed = torch.empty(_OVER_CACHE, dtype=torch.uint8, device=out.device)
    ways: dict[bytes | None, Callable[[], None]] = {None: lambda: default(scratch, x, weight)}
    for each in product.proposals(_PROPOSALS):
        ways[each] = lambda each=each: product.run(each, scratch, x, weight)  # type: ignore[misc]
    for way in [*ways]:
        try:
            _timed(ways[way], flushed)  # the first launch of a kernel loads it
        except RefusedError:
            del ways[way]
    times: dict[bytes | None, list[float]] = {way: [] for way in ways}
    for number in range(_ROUNDS):
        best = min((min(taken) for taken in times.values() if taken), default=math.inf)
        for way, run in ways.items():
            if number and way is not None and times[way][0] > _HOPEFUL * best:
                continue
            times[way].append(_timed(run, flushed))
    medians = {way: statistics.median(taken) for way, taken in times.items()}
    fastest = min(medians, key=lambda way: medians[way])
    own = medians[None]
    if medians[fastest] > _GAIN * own:
        fastest = None
    return Chosen(product, fastest, own, medians[fastest])


def _timed(run: Callable[[], None], flushed: Tensor) -> float:
    """Microseconds of one product behind an empty cache."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flushed.zero_()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return 1e3 * begin.elapsed_time(end)
