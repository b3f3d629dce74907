"""The draft layer of a Hugging Face directory (``mtp.*``), as a checkpoint with a single layer."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from tilewright.errors import CheckpointError
from tilewright.models.checkpoints.base import Rows, TensorMeta
from tilewright.models.checkpoints.huggingface.checkpoint import (
    ELEMENT_BYTES,
    SafetensorsCheckpoint,
)
from tilewright.models.checkpoints.huggingface.config import config_of_hf
from tilewright.models.checkpoints.quantized.base import QuantizedTensor
from tilewright.models.config import HybridConfig

_FC = "mtp.fc.weight"
_HALVES = ("mtp.fc_embedding.weight", "mtp.fc_hidden.weight")
"""The columns of ``mtp.fc`` for the embedding, and those for the hidden state."""
_LAYER = re.compile(r"mtp\.layers\.(\d{1,6})\.")
_SHARED = ("model.embed_tokens.", "lm_head.")
_ALLOWED = 'allowed: a file with the draft layer, or --speculative-config without "mtp"'


class DraftLayerCheckpoint(SafetensorsCheckpoint):
    """A draft layer's tensors, with the model's embedding and head. The layer has index 0.

    Raises:
        CheckpointError: The draft layer is missing or unsupported. See also
            `SafetensorsCheckpoint`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        if _FC not in self.names:
            raise CheckpointError(f"{path}: {self._promise}, and no tensor {_FC}; {_ALLOWED}")
        fc = self.names.pop(_FC)
        rows, columns = fc.shape if len(fc.shape) == 2 else (0, 0)
        for name in _HALVES:
            self.names[name] = TensorMeta((rows, columns // 2), fc.dtype, fc.nbytes // 2)

    def _config_of(self, values: dict[str, Any]) -> HybridConfig:
        where = self.path / "config.json"
        config = config_of_hf(values, where=where)
        assert isinstance(config, HybridConfig)
        text: Any = values.get("text_config") or values
        count = text.get("mtp_num_hidden_layers") if isinstance(text, Mapping) else None
        self._promise = f"mtp_num_hidden_layers = {str(count)[:40]}"
        if count is None:
            self._promise = "no mtp_num_hidden_layers"
        if count not in (None, 0, 1):
            raise CheckpointError(f"{where}: {self._promise} is not read; allowed: 0, 1")
        if text.get("mtp_use_dedicated_embeddings"):
            key = "mtp_use_dedicated_embeddings"
            raise CheckpointError(f"{where}: {key} = true is not read; allowed: false")
        return dataclasses.replace(config, num_layers=1, linear_layers=(False,), dense_layers=())

    def _name_of(self, stored: str) -> str | None:
        if stored.startswith("mtp."):
            layer = _LAYER.match(stored)
            if layer is not None and int(layer[1]):
                raise CheckpointError(
                    f"{self.path}: {layer[0]}* is a second draft layer; allowed: a single layer"
                )
            return stored.replace("mtp.layers.0.", "model.layers.0.")
        name = super()._name_of(stored)
        return name if name is not None and name.startswith(_SHARED) else None

    def _take_quantized(self, values: Mapping[str, object]) -> dict[str, QuantizedTensor]:
        """Take quantized modules, if any. A quantized file often has a dense draft layer."""
        is_dense = all(meta.dtype in ELEMENT_BYTES for meta in self.names.values())
        return super()._take_quantized({} if is_dense else values)

    def get(self, name: str, rows: Rows = None, columns: slice | None = None) -> Tensor:
        if name not in _HALVES:
            return super().get(name, rows, columns)
        width = self.names[name].shape[1]
        first, last, _ = (columns or slice(None)).indices(width)
        start = _HALVES.index(name) * width
        whole = slice(None) if rows is None or isinstance(rows, tuple) else rows
        return self._read(_FC, (whole, slice(start + first, start + last)))

    def stored_type(self, name: str) -> str:
        if name not in _HALVES:
            return super().stored_type(name)
        return "F32" if _FC in self._quantized else self._own_type(_FC)
