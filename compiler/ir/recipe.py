"""Weight recipes: the path from checkpoint tensors to an executable, as data.

Passes rewrite recipes. Loaders execute them a tensor at a time: load, slice, concatenate, pad,
quantize. A recipe refers to tensors by name and does not depend on file locations.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from tilewright.compiler.formats import get_format
from tilewright.compiler.mesh import IndexRange
from tilewright.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Segment:
    """A range of rows from a checkpoint tensor.

    Rows are counted over all axes except the last.

    Attributes:
        name: The tensor's name.
        num_rows: Number of rows.
        rows: Half-open range. None: all rows.
        part: Role of the rows (``q``, ``k``, ``gate``). Sharding slices each role separately.
        offset: Number added to every value.
    """

    name: str
    num_rows: int
    rows: tuple[int, int] | None = None
    part: str = ""
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class WeightRecipe:
    """Segments, stacked by rows, then padded and stored in a format.

    Attributes:
        segments: Row ranges in order.
        shape: Shape before padding: ``[out, in]``, or more leading axes for experts.
        format: Data format name. None before precision is assigned.
        block_axis: ``in`` (blocks along the last axis) or ``out``.
        pad_rows: Number of zero rows at the end.
        is_stored: The file's tensors already have this block format. Do not quantize again.
        columns: The last axis's ranges to keep, concatenated. None: all columns.
    """

    segments: tuple[Segment, ...]
    shape: tuple[int, ...]
    format: str | None = None
    block_axis: str = "in"
    pad_rows: int = 0
    is_stored: bool = False
    columns: tuple[IndexRange, ...] | None = None

    @property
    def num_rows(self) -> int:
        """Return the rows of all segments. A vector has as many rows as elements."""
        return math.prod(self.shape[:-1]) if len(self.shape) > 1 else self.shape[0]

    @property
    def names(self) -> tuple[str, ...]:
        """Return the checkpoint tensors' names."""
        return tuple(segment.name for segment in self.segments)

    def with_format(self, format_name: str, block_axis: str) -> WeightRecipe:
        """Return a recipe for the same tensor in another format."""
        return dataclasses.replace(self, format=format_name, block_axis=block_axis, is_stored=False)

    def as_stored(self, format_name: str) -> WeightRecipe:
        """Return a recipe for the same tensor in its file format. All segments must have this
        format.
        """
        in_blocks = get_format(format_name).block > 1
        return dataclasses.replace(self, format=format_name, block_axis="in", is_stored=in_blocks)


def concatenate(recipes: list[WeightRecipe]) -> WeightRecipe:
    """Stack recipes with equal format along the first axis. Segments stay unchanged."""
    first = recipes[0]
    for other in recipes[1:]:
        assert (other.format, other.block_axis) == (first.format, first.block_axis)
        assert (other.is_stored, other.columns) == (first.is_stored, first.columns)
        assert other.shape[1:] == first.shape[1:] and not other.pad_rows
    segments = tuple(segment for recipe in recipes for segment in recipe.segments)
    rows = sum(recipe.shape[0] for recipe in recipes)
    return dataclasses.replace(first, segments=segments, shape=(rows, *first.shape[1:]))


def cut(recipe: WeightRecipe, first: int, last: int) -> tuple[Segment, ...]:
    """Return the segments for rows ``[first, last)``, for example for a single expert."""
    found, start = [], 0
    for segment in recipe.segments:
        low, high = max(first - start, 0), min(last - start, segment.num_rows)
        start += segment.num_rows
        if low >= high:
            continue
        if (low, high) != (0, segment.num_rows):
            begin = segment.rows[0] if segment.rows is not None else 0
            rows = (begin + low, begin + high)
            segment = dataclasses.replace(segment, num_rows=high - low, rows=rows)
        found.append(segment)
    return tuple(found)


def take(recipe: WeightRecipe, kept: Mapping[int, Sequence[IndexRange]]) -> WeightRecipe:
    """Return the recipe for a slice of a weight.

    Args:
        recipe: The recipe for the whole weight.
        kept: Ranges to keep, in order, by axis. ``columns`` slices the last axis. Segments slice
            the
            other axes.
    """
    shape, last = list(recipe.shape), len(recipe.shape) - 1
    for axis, runs in kept.items():
        assert all(run.start is not None for run in runs), "a rank's share holds no zeros"
        shape[axis] = sum(run.count for run in runs)
    columns = recipe.columns
    if last and last in kept:
        assert columns is None, "columns are cut once"
        columns = tuple(kept[last])
    segments = recipe.segments
    if any(axis != last or not last for axis in kept):
        places = [(0, 1)]
        for axis in range(max(1, last)):
            size = recipe.shape[axis]
            places = _inside(places, kept.get(axis, (IndexRange(0, size),)), size)
        segments = _joined([part for first, end in places for part in cut(recipe, first, end)])
    return dataclasses.replace(recipe, segments=segments, shape=tuple(shape), columns=columns)


