"""Buffer views for a step with a number of rows."""

from __future__ import annotations

import copy

from torch import Tensor

from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_COLUMNS
from tilewright.compiler.targets.program.instructions import (
    OPERAND,
    BufferView,
    KernelProgram,
    TopKRouteOp,
)


def padded(width: int) -> int:
    """Round a row width up to whole matmul tiles."""
    return -(-width // TILE_COLUMNS) * TILE_COLUMNS


def is_aligned(plan: KernelProgram, place: BufferView, count: int) -> bool:
    """Return whether a view's rows begin at multiples of ``count`` values."""
    stride = place.pitch
    if plan.buffers[place.buffer].role == OPERAND:
        stride = padded(stride)
    return place.first % count == 0 == stride % count


class Buffers:
    """Views with ``num_rows`` rows. ``flat`` contains a tensor for each buffer in the program."""

    def __init__(self, plan: KernelProgram, flat: list[Tensor], num_rows: int) -> None:
        self._plan, self._flat, self._num_rows = plan, flat, num_rows
        self._aliases: dict[BufferView, BufferView] = {}
        self._given: dict[int, tuple[BufferView, Tensor]] = {}  # by buffer
        self._views: dict[BufferView, Tensor] = {}  # layers use the same buffers
        self._part = slice(None)

    def alias(self, place: BufferView, source: BufferView) -> None:
        """Let ``place`` read the values of ``source`` in this step."""
        self._aliases[place] = source

    def put(self, place: BufferView, values: Tensor) -> None:
        """Set ``place`` to ``values [rows, width]``. Values with the buffer's layout are copied
        only before other columns are read.
        """
        assert self._part == slice(None)
        place = self._aliases.get(place, place)
        out = self.view(place)
        if out.is_contiguous() and values.is_contiguous() and values.dtype == out.dtype:
            self._given[place.buffer] = place, values
        else:
            out.copy_(values)

    def part(self, rows: slice) -> Buffers:
        """Return a view of some rows."""
        sliced = copy.copy(self)
        sliced._part, sliced._views = rows, {}
        return sliced

    def view(self, place: BufferView) -> Tensor:
        """View a buffer as ``[rows, width]``. Matmul operands use whole tiles. Pending values from
        `put` are copied first.
        """
        place = self._aliases.get(place, place)
        if place.buffer in self._given:
            given, values = self._given[place.buffer]
            if given == place:
                return values[self._part]
            del self._given[place.buffer]
            self._lying(given, slice(None)).copy_(values)
        view = self._views.get(place)
        if view is None:
            view = self._views[place] = self._lying(place, self._part)
        return view

    def _lying(self, columns: BufferView, part: slice) -> Tensor:
        stride = columns.pitch
        if self._plan.buffers[columns.buffer].role == OPERAND:
            stride = padded(stride)
        rows = self._flat[columns.buffer][: self._num_rows * stride].view(self._num_rows, stride)
        return rows[part, columns.first : columns.first + columns.width]

    @property
    def logits(self) -> Tensor:
        """Return the logits from the last instruction."""
        last = self._plan.instructions[-1]
        assert not isinstance(last, TopKRouteOp)
        return self.view(last.out)
