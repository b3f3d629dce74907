"""A dllama ``.m`` file as a checkpoint, with Hugging Face names and rows. Weights must be finite.

The tokenizer is a ``.t`` file in the same directory. It is read elsewhere.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from tilewright.compiler.formats.ggml_blocks import Bytes, dequantise
from tilewright.errors import CheckpointError
from tilewright.models.architectures.table import architecture_of, check_model_type
from tilewright.models.checkpoints.base import (
    Rows,
    TensorMeta,
    TokenizerSource,
    content_hash,
    inner_part,
    outer_rows,
    row_range,
    unknown_tensor,
)
from tilewright.models.checkpoints.dllama.header import (
    DllamaHeader,
    DllamaTensor,
    read_header,
    tensors,
)
from tilewright.models.checkpoints.mapped_file import map_file, release
from tilewright.models.config import ModelConfig, RopeConfig

TOKENIZER_SUFFIX = ".t"
_AFFIXES = re.compile(r"^dllama_model_|[._-](?:f32|f16|q40|q80)$", re.IGNORECASE)


class DllamaCheckpoint:
    """An opened ``.m`` file. See `tilewright.models.checkpoints.base.Checkpoint`.

    The head is always a separate tensor, as in the file, even if the original was tied.

    Raises:
        CheckpointError: The file is truncated, corrupt or unsupported.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._map = map_file(path)
        self.header, self._header_bytes = read_header(memoryview(self._map), path)
        self._tensors = self._place(self._header_bytes)
        self.names: Mapping[str, TensorMeta] = {
            name: TensorMeta(tensor.shape, tensor.dtype, tensor.nbytes)
            for name, (_, tensor) in self._tensors.items()
        }
        self.config = config_of(self.header, path)

    @property
    def files(self) -> tuple[Path, ...]:
        return (self.path,)

    @property
    def tokenizer_source(self) -> TokenizerSource:
        """Return the ``.t`` file with the same name, or the only one in the directory.

        Raises:
            CheckpointError: The directory has neither.
        """
        own = self.path.with_suffix(TOKENIZER_SUFFIX)
        found = [own] if own.is_file() else sorted(self.path.parent.glob(f"*{TOKENIZER_SUFFIX}"))
        if len(found) != 1:
            raise CheckpointError(
                f"{self.path}: {len(found)} tokenizers beside it; allowed: {own.name}, or exactly "
                f"one {TOKENIZER_SUFFIX} file in its folder"
            )
        return TokenizerSource(found[0])

    def get(self, name: str, rows: Rows = None, columns: slice | None = None) -> Tensor:
        """Return a tensor or a slice.

        Raises:
            CheckpointError: The name is unknown, or a value is inf or NaN.
        """
        dtype, stored = self.stored(name, outer_rows(rows))
        shape = (len(stored), *self.names[name].shape[1:])
        values = dequantise(stored, dtype).reshape(shape)
        if values.numel() and not all(math.isfinite(end) for end in torch.aminmax(values.float())):
            raise CheckpointError(
                f"{self.path}: tensor {name} has values that are inf or NaN; allowed: finite values"
            )
        return inner_part(values, rows, columns)

    def stored(self, name: str, rows: slice | None = None) -> tuple[str, Bytes]:
        """Return the type (ggml's name) and bytes ``[rows, bytes per row]`` in Hugging Face order.

        Raises:
            CheckpointError: The name is unknown.
        """
        if name not in self._tensors:
            raise unknown_tensor(self.path, name, self._tensors)
        start, tensor = self._tensors[name]
        table: Bytes = np.frombuffer(self._map, np.uint8, tensor.nbytes, start)
        table = table.reshape(tensor.shape[0], -1)
        first, stop = row_range(rows, tensor.shape[0])
        order = _file_rows(tensor)
        taken: Bytes = table[first:stop].copy() if order is None else table[order[first:stop]]
        del table
        release(self._map, start, tensor.nbytes)
        return tensor.dtype, taken

    def stored_type(self, name: str) -> str:
        if name not in self.names:
            raise unknown_tensor(self.path, name, self.names)
        return self.names[name].dtype

    def content_hash(self) -> str:
        parts = [
            (name, tensor.nbytes, functools.partial(self._bytes, start))
            for name, (start, tensor) in self._tensors.items()
        ]
        digest = content_hash([(len(self._map), self._map[: self._header_bytes])], parts)
        release(self._map, 0, len(self._map))
        return digest

    def _bytes(self, at: int, low: int, high: int) -> bytes:
        return self._map[at + low : at + high]

    def _place(self, at: int) -> dict[str, tuple[int, DllamaTensor]]:
        """Return each tensor with its offset. The file must end exactly after the last tensor."""
        placed: dict[str, tuple[int, DllamaTensor]] = {}
        size = len(self._map)
        for tensor in tensors(self.header):
            if at + tensor.nbytes > size:
                raise CheckpointError(
                    f"{self.path}: tensor {tensor.name} of shape {list(tensor.shape)} "
                    f"({tensor.dtype}) ends at byte {at + tensor.nbytes} of {size}; the file is "
                    "cut short, or its header is not its own; allowed: a complete file"
                )
            placed[tensor.name] = at, tensor
            at += tensor.nbytes
        if at < size:
            raise CheckpointError(
                f"{self.path}: {size - at} bytes follow the last tensor, {tensor.name} of shape "
                f"{list(tensor.shape)} ({tensor.dtype}); allowed: none"
            )
        return placed


def config_of(header: DllamaHeader, path: Path) -> ModelConfig:
    """Return the model configuration from a ``.m`` header.

    Raises:
        CheckpointError: The architecture is unsupported.
    """
    model_type = check_model_type(header.model_type, f"{path}: arch (key 1)")
    architecture = architecture_of(model_type)
    values: dict[str, Any] = {
        "name": _AFFIXES.sub("", path.stem) or path.stem,
        "model_type": model_type,
        "vocab_size": header.vocab_size,
        "hidden_size": header.hidden_size,
        "intermediate_size": header.intermediate_size,
        "num_layers": header.num_layers,
        "num_heads": header.num_heads,
        "num_kv_heads": header.num_kv_heads,
        "head_dim": header.head_dim,
        "max_positions": header.max_positions,
        "norm_eps": header.norm_eps,
        "rope": RopeConfig(theta=float(header.rope_theta), scaling=header.scaling),
        "tie_embeddings": False,
        **architecture.fixed,
    }
    if header.num_experts:
        values["num_experts"] = header.num_experts
        values["experts_per_token"] = header.num_active_experts
        values["expert_size"] = header.expert_size
    config: ModelConfig = (architecture.config or ModelConfig)(**values)
    return config


def _file_rows(tensor: DllamaTensor) -> npt.NDArray[np.int64] | None:
    """Return the file row for each Hugging Face row. None: equal order."""
    if not tensor.num_heads:
        return None
    file_rows = np.arange(tensor.shape[0], dtype=np.int64).reshape(tensor.num_heads, -1, 2)
    return file_rows.swapaxes(1, 2).reshape(-1)