def _inside(
    outer: list[tuple[int, int]], runs: Sequence[IndexRange], size: int
) -> list[tuple[int, int]]:
    """Return half-open ranges after adding an inner axis with ``runs``."""
    if [(run.start, run.count) for run in runs] == [(0, size)]:
        return [(first * size, end * size) for first, end in outer]
    indices = (index for first, end in outer for index in range(first, end))
    starts = [(index * size + (run.start or 0), run.count) for index in indices for run in runs]
    return [(start, start + count) for start, count in starts]


def _joined(segments: list[Segment]) -> tuple[Segment, ...]:
    """Merge adjacent segments."""
    found: list[Segment] = []
    for each in segments:
        before = found[-1] if found else None
        if before and before.rows and each.rows and before.rows[1] == each.rows[0]:
            longer = dataclasses.replace(
                each,
                num_rows=before.num_rows + each.num_rows,
                rows=(before.rows[0], each.rows[1]),
            )
            if longer == dataclasses.replace(before, num_rows=longer.num_rows, rows=longer.rows):
                found[-1] = longer
                continue
        found.append(each)
    return tuple(found)


def load_dense(recipe: WeightRecipe, get: Callable[[str], Tensor]) -> Tensor:
    """Load a recipe's float32 tensor, before quantization.

    ``get`` returns a checkpoint tensor by name, in its stored float type.

    Raises:
        CheckpointError: A tensor has the wrong shape, or contains NaN or inf.
    """
    parts = [_load_segment(segment, recipe, get) for segment in recipe.segments]
    dense = _finite(recipe.segments, parts)
    if recipe.pad_rows:
        dense = torch.cat((dense, dense.new_zeros((recipe.pad_rows, *dense.shape[1:]))))
    if len(recipe.shape) > 2:
        assert not recipe.pad_rows, "more axes are not padded"
        dense = dense.view(recipe.shape)
    return dense.contiguous()


@runtime_checkable
class ReadsRows(Protocol):
    """A tensor source with access to ranges of rows."""

    def rows(self, name: str, first: int, last: int) -> Tensor:
        """Return rows ``[first, last)`` of a matrix."""


@runtime_checkable
class ReadsStored(Protocol):
    """A tensor source with access to stored bytes."""

    def stored(self, name: str, first: int, last: int) -> Tensor:
        """Return the file bytes for rows ``[first, last)``: uint8 ``[rows, bytes]``.

        Rows are counted over all axes except the last.
        """


@runtime_checkable
class DecodesOnDevice(Protocol):
    """A tensor source or a checkpoint that can decode quantized tensors on a device."""

    def on(self, device: torch.device) -> Any:
        """Return the same with tensors on a device."""


@runtime_checkable
class StoresBlocks(DecodesOnDevice, Protocol):
    """A checkpoint that can have blocks on a device."""

    def stored_blocks(self, name: str, rows: slice | None = None) -> tuple[str, Tensor]:
        """Return the name of the blocks' format, and the blocks of some rows."""


@runtime_checkable
class ReadsParts(Protocol):
    """A tensor source with access to ranges of rows and columns."""

    def part(
        self, name: str, rows: tuple[int, int] | None, columns: tuple[int, int] | None
    ) -> Tensor:
        """Return rows and columns in half-open ranges. None: all.

        Rows are counted over all axes except the last. With a row range the result is ``[rows,
        columns]``.
        """


class LastTwoTensors:
    """A tensor source with a cache for the last two tensors.

    All experts may be rows of a tensor, or of a tensor for gate and another for up.
    """

    def __init__(self, get: Callable[[str], Tensor]) -> None:
        self._get = get
        self._tensors: dict[str, Tensor] = {}

    def __call__(self, name: str) -> Tensor:
        if name not in self._tensors:
            for oldest in list(self._tensors)[:-1]:
                del self._tensors[oldest]
            self._tensors[name] = self._get(name)
        return self._tensors[name]


def load_stored(recipe: WeightRecipe, get: ReadsStored, first: int, last: int) -> Tensor:
    """Return the bytes of rows ``[first, last)``, uint8 ``[rows, bytes]``, for an ``is_stored``
    recipe.

    Rows are counted over all axes except the last.
    """
    assert recipe.is_stored and not recipe.pad_rows
    parts = []
    for segment in cut(recipe, first, last):
        begin = segment.rows[0] if segment.rows is not None else 0
        parts.append(get.stored(segment.name, begin, begin + segment.num_rows))
    stored = torch.cat(parts) if len(parts) > 1 else parts[0]
    return stored if recipe.columns is None else _columns_stored(stored, recipe)


