"""Weights for ONNX Runtime's operators, streamed into an external-data file."""

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

from tilewright.compiler.formats import get_format
from tilewright.compiler.ir.recipe import (
    ReadsRows,
    ReadsStored,
    WeightRecipe,
    load_dense,
    load_rows,
    load_stored,
    load_values,
    values_of,
)
from tilewright.compiler.targets.cpu.onnxruntime.codes import (
    SignedCodes,
    block_codes,
    expert_codes,
    signed_codes,
    stored_codes,
)
from tilewright.compiler.targets.cpu.onnxruntime.numerics import (
    NATIVE_BITS,
    ExpertLayout,
    block_layout,
)
from tilewright.errors import NoRoomError

_MAX_NAMES = 8  # experts may each have a tensor
_CHUNK_VALUES = 1 << 23  # of a table read by rows: 32 MB, and some times that while it is packed
_ROW_MULTIPLE = 32  # no split of blocks along rows
_ALIGNMENT = 4096  # external data is mapped into memory page by page


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """Initializer names for an expert block.

    ``into [E, 2 I, C]`` has alternating gate and up rows per expert. ``out [E, C, I]`` is down.
    Block formats also have scales.
    """

    into: str
    out: str
    into_scales: str = ""
    out_scales: str = ""


@dataclass(frozen=True, slots=True)
class BlockWeight:
    """Initializer names for a MatMulNBits weight."""

    codes: str
    scales: str
    bits: int
    block: int
    num_rows: int
    num_columns: int


class WeightFile:
    """Writes tensors sequentially and records offsets. Equal recipes are written once."""

    def __init__(self, path: Path, get_weight: Callable[[str], Tensor]) -> None:
        self.path = path
        self.num_bytes = 0
        self.initializers: list[onnx.TensorProto] = []
        self._get_weight = get_weight
        self._file: BinaryIO = path.open("wb")
        self._written: dict[tuple[WeightRecipe, str], str | BlockWeight] = {}

    def close(self) -> None:
        """Write remaining data and close the file.

        Raises:
            NoRoomError: The file cannot be written.
        """
        with self._no_room():
            self._file.close()

    def dense(self, recipe: WeightRecipe, *, transposed: bool = False) -> str:
        """Return the name of a recipe's float32 values, ``[out, in]`` or ``[in, out]``."""
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
        """Return the name of a bf16 recipe's values in bfloat16."""
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
        """Return the names for a native format: codes ``[out, in / block, block * bits / 8]`` and
        scales.
        """
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
        """Return the names for an expert block, in ``layout`` blocks or as float32 values.

        The last expert is first: see ``emit_experts``.
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
        if recipe.is_stored:
            signed = self._stored_codes(recipe, 0, recipe.num_rows)
        else:
            dense = load_dense(recipe, self._get_weight)
            signed = signed_codes(dense.flatten(0, 1), recipe.format)
            del dense
        return expert_codes(signed, layout, num_experts=recipe.shape[0], num_rows=num_rows)

    def table(self, name: str, array: np.ndarray) -> str:
        """Write a large float32 constant outside the model. Return its name."""
        self._write(name, [array], array.shape, onnx.TensorProto.FLOAT, is_weight=False)
        return name

    def values(self, recipe: WeightRecipe) -> Tensor:
        """Return a recipe's float32 values in its format."""
        return load_values(recipe, self._get_weight)

    def _dense_rows(self, recipe: WeightRecipe) -> Iterator[Tensor]:
        """Yield all rows of a recipe as float32, in chunks if its tensors support this."""
        shape, get = recipe.shape, self._get_weight
        step = _row_step(shape[-1])
        if len(shape) != 2 or shape[0] <= step or not isinstance(get, ReadsRows):
            yield load_dense(recipe, get)
            return
        for first in range(0, shape[0], step):
            yield load_rows(recipe, get, first, min(first + step, shape[0]))

    def _value_rows(self, recipe: WeightRecipe) -> Iterator[Tensor]:
        """Yield the rows after rounding to the recipe's format."""
        for rows in self._dense_rows(recipe):
            yield values_of(rows, recipe)

    def _code_rows(self, recipe: WeightRecipe, scales: list[np.ndarray]) -> Iterator[np.ndarray]:
        """Yield the rows' codes. Append their block scales to ``scales``."""
        assert recipe.format is not None
        for signed in self._signed_rows(recipe):
            codes, of_rows = block_codes(signed, recipe.format)
            scales.append(of_rows)
            yield codes

    def _signed_rows(self, recipe: WeightRecipe) -> Iterator[SignedCodes]:
        """Yield the rows' codes around zero. Stored codes are copied from the checkpoint."""
        assert recipe.format is not None
        if not recipe.is_stored:
            for rows in self._dense_rows(recipe):
                yield signed_codes(rows, recipe.format)
            return
        step = _row_step(recipe.shape[-1])
        for first in range(0, recipe.shape[0], step):
            yield self._stored_codes(recipe, first, min(first + step, recipe.shape[0]))

    def _stored_codes(self, recipe: WeightRecipe, first: int, last: int) -> SignedCodes:
        assert recipe.format is not None and isinstance(self._get_weight, ReadsStored)
        data = load_stored(recipe, self._get_weight, first, last)
        return stored_codes(data, (last - first, recipe.shape[-1]), recipe.format)

    def _add(self, recipe: WeightRecipe, kind: str, array: np.ndarray, data_type: int) -> str:
        name = self._new_name(recipe, kind)
        self._write(name, [array], array.shape, data_type)
        return name

    def _new_name(self, recipe: WeightRecipe, kind: str) -> str:
        # The number distinguishes rows of the same tensor, or blocks along out, with equal names.
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
        """Write a tensor with ``chunks`` as consecutive rows."""
        offset = self._begin()
        for chunk in chunks:
            with self._no_room():
                self._file.write(chunk.data)
        self._end(name, offset, shape, data_type, is_weight=is_weight)

    def _write_columns(
        self, name: str, chunks: Iterable[np.ndarray], shape: tuple[int, int], data_type: int
    ) -> None:
        """Write a tensor with transposed ``chunks`` as consecutive columns."""
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
        """Pad the file to the next tensor's alignment. Return the offset."""
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


def _row_step(num_columns: int) -> int:
    """Return the number of rows per chunk."""
    return max(1, _CHUNK_VALUES // num_columns // _ROW_MULTIPLE) * _ROW_MULTIPLE


def _in_turn(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    """Interleave rows of ``gate [E, I, ...]`` and ``up``: ``[E, 2 I, ...]``."""
    num_experts, num_rows, *rest = gate.shape
    return np.stack((gate, up), axis=2).reshape(num_experts, 2 * num_rows, *rest)


def _last_first(array: np.ndarray) -> np.ndarray:
    """Reverse the first axis."""
    found: np.ndarray = np.ascontiguousarray(array[::-1])
    return found
