"""Weights in code tiles: packing from a recipe, and unpacking.

A stored weight has the codes and scales of its file. Other weights are quantized.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from tilewright.compiler.formats import (
    GgmlFileFormat,
    GgmlFormat,
    ScaledCodes,
    ScaledEncoded,
    get_format,
)
from tilewright.compiler.ir.recipe import ReadsStored, WeightRecipe, load_dense, load_stored
from tilewright.compiler.targets.cuda.weights.coded_tiles import (
    CODEBOOKS,
    CODED_TILES,
    E4M3,
    FLOAT4,
    INTEGER,
    CodedRows,
    tile_rows,
    untile_rows,
)
from tilewright.compiler.targets.cuda.weights.experts import on_device
from tilewright.compiler.targets.cuda.weights.packed_weight import TILE_ROWS, PackedWeight
from tilewright.compiler.targets.cuda.weights.packing import GROUP, check_pairs
from tilewright.compiler.targets.cuda.weights.packing_nvfp4 import scales_of, split_scales
from tilewright.errors import CheckpointError

_CHUNK_ELEMENTS = 1 << 26
_TILE_COLUMNS = 128


def pack_coded(
    recipe: WeightRecipe,
    get_weight: Callable[[str], Tensor],
    device: torch.device,
    *,
    paired: bool,
) -> PackedWeight:
    """Return a weight ``[out, in]`` in code tiles.

    Raises:
        CheckpointError: A tensor is missing, has another shape, or is not finite.
    """
    format_name = recipe.format
    assert format_name is not None and len(recipe.shape) == 2
    num_rows, num_columns = recipe.shape
    if paired:
        check_pairs(num_rows, ", ".join(recipe.names))
    dense = None
    if not recipe.is_stored:
        with torch.device(device):  # generated weights
            dense = load_dense(recipe, on_device(get_weight, device))
    step = max(1, _CHUNK_ELEMENTS // (num_columns * TILE_ROWS)) * TILE_ROWS
    parts, factors = [], []
    for first in range(0, num_rows, step):
        last = min(first + step, num_rows)
        recipe_rows = _recipe_rows(first, last, num_rows, paired)
        if dense is not None:
            rows = _quantised(recipe, dense[recipe_rows.to(device)])
        else:
            assert isinstance(get_weight, ReadsStored)
            rows = _stored(recipe, get_weight, recipe_rows, device)
        parts.append(tile_rows(rows, CODED_TILES[format_name]))
        if rows.second_scales is not None:
            factors.append(rows.second_scales)
    data = parts[0] if len(parts) == 1 else torch.cat(parts)
    second_scales = None
    if factors:
        padding = factors[0].new_ones(-num_rows % TILE_ROWS)
        second_scales = torch.cat((*factors, padding))
    return PackedWeight(
        format_name,
        num_rows,
        num_columns,
        data.contiguous(),
        is_paired=paired,
        second_scales=second_scales,
    )


def unpack_coded(weight: PackedWeight) -> Tensor:
    """Return the float32 values ``[num_rows, num_columns]``, in tile order."""
    tile = CODED_TILES[weight.format]
    rows = untile_rows(weight.data, tile)
    if weight.second_scales is not None:
        scales = scales_of(rows.scales, weight.second_scales)
    else:
        scales = rows.scales.float()
    if rows.factors is not None:
        scales = rows.factors.float().repeat_interleave(tile.num_groups, 1) * scales
    values = _code_values(rows.codes, weight.format) * scales.repeat_interleave(tile.group, 1)
    if rows.minimums is not None:
        minima = rows.minimums.float()
        if rows.minimum_factors is not None:
            factors = rows.minimum_factors.float()
            minima = factors.repeat_interleave(tile.num_groups, 1) * minima
        minima = minima.repeat_interleave(tile.group, 1)
        values = values - minima if tile.subtracts else values + minima
    return values[: weight.num_rows, : weight.num_columns].contiguous()


def _recipe_rows(first: int, last: int, num_rows: int, paired: bool) -> Tensor:
    """Return the recipe's rows for a range. Pairs alternate: 8 gate rows, then 8 up rows."""
    weight = torch.arange(first, last)
    if not paired:
        return weight
    return weight // (2 * GROUP) * GROUP + weight % GROUP + weight // GROUP % 2 * (num_rows // 2)


