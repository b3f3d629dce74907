"""Weights as ONNX Runtime's operators read them, streamed into one external-data file.

A block becomes unsigned codes with zero point 128 or 8 and a float scale: the same values, bit for
bit, for bfp8 and bfp4 (16 codes, a power of two) and for q80 and q40 (32 codes, a float16).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import onnx
import torch
from torch import Tensor
from torch.nn.functional import pad

from tilewright.compiler.errors import NoRoomError
from tilewright.compiler.formats import (
    BlockEncoded,
    BlockFloat,
    DataFormat,
    GgmlFormat,
    ScaledEncoded,
    get_format,
)
from tilewright.compiler.ir.recipe import (
    ReadsRows,
    WeightRecipe,
    load_dense,
    load_rows,
    load_values,
    values_of,
)
from tilewright.compiler.targets.cpu.numerics import NATIVE_BITS, ExpertLayout, block_layout

_MAX_NAMES = 8  # experts may have a tensor each
_CHUNK_VALUES = 1 << 23  # of a table read by rows: 32 MB, and some times that while it is packed
_ROW_MULTIPLE = 32  # no block along the rows is cut
_ALIGNMENT = 4096  # external data is mapped into memory page by page


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Initializer names of a block of experts: ``into [E, 2 I, C]`` has each expert's rows of gate
    and up in turn, ``out [E, C, I]`` is down; with the scales of their blocks, where they have any.
    """

    into: str
    out: str
    into_scales: str = ""
    out_scales: str = ""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """Initializer names of a MatMulNBits weight."""

    codes: str
    scales: str
    bits: int
    block: int
    num_rows: int
    num_columns: int


