"""Random weights instead of a checkpoint, to measure speed without a model file.

Tensors are generated on demand and not stored. Each block of values has its own seed, so a slice
needs only its blocks.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from tilewright.models.checkpoints.base import (
    Rows,
    TensorMeta,
    TokenizerSource,
    outer_rows,
    row_range,
    unknown_tensor,
)
from tilewright.models.config import ModelConfig
from tilewright.models.shapes import SHAPES, ShapeName

STD = 0.02
BLOCK = 1 << 18
"""Number of values per block."""

_DTYPE = torch.bfloat16
_SEEDS = 1 << 63
_NORMS = ("norm.weight", "norm1.weight", "norm2.weight", "norm_pre.weight", "norm_post.weight")
_STRIP = 1 << 24  # number of values generated at a time to select columns


class RandomCheckpoint:
    """Normal bfloat16 tensors around 0, norms around 1. See `checkpoints.base.Checkpoint`.

    Values depend on ``shape``, tensor name and device type, but not on the slice. Device types
    differ because their generators do.

    Args:
        shape: The shape's name.
        config: Model configuration.
        expected: Shapes by tensor name.
        offsets: Numbers the model adds to tensors. Norms are around 1 after this addition.
    """

    def __init__(
        self,
        shape: ShapeName,
        config: ModelConfig,
        expected: Mapping[str, tuple[int, ...]],
        offsets: Mapping[str, float] | None = None,
    ) -> None:
        self._offsets = offsets or {}
        self._shape = shape
        self.path = Path(str(shape))
        self.files: tuple[Path, ...] = ()
        self.config = config
        self.names: Mapping[str, TensorMeta] = {
            name: TensorMeta(sizes, "BF16", math.prod(sizes) * _DTYPE.itemsize)
            for name, sizes in expected.items()
        }

    @property
    def tokenizer_source(self) -> TokenizerSource:
        """Return an unreadable source: `byte_tokenizer` makes the tokenizer of these models."""
        return TokenizerSource(self.path)

    def get(self, name: str, rows: Rows = None, columns: slice | None = None) -> Tensor:
        """Return a tensor or a slice on torch's default device.

        Raises:
            CheckpointError: The name is unknown.
        """
        if name not in self.names:
            raise unknown_tensor(self.path, name, self.names)
        device, shape = torch.get_default_device(), self.names[name].shape
        start, stop = row_range(outer_rows(rows), shape[0])
        if len(shape) == 1:
            vector = self._draw(name, device, start, stop)
            return vector if columns is None else vector[columns].clone()
        if isinstance(rows, tuple):
            first, last = row_range(rows[1], shape[1])
            runs = [(at * shape[1] + first, at * shape[1] + last) for at in range(start, stop)]
            counts: tuple[int, ...] = (stop - start, last - first, *shape[2:-1])
            assert len(shape) == 3, "pairs of rows are those of three axes"
        else:
            inner = math.prod(shape[1:-1])
            runs, counts = [(start * inner, stop * inner)], (stop - start, *shape[1:-1])
        kept = row_range(columns, shape[-1])
        parts = [part for run in runs for part in self._rows(name, device, run, kept)]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts)
        return joined.view(*counts, kept[1] - kept[0])

    def _rows(
        self, name: str, device: torch.device, run: tuple[int, int], kept: tuple[int, int]
    ) -> Iterator[Tensor]:
        """Yield a range of rows, counted over all axes except the last, with some columns."""
        width = self.names[name].shape[-1]
        if kept == (0, width):
            yield self._draw(name, device, run[0] * width, run[1] * width).view(-1, width)
            return
        step = max(1, _STRIP // width)
        for begin in range(run[0], max(run[1], run[0] + 1), step):
            end = min(begin + step, run[1])
            values = self._draw(name, device, begin * width, end * width)
            yield values.view(-1, width)[:, kept[0] : kept[1]].clone()

    def _draw(self, name: str, device: torch.device, start: int, stop: int) -> Tensor:
        """Return values ``[start, stop)`` in flat order."""
        total = math.prod(self.names[name].shape)
        generator = torch.Generator(device)
        mean = 1.0 - self._offsets.get(name, 0.0) if name.endswith(_NORMS) else 0.0
        begin = start // BLOCK * BLOCK
        end = min(-(-stop // BLOCK) * BLOCK, total) if stop > start else begin
        values = torch.empty(end - begin, dtype=_DTYPE, device=device)
        for each in range(begin, end, BLOCK):
            generator.manual_seed(self._seed(name, device.type, each // BLOCK))
            block = values[each - begin : each - begin + BLOCK]
            block.normal_(mean, STD, generator=generator)
        part = values[start - begin : stop - begin]
        return part if part.numel() == values.numel() else part.clone()

    def stored_type(self, name: str) -> str:
        """Return ``BF16`` for every tensor."""
        if name not in self.names:
            raise unknown_tensor(self.path, name, self.names)
        return self.names[name].dtype

    def content_hash(self) -> str:
        """Return an identity of the shape, 64 hexadecimal digits, equal on every device."""
        body = [str(self._shape), dict(SHAPES[self._shape.name])]
        digest = hashlib.sha256(b"tilewright random weights 2\n")
        digest.update(json.dumps(body, sort_keys=True).encode())
        return digest.hexdigest()

    def _seed(self, tensor: str, device_type: str, block: int) -> int:
        text = f"{self._shape}\n{tensor}\n{device_type}" + (f"\n{block}" if block else "")
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") % _SEEDS
