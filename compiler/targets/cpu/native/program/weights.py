"""Streaming of a program's weights from recipes into a file (`mapping`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.compiler.formats import (
    GgmlFileFormat,
    GgmlFormat,
    ScaledCodes,
    ScaledEncoded,
    get_format,
)
from tilewright.compiler.ir.recipe import (
    LastTwoTensors,
    ReadsParts,
    ReadsRows,
    ReadsStored,
    WeightRecipe,
    cut,
    load_dense,
    load_rows,
    load_stored,
    values_of,
)
from tilewright.compiler.targets.cpu.native.numerics import (
    BF16,
    BLOCK_KINDS,
    FP16,
    FP32,
    K_KINDS,
    SCALED_CODES,
    VECTOR,
)
from tilewright.compiler.targets.cpu.native.program.mapping import (
    LANES,
    WEIGHTS,
    header,
    offsets_of,
    whole,
)
from tilewright.compiler.targets.cpu.native.program.panels import (
    code_panels,
    num_panels,
    padded,
    panel_bytes,
    scaled_panels,
    super_panels,
    value_panels,
)
from tilewright.compiler.targets.cpu.onnxruntime.codes import (
    SignedCodes,
    signed_codes,
    stored_codes,
)
from tilewright.compiler.targets.interface.base import Progress
from tilewright.errors import NoRoomError

PanelReader = Callable[[int, int, int], Tensor]
"""Returns the panels of rows ``[first, last)`` of a weight, padded with zero rows to ``count``."""

_CHUNK_VALUES = 1 << 22
"""Number of values per packing chunk. Temporaries need about 25 bytes per value."""


@dataclass(frozen=True, slots=True)
class NativeTensorSpec:
    """A requested tensor.

    Experts' panels follow each other, with whole panels per expert.

    Attributes:
        recipe: The values' source.
        kind: Panel storage, or ``vector`` for norms, biases and constants.
        is_paired: Rows are gate then up. Their panels alternate.
        num_lanes: Padded length of a bias, over all experts. 0: not a bias.
        num_taps: A convolution weight's taps, stored tap by tap. 0: not a convolution.
    """

    recipe: WeightRecipe
    kind: str
    is_paired: bool = False
    num_lanes: int = 0
    num_taps: int = 0

    @property
    def num_experts(self) -> int:
        """Return the weight's expert count, else 1."""
        return self.recipe.shape[0] if self.kind != VECTOR and len(self.recipe.shape) > 2 else 1

    @property
    def rows(self) -> int:
        """Return the weight's rows, or the vector's values, in storage."""
        return self.num_lanes or self.recipe.num_rows * (self.num_taps or 1)

    @property
    def columns(self) -> int:
        """Return the weight's columns. A vector has 1."""
        return 1 if self.kind == VECTOR else self.recipe.shape[-1]

    @property
    def num_bytes(self) -> int:
        """Return the bytes in storage."""
        if self.kind == VECTOR:
            return 4 * self.rows
        panels = num_panels(self.rows // self.num_experts, paired=self.is_paired)
        return self.num_experts * panels * panel_bytes(self.kind, self.columns)


def write_weights(
    wanted: Sequence[NativeTensorSpec],
    get_weight: Callable[[str], Tensor],
    folder: Path,
    progress: Progress,
    *,
    digest: bytes,
) -> None:
    """Stream all tensors into the weight file of the program ``digest`` in ``folder``.

    Raises:
        CheckpointError: A tensor is missing, has the wrong shape, or is not finite.
        NoRoomError: The file cannot be written.
    """
    sizes = [each.num_bytes for each in wanted]
    offsets = offsets_of(sizes)
    try:
        with (folder / WEIGHTS).open("wb") as file:
            file.write(header(sizes, digest))
            for done, each in enumerate(wanted):
                for part in _parts(each, get_weight):
                    file.write(part.numpy().data)
                file.write(bytes(offsets[done + 1] - file.tell()))
                progress("weights", done + 1, len(wanted))
    except OSError as error:
        raise NoRoomError(
            f"{folder}: the packed weights cannot be written ({error.strerror}); "
            "allowed: a folder with room for them (TMPDIR, TILEWRIGHT_CACHE)"
        ) from None


def _parts(wanted: NativeTensorSpec, get: Callable[[str], Tensor]) -> Iterator[Tensor]:
    """Yield a tensor's bytes as uint8 arrays in order."""
    if wanted.kind == VECTOR:
        dense = load_dense(wanted.recipe, get)
        if wanted.num_taps:
            dense = dense.view(-1, wanted.num_taps).T
        yield (_bias(dense, wanted) if wanted.num_lanes else dense).contiguous().view(torch.uint8)
        return
    if len(wanted.recipe.shape) > 2:
        keeps_format = wanted.recipe.is_stored and wanted.kind in BLOCK_KINDS
        reads_parts = keeps_format or isinstance(get, ReadsParts)
        source = get if reads_parts else LastTwoTensors(get)
        for expert in _experts(wanted.recipe):
            yield from _panels(dataclasses.replace(wanted, recipe=expert), source)
    else:
        yield from _panels(wanted, get)


def _experts(recipe: WeightRecipe) -> Iterator[WeightRecipe]:
    """Yield the recipe ``[out, in]`` of each expert."""
    num_experts, num_rows, num_columns = recipe.shape
    for index in range(num_experts):
        segments = cut(recipe, index * num_rows, (index + 1) * num_rows)
        yield dataclasses.replace(recipe, segments=segments, shape=(num_rows, num_columns))


def _panels(wanted: NativeTensorSpec, get: Callable[[str], Tensor]) -> Iterator[Tensor]:
    """Yield a weight's or an expert's panels."""
    read = (_super_reader if wanted.kind in K_KINDS else _reader)(wanted, get)
    half = wanted.rows // 2 if wanted.is_paired else wanted.rows
    step = max(1, _CHUNK_VALUES // wanted.columns // (2 * LANES)) * 2 * LANES
    end = whole(half, LANES if wanted.is_paired else 2 * LANES)
    for first in range(0, end, step):
        last = min(first + step, end)
        if not wanted.is_paired:
            yield read(first, min(last, half), last - first)
            continue
        gate = read(first, min(last, half), last - first)
        up = read(half + first, half + min(last, half), last - first)
        yield torch.stack((gate, up), dim=1).contiguous()


def _reader(wanted: NativeTensorSpec, get: Callable[[str], Tensor]) -> PanelReader:
    """Return a function for the panels of rows ``[first, last)``, padded with zero rows."""
    recipe, kind = wanted.recipe, wanted.kind
    assert recipe.format is not None
    is_whole = recipe.block_axis == "out" or not isinstance(get, ReadsRows) or recipe.pad_rows
    kept = None
    if is_whole and not (recipe.is_stored and kind in BLOCK_KINDS):
        kept = load_dense(recipe, get)
        kept = values_of(kept, recipe) if recipe.block_axis == "out" else kept

    def dense_of(first: int, last: int) -> Tensor:
        if kept is not None:
            return kept[first:last]
        assert isinstance(get, ReadsRows)
        return load_rows(recipe, get, first, last)

    def encoded_of(first: int, last: int) -> ScaledEncoded:
        """Return the file's codes and scales, or quantize."""
        number_format = get_format(kind)
        assert isinstance(number_format, GgmlFormat | ScaledCodes)
        if not recipe.is_stored:
            return number_format.quantise(dense_of(first, last))
        assert isinstance(get, ReadsStored)
        stored = load_stored(recipe, get, first, last)
        return number_format.read(stored.reshape(-1), (last - first, wanted.columns))

    def codes_of(first: int, last: int) -> tuple[SignedCodes, Tensor | None]:
        """Return codes, scales, and minimums if the format has them."""
        number_format = get_format(kind)
        if isinstance(number_format, GgmlFormat) and number_format.has_minimums:
            encoded = encoded_of(first, last)
            assert encoded.minimums is not None
            codes, scales = encoded.codes.view(torch.int8), number_format.scales(encoded)
            return SignedCodes(codes, scales, number_format.block), encoded.minimums.float()
        if not recipe.is_stored:
            return signed_codes(dense_of(first, last), kind), None
        assert isinstance(get, ReadsStored)
        stored = load_stored(recipe, get, first, last)
        return stored_codes(stored, (last - first, wanted.columns), kind), None

    def read(first: int, last: int, count: int) -> Tensor:
        if kind in (FP32, BF16, FP16):
            dense = dense_of(first, last)
            values = dense if recipe.block_axis == "out" else values_of(dense, recipe)
            return value_panels(padded(values, (0, 0, 0, count - len(values))), kind)
        missing = (0, 0, 0, count - (last - first))
        if kind in SCALED_CODES:
            encoded = encoded_of(first, last)
            codes, scales = padded(encoded.codes, missing), padded(encoded.scales, missing)
            return scaled_panels(ScaledEncoded(codes, scales, -1), kind)
        signed, minimums = codes_of(first, last)
        codes, scales = padded(signed.codes, missing), padded(signed.scales, missing)
        signed = SignedCodes(codes, scales, signed.block)
        least = None if minimums is None else padded(minimums, missing)
        return code_panels(signed, kind, ", ".join(recipe.names[:4]), minimums=least)

    return read


def _super_reader(
    wanted: NativeTensorSpec, get: Callable[[str], Tensor]
) -> Callable[[int, int, int], Tensor]:
    """Return a reader for K-quant weights, like :func:`_reader`."""
    found, kind = get_format(wanted.kind), wanted.kind
    assert isinstance(found, GgmlFileFormat) and isinstance(get, ReadsStored)

    def read(first: int, last: int, count: int) -> Tensor:
        stored = load_stored(wanted.recipe, get, first, last)
        blocks = found.read(padded(stored, (0, 0, 0, count - len(stored))))
        return super_panels(blocks, kind, wanted.columns)

    return read


def _bias(dense: Tensor, wanted: NativeTensorSpec) -> Tensor:
    """Return a bias in the order of its matmul's panels, expert by expert."""
    if dense.dim() > 2:
        expert = dataclasses.replace(wanted, num_lanes=wanted.num_lanes // len(dense))
        return torch.cat([_bias(bias.flatten(), expert) for bias in dense])
    if not wanted.is_paired:
        return padded(dense, (0, wanted.num_lanes - len(dense)))
    half = len(dense) // 2
    parts = padded(dense.view(2, half), (0, wanted.num_lanes // 2 - half))
    return parts.view(2, -1, LANES).transpose(0, 1).reshape(-1)


def tensor_bytes(recipe: WeightRecipe, kind: str) -> int:
    """Return a weight's bytes in storage, without padding required by its matmul."""
    if kind == VECTOR:
        return 4 * math.prod(recipe.shape)
    return NativeTensorSpec(recipe, kind).num_bytes