class WeightFile:
    """Writes tensors one after another and remembers where; equal recipes are written once."""

    def __init__(self, path: Path, get_weight: Callable[[str], Tensor]) -> None:
        self.path = path
        self.num_bytes = 0
        self.initializers: list[onnx.TensorProto] = []
        self._get_weight = get_weight
        self._file: BinaryIO = path.open("wb")
        self._written: dict[tuple[WeightRecipe, str], str | BlockWeight] = {}

    def close(self) -> None:
        """Write what is left.

        Raises:
            NoRoomError: when it cannot be.
        """
        with self._no_room():
            self._file.close()

    def dense(self, recipe: WeightRecipe, *, transposed: bool = False) -> str:
        """The name of the recipe's values as float32, ``[out, in]`` or ``[in, out]``."""
        kind = "transposed" if transposed else "dense"
        if (recipe, kind) not in self._written:
            shape, chunks = recipe.shape, (rows.numpy() for rows in self._value_rows(recipe))
            name, real = self._new_name(recipe, kind), onnx.TensorProto.FLOAT
            if transposed:
                self._write_columns(name, chunks, (shape[1], shape[0]), real)
            else:
                self._write(name, chunks, shape, real)
            self._written[recipe, kind] = name
        found = self._written[recipe, kind]
        assert isinstance(found, str)
        return found

    def bfloat16(self, recipe: WeightRecipe) -> str:
        """The values of a bf16 recipe in two bytes each: the initializer's name."""
        if (recipe, "bfloat16") not in self._written:
            values = self._value_rows(recipe)
            chunks = (rows.bfloat16().view(torch.int16).numpy() for rows in values)
            name = self._new_name(recipe, "bfloat16")
            self._write(name, chunks, recipe.shape, onnx.TensorProto.BFLOAT16)
            self._written[recipe, "bfloat16"] = name
        found = self._written[recipe, "bfloat16"]
        assert isinstance(found, str)
        return found

    def blocks(self, recipe: WeightRecipe) -> BlockWeight:
        """A recipe in a native format: codes ``[out, in / block, block * bits / 8]``, scales."""
        if (recipe, "blocks") not in self._written:
            assert recipe.format is not None and recipe.block_axis == "in"
            layout = block_layout(recipe.shape, recipe.format)
            shape = layout.num_rows, layout.num_blocks, layout.block_bytes
            name, scales = self._new_name(recipe, "codes"), list[np.ndarray]()
            self._write(name, self._code_rows(recipe, scales), shape, onnx.TensorProto.UINT8)
            self._written[recipe, "blocks"] = BlockWeight(
                name,
                self._add(recipe, "scales", np.concatenate(scales), onnx.TensorProto.FLOAT),
                NATIVE_BITS[recipe.format],
                get_format(recipe.format).block,
                *recipe.shape,
            )
        entry = self._written[recipe, "blocks"]
        assert isinstance(entry, BlockWeight)
        return entry

    def experts(
        self, gate: WeightRecipe, up: WeightRecipe, down: WeightRecipe, layout: ExpertLayout | None
    ) -> ExpertWeights:
        """A block of experts, in blocks of ``layout`` or, without one, as float32 values.

        The last expert comes first: see ``emit_experts``.
        """
        real = onnx.TensorProto.FLOAT
        if layout is None:
            turns = _in_turn(self.values(gate).numpy(), self.values(up).numpy())
            return ExpertWeights(
                self._add(gate, "experts", _last_first(turns), real),
                self._add(down, "experts", _last_first(self.values(down).numpy()), real),
            )
        inner = layout.padded(gate.shape[1])
        gate_codes, gate_scales = self._expert_codes(gate, layout, inner)
        up_codes, up_scales = self._expert_codes(up, layout, inner)
        codes, scales = self._expert_codes(down, layout, down.shape[1])
        bytes_ = onnx.TensorProto.UINT8
        return ExpertWeights(
            self._add(gate, "codes", _last_first(_in_turn(gate_codes, up_codes)), bytes_),
            self._add(down, "codes", _last_first(codes), bytes_),
            self._add(gate, "scales", _last_first(_in_turn(gate_scales, up_scales)), real),
            self._add(down, "scales", _last_first(scales), real),
        )

    def _expert_codes(
        self, recipe: WeightRecipe, layout: ExpertLayout, num_rows: int
    ) -> tuple[np.ndarray, np.ndarray]:
        assert recipe.format is not None and recipe.block_axis == "in"
        dense = load_dense(recipe, self._get_weight)
        return expert_codes(dense, recipe.format, layout, num_rows)

    def table(self, name: str, array: np.ndarray) -> str:
        """A float32 constant that is no weight, kept outside the model for its size: its name."""
        self._write(name, [array], array.shape, onnx.TensorProto.FLOAT, is_weight=False)
        return name

    def values(self, recipe: WeightRecipe) -> Tensor:
        """The float32 values of a recipe in its format."""
        return load_values(recipe, self._get_weight)

    def _dense_rows(self, recipe: WeightRecipe) -> Iterator[Tensor]:
        """All rows of a recipe as float32, some at a time where its tensors can be read so."""
        shape, get = recipe.shape, self._get_weight
        step = max(1, _CHUNK_VALUES // shape[-1] // _ROW_MULTIPLE) * _ROW_MULTIPLE
        if len(shape) != 2 or shape[0] <= step or not isinstance(get, ReadsRows):
            yield load_dense(recipe, get)
            return
        for first in range(0, shape[0], step):
            yield load_rows(recipe, get, first, min(first + step, shape[0]))

    def _value_rows(self, recipe: WeightRecipe) -> Iterator[Tensor]:
        """The values that its format has, the same way."""
        for rows in self._dense_rows(recipe):
            yield values_of(rows, recipe)

    def _code_rows(self, recipe: WeightRecipe, scales: list[np.ndarray]) -> Iterator[np.ndarray]:
        """Its codes, the same way; the scales of their blocks are added to ``scales``."""
        assert recipe.format is not None
        for rows in self._dense_rows(recipe):
            codes, of_rows = block_codes(rows, recipe.format)
            scales.append(of_rows)
            yield codes

    def _add(self, recipe: WeightRecipe, kind: str, array: np.ndarray, data_type: int) -> str:
        name = self._new_name(recipe, kind)
        self._write(name, [array], array.shape, data_type)
        return name

    def _new_name(self, recipe: WeightRecipe, kind: str) -> str:
        # numbered: other rows of the same tensor, or blocks along out, have the same names
        number = len(self.initializers)
        names = recipe.names if len(recipe.names) <= _MAX_NAMES else (recipe.names[0], "others")
        return f"{'+'.join(names)}.{recipe.format}.{kind}.{number}"

    def _write(
        self,
        name: str,
        chunks: Iterable[np.ndarray],
        shape: tuple[int, ...],
        data_type: int,
        *,
        is_weight: bool = True,
    ) -> None:
        """A tensor of which ``chunks`` are the rows, from the first to the last."""
        offset = self._begin()
        for chunk in chunks:
            with self._no_room():
                self._file.write(chunk.data)
        self._end(name, offset, shape, data_type, is_weight=is_weight)

    def _write_columns(
        self, name: str, chunks: Iterable[np.ndarray], shape: tuple[int, int], data_type: int
    ) -> None:
        """A tensor of which ``chunks``, turned, are the columns."""
        num_columns, offset, done = shape[1], self._begin(), 0
        for chunk in chunks:
            turned = np.ascontiguousarray(chunk.T)
            is_whole = turned.shape == shape
            with self._no_room():
                for row, part in enumerate([turned] if is_whole else turned):
                    self._file.seek(offset + (row * num_columns + done) * part.itemsize)
                    self._file.write(part.data)
            done += turned.shape[1]
        self._end(name, offset, shape, data_type, is_weight=True)

    def _begin(self) -> int:
        """Pad the file up to where the next tensor begins: its offset."""
        position = self._file.tell()
        with self._no_room():
            self._file.write(bytes(-position % _ALIGNMENT))
        return self._file.tell()

    def _end(
        self, name: str, offset: int, shape: tuple[int, ...], data_type: int, *, is_weight: bool
    ) -> None:
        length = self._file.tell() - offset
        self.num_bytes += length if is_weight else 0
        tensor = onnx.TensorProto(name=name, data_type=data_type, dims=shape)
        tensor.data_location = onnx.TensorProto.EXTERNAL
        for key, value in (
            ("location", self.path.name),
            ("offset", str(offset)),
            ("length", str(length)),
        ):
            tensor.external_data.add(key=key, value=value)
        self.initializers.append(tensor)

    @contextlib.contextmanager
    def _no_room(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise NoRoomError(
                f"{self.path.parent}: the packed weights cannot be written ({error.strerror}); "
                "allowed: a folder with room for them (TMPDIR, TILEWRIGHT_CACHE)"
            ) from None


def block_codes(dense: Tensor, format_name: str) -> tuple[np.ndarray, np.ndarray]:
    """MatMulNBits' codes and scales of a dense ``[out, in]`` weight in a native format.

    The last block of a row is padded with zeros when ``in`` is no multiple of the block.
    """
    layout = block_layout(tuple(dense.shape), format_name)
    signed, scales = _signed_codes(dense, get_format(format_name))
    del dense  # four times as large as what follows, and nobody else's
    width = layout.num_blocks * layout.block
    codes = _unsigned(signed, NATIVE_BITS[format_name], (layout.num_rows, width))
    shape = layout.num_rows, layout.num_blocks, layout.block_bytes
    return codes.reshape(shape), scales.numpy().reshape(-1)


def expert_codes(
    dense: Tensor, format_name: str, layout: ExpertLayout, num_rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """QMoE's codes ``[E, num_rows, C * bits / 8]`` and scales ``[E, num_rows, C / block]`` of a
    dense ``[E, O, C]`` weight in a native format, whose values they have exactly.

    C is padded to whole blocks, rows up to ``num_rows``, with zeros.
    """
    (num_experts, num_given, num_columns), number_format = dense.shape, get_format(format_name)
    signed, scales = _signed_codes(dense.flatten(0, 1), number_format)
    del dense
    width = layout.padded(num_columns)
    padding = (0, width - num_columns, 0, num_rows - num_given)
    signed = pad(signed.view(num_experts, num_given, num_columns), padding).flatten(0, 1)
    scales = scales.view(num_experts, num_given, -1)
    scales = scales.repeat_interleave(number_format.block // layout.block, -1)
    scales = pad(scales[..., : width // layout.block], (0, 0, 0, num_rows - num_given))
    codes = _unsigned(signed, layout.bits, (num_experts * num_rows, width))
    return codes.reshape(num_experts, num_rows, -1), scales.numpy()


def _in_turn(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Rows of ``gate [E, I, ...]`` and of ``up`` one after the other: ``[E, 2 I, ...]``."""
    num_experts, num_rows, *rest = gate.shape
    return np.stack((gate, up), axis=2).reshape(num_experts, 2 * num_rows, *rest)


def _last_first(array: np.ndarray) -> np.ndarray:
    """The first axis the other way round."""
    found: np.ndarray = np.ascontiguousarray(array[::-1])
    return found


def _unsigned(signed: Tensor, bits: int, shape: tuple[int, int]) -> np.ndarray:
    """Codes around the zero point of so many bits; the last columns are zeros."""
    codes: np.ndarray = np.full(shape, 1 << (bits - 1), dtype=np.uint8)
    codes[:, : signed.shape[1]] += signed.numpy().view(np.uint8)  # modulo 256: two's complement
    return codes[:, 0::2] | (codes[:, 1::2] << 4) if bits == 4 else codes


def _signed_codes(dense: Tensor, number_format: DataFormat) -> tuple[Tensor, Tensor]:
    """int8 codes ``[out, in]`` around zero, and the float32 scale of each block."""
    encoded = number_format.quantise(dense, axis=-1)
    if isinstance(encoded, ScaledEncoded):
        assert isinstance(number_format, GgmlFormat)
        codes = encoded.codes.to(torch.int8) - number_format.zero_point
        return codes, number_format.scales(encoded)
    assert isinstance(number_format, BlockFloat) and isinstance(encoded, BlockEncoded)
    return encoded.mantissas[:, : dense.shape[1]], number_format.scales(encoded)
