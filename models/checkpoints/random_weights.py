"""Random weights in the place of a checkpoint: to measure speed without one.

Tensors are made where they are wanted, when they are asked for; nothing is kept.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from tilewright.models.checkpoints.base import (
    Rows,
    TensorMeta,
    TokenizerSource,
    inner_part,
    outer_rows,
    row_range,
    unknown_tensor,
)
from tilewright.models.config import ModelConfig
from tilewright.models.shapes import SHAPES, ShapeName

STD = 0.02
_DTYPE = torch.bfloat16
_SEEDS = 1 << 63


class RandomCheckpoint:
    """Normal bfloat16 tensors around 0, norms around 1; see `checkpoints.base.Checkpoint`.

    Equal for equal ``shape``, tensor and type of device; another type of device has other values,
    because its generator differs. ``expected``: shapes by tensor name. ``offsets``: what the model
    adds to a tensor, where it does; a norm's weights are around 1 with it.
    """

    def __init__(
        self,
        shape: ShapeName,
        config: ModelConfig,
        expected: Mapping[str, tuple[int, ...]],
        offsets: Mapping[str, float] | None = None,
    ) -> None:
        self._offsets = offsets or {}
        # all rows are drawn at once: those of a tensor read by rows stay until its last one
        self._walked: dict[tuple[str, str], Tensor] = {}
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
        """A source that cannot be read: `byte_tokenizer` makes the tokenizer of such a model."""
        return TokenizerSource(self.path)

    def get(self, name: str, rows: Rows = None, columns: slice | None = None) -> Tensor:
        """One tensor, or a part of it, on torch's default device.

        Raises:
            CheckpointError: a name that is not there.
        """
        if name not in self.names:
            raise unknown_tensor(self.path, name, self.names)
        device = torch.get_default_device()
        if rows is None and columns is None:
            return self._draw(name, device)
        key = name, str(device)
        if key not in self._walked:
            self._walked = {key: self._draw(name, device)}
        values = self._walked[key]
        start, stop = row_range(outer_rows(rows), values.shape[0])
        if stop == values.shape[0] and columns is None:
            self._walked = {}
        return inner_part(values[start:stop], rows, columns).clone()

    def _draw(self, name: str, device: torch.device) -> Tensor:
        generator = torch.Generator(device)
        generator.manual_seed(self._seed(name, device.type))
        mean = 1.0 - self._offsets.get(name, 0.0) if name.endswith("norm.weight") else 0.0
        values = torch.empty(self.names[name].shape, dtype=_DTYPE, device=device)
        values.normal_(mean, STD, generator=generator)
        return values

    def stored_type(self, name: str) -> str:
        """``BF16``, of every tensor."""
        if name not in self.names:
            raise unknown_tensor(self.path, name, self.names)
        return self.names[name].dtype

    def content_hash(self) -> str:
        """An identity of the shape, 64 hexadecimal digits, the same on every device."""
        body = [str(self._shape), dict(SHAPES[self._shape.name])]
        digest = hashlib.sha256(b"tilewright random weights 1\n")
        digest.update(json.dumps(body, sort_keys=True).encode())
        return digest.hexdigest()

    def _seed(self, tensor: str, device_type: str) -> int:
        digest = hashlib.sha256(f"{self._shape}\n{tensor}\n{device_type}".encode()).digest()
        return int.from_bytes(digest[:8], "little") % _SEEDS