def _columns_stored(stored: Tensor, recipe: WeightRecipe) -> Tensor:
    """Select the bytes of the recipe's columns from the bytes of whole rows."""
    assert recipe.format is not None and recipe.columns is not None
    found = get_format(recipe.format)
    num_bytes = found.nbytes((1, found.block))
    parts = []
    for run in recipe.columns:
        first, left = divmod(run.start or 0, found.block)
        assert not left, "a block is cut"
        blocks = -(-run.count // found.block)
        parts.append(stored[:, first * num_bytes : (first + blocks) * num_bytes])
    return torch.cat(parts, dim=1).contiguous()


def load_rows(recipe: WeightRecipe, get: ReadsRows, first: int, last: int) -> Tensor:
    """Return rows ``[first, last)`` of the :func:`load_dense` result. The recipe must have no
    padding.

    Errors are as in :func:`load_dense`.
    """
    assert len(recipe.shape) == 2 and not recipe.pad_rows
    if isinstance(get, ReadsParts):
        part = dataclasses.replace(
            recipe, segments=cut(recipe, first, last), shape=(last - first, recipe.shape[1])
        )
        return load_dense(part, get)  # type: ignore[arg-type]
    parts, segments = [], cut(recipe, first, last)
    for segment in segments:
        begin = segment.rows[0] if segment.rows is not None else 0
        read = functools.partial(get.rows, first=begin, last=begin + segment.num_rows)
        whole = dataclasses.replace(segment, rows=None)
        shape = (segment.num_rows, recipe.shape[1])
        part = dataclasses.replace(recipe, segments=(whole,), shape=shape)
        parts.append(_load_segment(whole, part, read))
    return _finite(segments, parts).contiguous()


def load_values(recipe: WeightRecipe, get: Callable[[str], Tensor]) -> Tensor:
    """Load a recipe and return its float32 values in the recipe's format."""
    return values_of(load_dense(recipe, get), recipe)


def values_of(dense: Tensor, recipe: WeightRecipe) -> Tensor:
    """Return the float32 values of ``dense`` in the recipe's format.

    ``dense`` comes from :func:`load_dense`, or from :func:`load_rows` if rows do not cut a block.
    """
    assert recipe.format is not None
    if recipe.is_stored:
        return dense.contiguous()
    axis = -1 if recipe.block_axis == "in" or len(recipe.shape) == 1 else -2
    return get_format(recipe.format).round_trip(dense, axis=axis).contiguous()


def _load_segment(segment: Segment, recipe: WeightRecipe, get: Callable[[str], Tensor]) -> Tensor:
    expected = (segment.num_rows, *recipe.shape[1:][-1:])
    if isinstance(get, ReadsParts) and (segment.rows is not None or recipe.columns is not None):
        tensor = _read_part(segment, recipe, get)
    else:
        tensor = get(segment.name)
        if segment.rows is not None:
            tensor = tensor.flatten(0, -2) if tensor.dim() > 2 else tensor
            tensor = tensor[segment.rows[0] : segment.rows[1]].clone()
        if recipe.columns is not None:
            tensor = torch.cat([tensor[..., _slice(run)] for run in recipe.columns], dim=-1)
    is_one_of_a_stack = recipe.shape[0] == 1 and tensor.dim() < len(recipe.shape)
    if segment.rows is None and len(recipe.segments) == 1 and not is_one_of_a_stack:
        expected = recipe.shape
    if tuple(tensor.shape) != expected:
        raise CheckpointError(
            f"tensor {segment.name!r} has shape {list(tensor.shape)}; allowed: {list(expected)}"
        )
    tensor = tensor.flatten(0, -2) if tensor.dim() > 2 else tensor
    tensor = tensor.float()
    return tensor + segment.offset if segment.offset else tensor


def _finite(segments: Sequence[Segment], parts: Sequence[Tensor]) -> Tensor:
    """Concatenate loaded segments by rows.

    Raises:
        CheckpointError: A segment contains NaN or inf.
    """
    joined = parts[0] if len(parts) == 1 else torch.cat(tuple(parts))
    # A finite sum has finite terms. A single read from the device then checks all segments.
    if not bool(joined.sum().isfinite()):
        for segment, part in zip(segments, parts, strict=True):
            if not bool(part.isfinite().all()):
                name = segment.name
                raise CheckpointError(f"tensor {name!r} holds NaN or inf; allowed: finite values")
    return joined


def _slice(run: IndexRange) -> slice:
    start = run.start or 0
    return slice(start, start + run.count)


def _read_part(segment: Segment, recipe: WeightRecipe, get: ReadsParts) -> Tensor:
    if recipe.columns is None:
        return get.part(segment.name, segment.rows, None)
    places = [_slice(run) for run in recipe.columns]
    parts = [get.part(segment.name, segment.rows, (each.start, each.stop)) for each in places]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)