def _quantised(recipe: WeightRecipe, dense: Tensor) -> CodedRows:
    assert recipe.format is not None
    result = get_format(recipe.format)
    # Flat: the codec splits rows into chunks for a CPU cache.
    is_flat = dense.device.type != "cpu" and dense.shape[1] % result.block == 0
    encoded = result.quantise(dense.reshape(1, -1) if is_flat else dense)
    assert isinstance(encoded, ScaledEncoded)
    try:
        return _of_encoded(encoded, len(dense), recipe.format)
    except CheckpointError as error:
        raise CheckpointError(f"{', '.join(recipe.names)}: {error}") from None


def _stored(
    recipe: WeightRecipe, get_weight: ReadsStored, recipe_rows: Tensor, device: torch.device
) -> CodedRows:
    """Return rows with the file's codes. Adjacent rows are read together."""
    format_name = recipe.format
    assert format_name is not None
    result, num_columns = get_format(format_name), recipe.shape[1]
    ordered, order = recipe_rows.sort()
    ends = [0, *((ordered.diff() != 1).nonzero().flatten() + 1).tolist(), len(recipe_rows)]
    is_file_format = isinstance(result, GgmlFileFormat)  # read on the CPU
    runs = [
        load_stored(recipe, get_weight, int(ordered[a]), int(ordered[b - 1]) + 1).to(
            "cpu" if is_file_format else device
        )
        for a, b in pairwise(ends)
    ]
    data = runs[0] if len(runs) == 1 else torch.cat(runs)
    if not torch.equal(ordered, recipe_rows):
        data = data[order.argsort()]
    try:
        if isinstance(result, GgmlFileFormat):
            return _of_super_blocks(result, data, num_columns, device)
        assert isinstance(result, GgmlFormat | ScaledCodes)
        encoded = result.read(data.flatten(), (len(data), num_columns))
        return _of_encoded(encoded, len(data), format_name)
    except CheckpointError as error:
        raise CheckpointError(f"{', '.join(recipe.names)}: {error}") from None


def _of_encoded(encoded: ScaledEncoded, num_rows: int, format_name: str) -> CodedRows:
    minima = encoded.minimums
    rows = CodedRows(
        encoded.codes.view(torch.uint8).reshape(num_rows, -1),
        encoded.scales.reshape(num_rows, -1),
        minimums=None if minima is None else minima.reshape(num_rows, -1),
    )
    _check_finite(format_name, rows.scales, rows.minimums)
    return split_scales(rows) if CODED_TILES[format_name].values == FLOAT4 else rows


def _of_super_blocks(
    result: GgmlFileFormat, data: Tensor, num_columns: int, device: torch.device
) -> CodedRows:
    """Return K-quants. A block's factors are repeated for its two tiles."""
    blocks = result.read(data)
    tiles = -(-num_columns // _TILE_COLUMNS)
    factors = blocks.factors.repeat_interleave(2, dim=1)[:, :tiles]
    minima = None
    if blocks.minimums is not None:
        pairs = blocks.factors.view(len(data), -1, 2)
        factors, minima = (item.repeat_interleave(2, dim=1)[:, :tiles] for item in pairs.unbind(-1))
    group = CODED_TILES[result.name].group
    groups = tiles * (_TILE_COLUMNS // group)
    minimums = blocks.minimums
    rows = (
        blocks.codes[:, :num_columns],
        blocks.scales[:, :groups],
        factors,
        None if minimums is None else minimums[:, :groups],
        minima,
    )
    return CodedRows(*(item if item is None else item.to(device) for item in rows))  # type: ignore[arg-type]


def _check_finite(format_name: str, *numbers: Tensor | None) -> None:
    if not all(item is None or bool(item.isfinite().all()) for item in numbers):
        raise CheckpointError(f"{format_name}: a scale is inf or NaN; allowed: finite scales")


def _code_values(codes: Tensor, format_name: str) -> Tensor:
    """Return the float32 values before scales."""
    tile = CODED_TILES[format_name]
    if tile.values == E4M3:
        return codes.view(torch.float8_e4m3fn).float()
    if tile.values == INTEGER and tile.low_bits == 8:
        return codes.view(torch.int8).float()
    if tile.values == INTEGER:
        return codes.float() - tile.zero
    codebook = CODEBOOKS[format_name]
    return torch.tensor(codebook, device=codes.device)[codes.long()]
