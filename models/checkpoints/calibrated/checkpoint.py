"""A calibrated folder as a checkpoint: format codes, decoded or as bytes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tilewright.compiler.formats import STORED_NAMES, get_format
from tilewright.compiler.formats.coded_rows import decode_rows
from tilewright.compiler.formats.ggml_blocks import Bytes
from tilewright.errors import CheckpointError, one_line
from tilewright.models.checkpoints.base import (
    Rows,
    TensorMeta,
    TokenizerSource,
    content_hash,
    inner_part,
    outer_rows,
    row_range,
    shown,
    unknown_tensor,
)
from tilewright.models.checkpoints.calibrated.manifest import (
    MANIFEST,
    TOKENIZER,
    StoredTensor,
    config_of_values,
    read_manifest,
)

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def part_name(name: str, part: tuple[int, int]) -> str:
    """Return the file key for some tensor rows."""
    return f"{name}:{part[0]}-{part[1]}"


class CalibratedCheckpoint:
    """An opened calibrated folder; see `tilewright.models.checkpoints.base.Checkpoint`.

    Raises:
        CheckpointError: a file that is missing, cut short or corrupt.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self.facts = self.manifest.facts
        self.config = config_of_values(self.manifest.config, path / MANIFEST)
        names = sorted({tensor.file for tensor in self.manifest.tensors.values()})
        if any(Path(name).name != name for name in names):
            raise CheckpointError(
                f"{path / MANIFEST}: a file outside of the folder; allowed: names without a folder"
            )
        self._files = {name: self._open(name) for name in names}
        self._columns: dict[str, Tensor] = {}
        self.names = {
            name: TensorMeta(tensor.shape, self._type(tensor), self._num_bytes(tensor))
            for name, tensor in self.manifest.tensors.items()
        }

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path / MANIFEST, *(self.path / name for name in self._files))

    @property
    def origin(self) -> tuple[str, str]:
        """The method with its text, and the original checkpoint's hash."""
        return self.facts.text_line, self.facts.original

    @property
    def tokenizer_source(self) -> TokenizerSource:
        return TokenizerSource(self.path / TOKENIZER)

    def calibrated(self, name: str) -> tuple[str, str] | None:
        """Return format and block axis for a tensor's codes. None: no codes."""
        tensor = self._tensor(name)
        return (tensor.format, tensor.axis) if tensor.parts else None

    def coded(self, name: str, rows: tuple[int, int]) -> Tensor:
        """Return the bytes of a tensor's rows, as they were written together."""
        return self._read(part_name(name, rows), self._tensor(name))

    def get(self, name: str, rows: Rows = None, columns: slice | None = None) -> Tensor:
        tensor = self._tensor(name)
        if not tensor.parts:
            if not tensor.shape:
                return self._read(name, tensor)
            ends = row_range(outer_rows(rows), tensor.shape[0])
            return inner_part(self._read(name, tensor, *ends), rows, columns)
        start, stop = row_range(outer_rows(rows), tensor.shape[0])
        inner = math.prod(tensor.shape[1:-1])
        values = [
            self._decoded(name, tensor, part, low, high)
            for part, low, high in _overlaps(tensor, start * inner, stop * inner)
        ]
        joined = torch.cat(values) if values else torch.empty(0, tensor.shape[-1])
        return inner_part(joined.reshape(stop - start, *tensor.shape[1:]), rows, columns)

    def stored(self, name: str, rows: slice | None = None) -> tuple[str, Bytes]:
        """Return ggml's type name, and bytes ``[rows, row bytes]``."""
        tensor = self._tensor(name)
        assert tensor.axis == "in" and tensor.format in STORED_NAMES, name
        start, stop = row_range(rows, tensor.shape[0])
        inner = math.prod(tensor.shape[1:-1])
        found = [
            self._read(part_name(name, part), tensor, low, high)
            for part, low, high in _overlaps(tensor, start * inner, stop * inner)
        ]
        data: Bytes = np.concatenate([each.numpy() for each in found])
        return STORED_NAMES[tensor.format], data.reshape(stop - start, -1)

    def stored_type(self, name: str) -> str:
        return self._type(self._tensor(name))

    def content_hash(self) -> str:
        manifest = (self.path / MANIFEST).read_bytes()
        tensors = []
        for name in self._files:
            path = self.path / name

            def read(low: int, high: int, path: Path = path) -> bytes:
                with path.open("rb") as file:
                    file.seek(low)
                    return file.read(high - low)

            tensors.append((name, path.stat().st_size, read))
        return content_hash([(len(manifest), manifest)], tensors)

    def _tensor(self, name: str) -> StoredTensor:
        if name not in self.manifest.tensors:
            raise unknown_tensor(self.path, name, self.manifest.tensors)
        return self.manifest.tensors[name]

    def _type(self, tensor: StoredTensor) -> str:
        if tensor.format in _FLOATS:
            return tensor.format
        return STORED_NAMES.get(tensor.format, "F32") if tensor.axis != "out" else "F32"

    def _num_bytes(self, tensor: StoredTensor) -> int:
        if tensor.format in _FLOATS:
            return math.prod(tensor.shape) * _FLOATS[tensor.format].itemsize
        axis = -2 if tensor.axis == "out" else -1
        return get_format(tensor.format).nbytes(tensor.shape, axis=axis)

    def _decoded(
        self, name: str, tensor: StoredTensor, part: tuple[int, int], low: int, high: int
    ) -> Tensor:
        """Return the rows ``[low, high)`` in float32."""
        key, format_ = part_name(name, part), get_format(tensor.format)
        if tensor.axis != "out":
            return decode_rows(format_, self._read(key, tensor, low, high), tensor.shape[-1])
        if key not in self._columns:  # callers read a tensor's rows in turn
            coded = self._read(key, tensor)
            self._columns = {key: decode_rows(format_, coded, part[1] - part[0]).T.contiguous()}
        return self._columns[key][low:high]

    def _open(self, name: str) -> Any:
        try:
            return safe_open(self.path / name, framework="pt", device="cpu")
        except (SafetensorError, OSError, ValueError) as error:
            raise self._unreadable(name, error) from None

    def _read(
        self, key: str, tensor: StoredTensor, low: int | None = None, high: int | None = None
    ) -> Tensor:
        """Return a stored tensor, or its rows ``[low, high)``, as a copy."""
        file = self._files[tensor.file]
        try:
            found: Tensor = (
                file.get_tensor(key) if low is None else file.get_slice(key)[slice(low, high)]
            )
        except (SafetensorError, OSError) as error:
            raise self._unreadable(tensor.file, error) from None
        return found.clone(memory_format=torch.contiguous_format)

    def _unreadable(self, name: str, error: Exception) -> CheckpointError:
        return CheckpointError(
            f"{self.path / shown(name)}: cut short or corrupt safetensors file: {one_line(error)}; "
            "allowed: a complete file"
        )


def _overlaps(
    tensor: StoredTensor, start: int, stop: int
) -> list[tuple[tuple[int, int], int, int]]:
    """Return the parts with rows in ``[start, stop)``, and those rows' indices in each part."""
    found = []
    for part in tensor.parts:
        low, high = max(start, part[0]), min(stop, part[1])
        if low < high:
            found.append((part, low - part[0], high - part[0]))
    return found
